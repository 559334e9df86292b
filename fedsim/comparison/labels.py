"""Rename the keys and values of a comparison for its tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fedsim.comparison.axes import Axes, label
from fedsim.comparison.compared_runs import ComparedRuns
from fedsim.comparison.rows import SEED
from fedsim.errors import ExperimentError, show
from fedsim.hints.meanings import nearest

C = TypeVar("C", bound=ComparedRuns)


def labels_of(words: Iterable[str], axes: Axes) -> dict[str, str]:
    """Return {old name: new name} from words such as "weighted_mean=FedAvg" or "krum,f=2=Krum (f=2)"."""
    names = sorted(_names_in(axes), key=len, reverse=True)  # names may contain "="
    labels = {}
    for word in words:
        name = next((name for name in names if word.startswith(f"{name}=")), word.partition("=")[0])
        labels[name] = word.removeprefix(name).removeprefix("=")
        if other := next((other for other in names if f",{other}=" in f",{labels[name]}"), None):
            raise ExperimentError(
                f"label {show(word)}: would rename only {name}; write --label for each name, as in --label {name}=A "
                f"--label {other}=B"
            )
    check_labels(labels, axes)
    return labels


def check_labels(labels: Mapping[str, str], axes: Axes) -> None:
    """Raise ExperimentError if an old name is not in `axes`, or if two keys or two values would have the same name."""
    names = _names_in(axes)
    for name, text in labels.items():
        if name not in names:
            raise ExperimentError(f"label {show(name)}: is not a compared key or value; {nearest(name, names)}")
        if not (isinstance(text, str) and text.strip()):
            raise ExperimentError(f"label {show(name)} = {show(text)}: must be a non-empty string, as in {name}=NEW")
    for group in (axes, *(map(label, values) for values in axes.values())):
        count = Counter(labels.get(name, name) for name in group)
        if twice := [text for text in count if count[text] > 1]:
            raise ExperimentError(f"label {show(twice[0])}: would name two keys or values; use different labels")


def _names_in(axes: Axes) -> list[str]:
    """Return the compared keys except the seed, and the names of their values, as tables and figures show them."""
    named = {key: values for key, values in axes.items() if key != SEED}
    return list(dict.fromkeys([*named, *(label(value) for values in named.values() for value in values)]))


def renamed(comparison: C, labels: Mapping[str, str]) -> C:
    """Return the comparison with other names of compared keys and values.

    Args:
        comparison: the comparison.
        labels: new name of each key and value to rename, by the name that tables show.

    Raises ExperimentError as `check_labels` does.
    """
    check_labels(labels, comparison.axes)

    def key(name: str) -> str:
        return labels.get(name, name)

    def value(old: Any) -> Any:
        return labels.get(label(old), old)

    def by_key(table: Mapping[str, Any]) -> dict[str, Any]:
        return {key(name): content for name, content in table.items()}

    axes, whole = (
        {key(name): [*map(value, values)] for name, values in table.items()}
        for table in (comparison.axes, comparison.whole)
    )
    runs = [
        replace(
            run,
            point=by_key({name: value(content) for name, content in run.point.items()}),
            position=by_key(run.position),
        )
        for run in comparison.runs
    ]
    return replace(comparison, axes=axes, whole=whole, runs=runs, settings=comparison.settings.renamed(key))
