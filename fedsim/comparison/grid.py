"""A grid: one experiment for each combination of the values on its axes, all of them checked."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedsim.comparison.axes import (
    SEED,
    Axes,
    axes_of_tables,
    canonical,
    changes_of,
    describe_point,
    label,
    readable_id,
    split_words,
)
from fedsim.errors import ExperimentError, cut, show
from fedsim.experiment import Experiment, default_name
from fedsim.loading import (
    GRID,
    Change,
    changes_in,
    describe,
    drop_default_name,
    experiment_of,
    file_of,
    key_changed,
    override,
    parse_word,
)
from fedsim.permission import words_of
from fedsim.preparation import task_of
from fedsim.system.devices import resolve_device

TARGET = "target"
MOST_RUNS = 100_000  # all of which are checked, and kept, before the first begins
LONGEST_ID = 100  # characters; file systems allow 255 bytes


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid: `id` names its folder, `point` holds its value on each axis."""

    id: str
    point: dict[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Grid:
    """What a comparison runs.

    Attributes:
        name: of the experiment; by default from what no axis varies.
        axes: the values of each key that is varied, in order.
        runs: one for each combination; the last axis varies fastest, and the seed fastest of all.
        engine_chosen: whether the experiment itself says with which engine, or how many processes, it runs, or is a
            race of processes.
        target: the test accuracy for which it is asked how long runs take to reach it; None: for none.
    """

    name: str
    axes: Axes
    runs: list[PlannedRun]
    engine_chosen: bool
    target: float | None = None

    @property
    def base(self) -> dict[str, Any]:
        """What all runs have in common beside the axes, as nested tables with all keys."""
        return common_tables(self.runs, self.axes)

    @property
    def compared(self) -> list[str]:
        """The axes whose values are compared: all but the seed."""
        return [key for key in self.axes if key != SEED]


def load_grid(
    source: Experiment | Mapping[str, Any] | str | Path | None = None,
    grid: Mapping[str, Any] | None = None,
    words: Iterable[str] = (),
    target: float | None = None,
    *,
    file: Path | None = None,
    allow_imports: bool = False,
    **changes: Any,
) -> Grid:
    """The grid that `source`, with its table [grid], describes.

    Args:
        source: as of `load_experiment`; a file may have a table [grid].
        grid: axes as [grid] has them; one takes the place of the source's axis of that key.
        words: as on the command line. `key=v1,v2` is an axis, and takes the place of one there was of that key;
            `key=value` sets one value in all runs, and an axis there was of that key is dropped.
        target: a test accuracy, which takes the place of the key `target` of [grid].
        file: where `source` and `grid` have been read, if that is not `source` itself.
        allow_imports: whether a file may name whatever can be imported; see `load_experiment`.
        changes: keys of the experiment, set in all runs after the words; an axis of such a key is dropped.

    Raises ExperimentError, one line per problem, where any of the runs cannot be run as described.
    """
    description = describe(source)
    axes: Axes = {}
    asked = None
    for tables in (description.pop(GRID, {}), grid or {}):
        if isinstance(tables, Mapping) and TARGET in tables:
            tables = dict(tables)
            asked = tables.pop(TARGET)
        axes.update(axes_of_tables(tables))
    target = asked if target is None else target
    more_axes, words = split_words(words)
    in_all = [parse_word(word) for word in words] + changes_in(changes)
    own = [value for _, value in in_all] + [more_axes, {} if file else grid]
    for keys, _ in in_all:
        axes.pop(".".join(keys), None)
    axes.update(more_axes)
    axes = {key: axes[key] for key in sorted(axes, key=lambda key: key == SEED)}  # a stable sort: the seed last
    _check_target(target)
    if not axes:
        raise ExperimentError(f"nothing to compare: {_how_to_compare(in_all)}")
    _leave_out_large_records(description)
    _check_number(axes)
    with words_of(file or file_of(source), own, allowed=allow_imports):
        drop_default_name(description)
        experiments, engine_chosen = _experiments(description, in_all, axes)
    points = points_of(axes)
    experiments = _named_alike(experiments, points)
    runs = [PlannedRun(*run) for run in zip(_ids(points), points, experiments, strict=True)]
    _refuse_equal_runs(runs)
    return Grid(runs[0].experiment.name, axes, runs, engine_chosen, target)


def _named_alike(experiments: list[Experiment], points: list[dict[str, Any]]) -> list[Experiment]:
    """The experiments with one name for all that have none, which does not depend on the values of the axes."""
    changes = [change for point in points for key, value in point.items() for change in changes_of(key, value)]
    name = default_name(experiments[0], {key_changed(*change) for change in changes})
    return [each if "name" in each.model_fields_set else _with_default_name(each, name) for each in experiments]


def _with_default_name(experiment: Experiment, name: str) -> Experiment:
    """The experiment with a name that the user did not choose, which later changes of the experiment replace."""
    named = experiment.model_copy(update={"name": name})
    named.model_fields_set.discard("name")
    return named


def _how_to_compare(changes: Iterable[Change]) -> str:
    """How several values are given; of a key that has a list, which is one value, with that key."""
    lists = [(".".join(keys), value) for keys, value in changes if isinstance(value, list) and len(value) > 1]
    for key, values in lists:
        return f"{key} has one value, a list; for several values write {key}={','.join(map(label, values))}"
    return "every key has one value; write several with commas, such as seed=0,1,2, or a table [grid] in a file"


def _check_number(axes: Axes) -> None:
    runs = math.prod(map(len, axes.values()))
    if runs > MOST_RUNS:
        raise ExperimentError(
            f"grid: its axes have {' x '.join(str(len(values)) for values in axes.values())} = {runs:,} combinations; "
            f"at most {MOST_RUNS:,}"
        )


def _check_target(target: Any) -> None:
    number = isinstance(target, (int, float)) and not isinstance(target, bool)
    if target is not None and not (number and 0 < target <= 1):
        raise ExperimentError(f"target = {show(target)}: must be a test accuracy, more than 0 and at most 1")


def common_tables(runs: Iterable[PlannedRun], axes: Iterable[str]) -> dict[str, Any]:
    """What the experiments of `runs` have in common beside the keys of `axes`, as nested tables."""
    common = functools.reduce(_common, (run.experiment.resolved() for run in runs))
    for key in axes:
        _remove(common, key.split("."))
    return common


def points_of(axes: Axes) -> list[dict[str, Any]]:
    """Every combination of values, the last axis fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _leave_out_large_records(description: dict[str, Any]) -> None:
    """Without model and curve, unless they are asked for: a comparison has many runs, and a picture of its own."""
    records = description.setdefault("records", {})
    if isinstance(records, dict):
        for name in ("model", "curve"):
            records.setdefault(name, False)


def _experiments(description: dict[str, Any], changes: list[Change], axes: Axes) -> tuple[list[Experiment], bool]:
    """The experiment of every point, and whether any of them says which engine it wants."""
    experiments, engine_chosen = [], False
    problems: dict[str, list[dict[str, Any]]] = {}  # by line: the points that have it
    models: dict[str, tuple[str, ...]] = {}
    for point in points_of(axes):
        own = [change for key, value in point.items() for change in changes_of(key, value)]
        tables = copy.deepcopy(description)
        try:
            _refuse_contradictions(changes, own)
            override(tables, [*changes, *copy.deepcopy(own)])
            experiments.append(experiment_of(tables))
            lines = _problems_here(experiments[-1], models)
        except ExperimentError as error:
            lines = error.lines
        for line in lines:
            problems.setdefault(line, []).append(point)
        says_how = not {"engine", "processes"}.isdisjoint(tables) or tables.get("mode") == "race"
        engine_chosen = engine_chosen or says_how
    if problems:
        raise ExperimentError(*(_with_points(line, points, len(points_of(axes))) for line, points in problems.items()))
    return experiments, engine_chosen


def _problems_here(experiment: Experiment, models: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What keeps an experiment that is right in itself from running here; `models` is what is known of models."""
    key = canonical([experiment.resolved()["model"], experiment.buffers])
    try:
        resolve_device(experiment.device)
        if key not in models:
            models[key] = ()
            task_of(experiment, torch.device("cpu"))  # makes the model
    except ExperimentError as error:
        models[key] = error.lines
    return models[key]


def _refuse_contradictions(changes: list[Change], own: list[Change]) -> None:
    """No two axes may set one key, nor an axis a key that is set for all runs: one of them would be without effect."""
    keys = [key_changed(*change) for change in own]
    for key in keys:
        if keys.count(key) > 1:
            raise ExperimentError(f"{key}: is set by two axes")
    for keys_changed, value in changes:
        key = key_changed(keys_changed, value)
        if key in keys:
            raise ExperimentError(f"{key} = {show(value)}: an axis sets that too")


def _with_points(line: str, points: list[dict[str, Any]], of: int) -> str:
    if len(points) == of:
        return line
    more = f" (and {len(points) - 1} more of {of} runs)" if len(points) > 1 else ""
    return f"{cut(describe_point(points[0]))}: {line}{more}"


def _refuse_equal_runs(runs: list[PlannedRun]) -> None:
    first: dict[str, PlannedRun] = {}
    for run in runs:
        other = first.setdefault(canonical(run.experiment.resolved()), run)
        if other is not run:
            one, two = describe_point(other.point), describe_point(run.point)
            raise ExperimentError(f"{one} and {two}: are one and the same experiment")


def _ids(points: list[dict[str, Any]]) -> list[str]:
    """A readable name for each point, which depends on other points only where two would have the same."""
    names = [readable_id(point) for point in points]
    ids = []
    for name, point in zip(names, points, strict=True):
        digest = hashlib.blake2b(canonical(point).encode(), digest_size=4).hexdigest()
        if len(name) > LONGEST_ID:
            name = f"{name[:LONGEST_ID]}-{digest}"
        elif sum(name.lower() == other.lower() for other in names) > 1:
            name = f"{name}-{digest}"
        ids.append(name)
    return ids


def _common(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The keys of nested tables that have the same value in both."""
    common = {}
    for key in a.keys() & b.keys():
        if isinstance(a[key], dict) and isinstance(b[key], dict):
            common[key] = _common(a[key], b[key])
        elif a[key] == b[key]:
            common[key] = a[key]
    return {key: common[key] for key in a if key in common}


def _remove(tables: dict[str, Any], keys: list[str]) -> None:
    for key in keys[:-1]:
        tables = tables.get(key, {})
    tables.pop(keys[-1], None)
