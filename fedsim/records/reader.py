"""Reading run folders and grid folders.

A folder may come from an unknown author, or from a run that is not finished: optional files may be missing, and the
last line of the metrics may be incomplete. Any other damage is an error with its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from fedsim.config.files import read_toml
from fedsim.core.input_limits import problem_with_words
from fedsim.core.objects import ObjectName, with_objects
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.errors import RecordError, cut, printable, show
from fedsim.records.combinations import canonical
from fedsim.records.comparison_settings import NO_SETTINGS, SETTINGS, ComparisonSettings
from fedsim.records.early_stopping import stop_reason, stored_stop
from fedsim.records.history import (
    METRICS,
    first_problem,
    noted_stop,
    read_file,
    read_metrics,
    read_object,
)
from fedsim.records.progress import Progress, progress_of
from fedsim.records.record import Count, RoundRecord
from fedsim.records.run_folder import ENVIRONMENT, EXPERIMENT
from fedsim.records.run_metrics import byzantine_weight, run_metrics
from fedsim.records.worker_results import newest_table, read_csv
from fedsim.system.files import is_file, is_outside

PARTITION, GRID, ERROR = "partition.json", "grid.json", "error.txt"
ID = r"^[A-Za-z0-9][A-Za-z0-9._+=,-]*$"  # of a run in a grid: a folder name that stays inside its parent

# Limits on files, much larger than any run writes.
MOST_PARTITION_BYTES, MOST_GRID_BYTES = 2**28, 2**26
MOST_ERROR_BYTES = 2**24


class LenientModel(BaseModel):
    """The known keys of an object in a file; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class StoredPartition(LenientModel):
    """The number of samples of each class of each worker, and the Byzantine workers.

    The counts of a virtual population are those of the sampled `workers`.
    """

    counts: list[list[Count]] = []
    workers: list[Count] | None = None
    population: Count | None = None
    byzantine: list[Count] = []


class GridEntry(LenientModel):
    """One run of a grid: its values on the axes, and its folder."""

    id: Annotated[str, StringConstraints(pattern=ID, max_length=255)]
    point: dict[str, Any]
    folder: str


class GridFile(LenientModel):
    """grid.json."""

    name: str
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]]
    base: dict[str, Any] = {}
    runs: list[GridEntry]
    settings: ComparisonSettings = NO_SETTINGS

    @model_validator(mode="before")
    @classmethod
    def _gather_settings(cls, content: Any) -> Any:
        """In the file, the settings lie beside the other keys."""
        if not isinstance(content, dict):
            return content
        return {"settings": {key: content[key] for key in SETTINGS if key in content}} | content


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    experiment: dict[str, Any]  # empty if the file is missing
    environment: dict[str, Any]
    history: list[RoundRecord]
    torn: bool  # whether the last line is incomplete
    partition: StoredPartition
    workers: WorkerResults | None  # the last tests of single workers

    @property
    def name(self) -> str:
        return cut(str(self.experiment.get("name", self.folder.resolve().name)))

    @property
    def seed(self) -> int:
        seed = self.experiment.get("seed")
        return seed if isinstance(seed, int) else 0

    @property
    def planned(self) -> int | None:
        """The number of rounds that the experiment asks for."""
        rounds = self.experiment.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def finished(self) -> bool:
        return bool(self.history) and (len(self.history) >= (self.planned or 0) or self.stopped is not None)

    @cached_property
    def stopped(self) -> str | None:
        """Why it ended before its last round; None if it did not."""
        return stop_reason(self.history, stored_stop(self.experiment)) or noted_stop(self.folder, len(self.history))

    @cached_property
    def progress(self) -> list[Progress]:
        """The progress after each round."""
        return progress_of(self.history, self.experiment)

    @cached_property
    def byzantine(self) -> frozenset[int]:
        return frozenset(self.partition.byzantine)

    @cached_property
    def byzantine_weight(self) -> float | None:
        return byzantine_weight(self.history, self.byzantine) if self.byzantine else None


@dataclass(frozen=True)
class GridRun(Run):
    """One run of a grid, begun or not; `point` has its value on each axis, `place` the index of that value."""

    id: str
    point: dict[str, Any]
    place: dict[str, int]
    error: str | None  # the first line of its error
    target: float | None  # as of the grid

    @property
    def finished(self) -> bool:
        return super().finished and self.error is None

    @cached_property
    def stopped(self) -> str | None:
        """As of `Run`, except that a run which `StopRun` ended is not finished: a comparison continues it."""
        return stop_reason(self.history, stored_stop(self.experiment))

    @cached_property
    def metrics(self) -> dict[str, float | None]:
        """The numbers of a finished run by name, see `run_metrics`."""
        return run_metrics(self.history, self.progress, self.target) if self.finished else {}

    @property
    def state(self) -> str:
        """Its finished rounds, or its error."""
        if self.error is not None:
            return f"failed: {self.error}"
        return f"{len(self.history)} of {self.planned} rounds" if self.history else "not begun"


@dataclass(frozen=True)
class StoredGrid:
    """A grid folder."""

    folder: Path
    name: str
    axes: dict[str, list[Any]]
    runs: list[GridRun]
    settings: ComparisonSettings = NO_SETTINGS

    @property
    def compared(self) -> list[str]:
        """The axes that are compared: all but the seed and those along which values are chosen."""
        return self.settings.compared(list(self.axes))


def read_records(folder: Path) -> Run | StoredGrid:
    """The run or the grid in a folder.

    Raises RecordError (ExperimentError for invalid TOML) if it is neither, has no finished round, or is damaged.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; expected that of a run or of a grid")
    if (folder / GRID).is_file():
        return read_grid(folder)
    if not is_file(folder / METRICS):
        raise RecordError(f"{folder}: neither a run (it has no {METRICS}) nor a grid (it has no {GRID})")
    run = read_run(folder)
    if not run.history:
        raise RecordError(f"{folder / METRICS}: no round is finished yet")
    return run


def read_run(folder: Path) -> Run:
    """The run in a folder; files that are missing are empty."""
    return Run(**_content_of(folder))


def _content_of(folder: Path) -> dict[str, Any]:
    """The fields of a `Run`."""
    history, torn = read_metrics(folder / METRICS) if is_file(folder / METRICS) else ([], False)
    table = newest_table(folder)
    return {
        "folder": folder,
        "experiment": read_toml(folder / EXPERIMENT, folder) if is_file(folder / EXPERIMENT) else {},
        "environment": read_object(folder / ENVIRONMENT) if is_file(folder / ENVIRONMENT) else {},
        "history": history,
        "torn": torn,
        "partition": _read_partition(folder / PARTITION) if is_file(folder / PARTITION) else StoredPartition(),
        "workers": read_csv(table) if table else None,
    }


def _read_partition(path: Path) -> StoredPartition:
    partition = _validated(StoredPartition, path, MOST_PARTITION_BYTES)
    if len({len(row) for row in partition.counts}) > 1:
        raise RecordError(f"{path}: counts: every worker must have one number per class")
    if partition.workers is not None and len(partition.workers) != len(partition.counts):
        raise RecordError(
            f"{path}: counts: has {len(partition.counts)} workers, and workers has {len(partition.workers)}"
        )
    return partition


def read_grid_file(path: Path, objects: Iterable[ObjectName] = ()) -> GridFile:
    """The content of a grid.json, with `objects` in the place of their names."""
    file = _validated(GridFile, path, MOST_GRID_BYTES)
    if problem := problem_with_words(file.model_dump()):
        raise RecordError(f"{path}: {problem}")
    return GridFile.model_validate(with_objects(file.model_dump(), objects))


def read_grid(folder: Path) -> StoredGrid:
    """The grid in a folder, with its runs."""
    path = folder / GRID
    file = read_grid_file(path)
    positions = {axis: _positions(values) for axis, values in file.axes.items()}
    runs, places, folders, target = [], set(), set(), file.settings.target
    for index, entry in enumerate(file.runs):
        where = f"{path}: runs.{index}"
        place = {axis: _position(entry, axis, known, where) for axis, known in positions.items()}
        if tuple(place.values()) in places:
            raise RecordError(f"{where}.point: another run has the same")
        places.add(tuple(place.values()))
        run_folder = folder / entry.folder
        if is_outside(run_folder, folder):
            raise RecordError(f"{where}.folder = {show(entry.folder)}: must lie in the grid's folder")
        if run_folder.resolve() in folders:
            raise RecordError(f"{where}.folder = {show(entry.folder)}: is another run's")
        folders.add(run_folder.resolve())
        error = _error_in(run_folder / ERROR)
        content = _content_of(run_folder)
        runs.append(GridRun(**content, id=entry.id, point=entry.point, place=place, error=error, target=target))
    if not any(entry.history for entry in runs):
        raise RecordError(f"{folder}: no round of its {len(runs)} runs is finished yet")
    return StoredGrid(folder, file.name, file.axes, runs, file.settings.known_on(file.axes))


def _positions(values: list[Any]) -> dict[str, int]:
    """The index of each value of an axis, by its JSON text; the first of equal values."""
    return {canonical(value): position for position, value in reversed(list(enumerate(values)))}


def _position(entry: GridEntry, axis: str, known: dict[str, int], where: str) -> int:
    """The index of a run's value on an axis."""
    if axis not in entry.point:
        raise RecordError(f"{where}.point: has no value of the axis {show(axis)}")
    value = entry.point[axis]
    if canonical(value) not in known:
        raise RecordError(f"{where}.point: {show(value)} is not on the axis {show(axis)}")
    return known[canonical(value)]


Model = TypeVar("Model", bound=BaseModel)


def _validated(model: type[Model], path: Path, most: int) -> Model:
    try:
        return model.model_validate_json(read_file(path, most))
    except ValidationError as error:
        raise RecordError(f"{path}: {first_problem(error)}") from None


def _error_in(path: Path) -> str | None:
    """The first line of a file that says why a run failed; None if there is no such file."""
    return error_line(read_file(path, MOST_ERROR_BYTES).decode(errors="replace")) if is_file(path) else None


def error_line(text: str) -> str:
    """The first line of a text that says why a run failed."""
    return printable(text.strip().partition("\n")[0])
