"""Read the file `comparison.json` in the folder of a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from fedsim.comparison.rows import NO_SETTINGS, SETTINGS, ComparisonSettings, canonical
from fedsim.core.input_limits import problem_with_words
from fedsim.core.objects import ObjectName, with_objects
from fedsim.errors import RecordError
from fedsim.records.reader import LenientModel, validated

COMPARISON = "comparison.json"
ID = r"^[A-Za-z0-9][A-Za-z0-9._+=,-]*$"  # run IDs in a comparison are folder names that cannot leave the parent folder
MOST_BYTES = 2**26  # much more than any comparison writes


class ComparisonEntry(LenientModel):
    """One run in the file `comparison.json`: its ID, its compared values, and its folder."""

    id: Annotated[str, StringConstraints(pattern=ID, max_length=255)]
    point: dict[str, Any]
    folder: str


class ComparisonFile(LenientModel):
    """Content of the file `comparison.json`: the compared settings, further settings, and the list of runs."""

    name: str
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]]
    base: dict[str, Any] = Field({})
    runs: list[ComparisonEntry]
    settings: ComparisonSettings = NO_SETTINGS
    warnings: list[str] = Field([])

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, content: Any) -> Any:
        """Collect the settings of the comparison in one attribute. In the file, they are separate keys."""
        if not isinstance(content, dict):
            return content
        return {"settings": {key: content[key] for key in SETTINGS if key in content}} | content


def positions_in(axes: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, int]]:
    """Return, for each compared setting, a dict from the JSON text of each value to the value's index."""
    return {
        axis: {canonical(value): index for index, value in reversed(list(enumerate(values)))}
        for axis, values in axes.items()
    }


def read_comparison_file(path: Path, objects: Iterable[ObjectName] = ()) -> ComparisonFile:
    """Return the content of a `comparison.json` file.

    The file contains only the names of Python objects. `objects` are the objects to insert for these names.
    """
    file = validated(ComparisonFile, path, MOST_BYTES)
    if problem := problem_with_words(file.model_dump()):
        raise RecordError(f"{path}: is damaged: {problem}")
    return ComparisonFile.model_validate(with_objects(file.model_dump(), objects))
