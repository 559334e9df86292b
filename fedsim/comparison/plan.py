"""Plan a comparison: build and check one experiment for each combination of axis values, and check the settings."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedsim.clients import PersonalModel
from fedsim.comparison.axes import (
    Axes,
    apply_words,
    axes_of_tables,
    axis_called,
    changes_of,
    describe_point,
    label,
    readable_id,
    shape_of,
    with_points,
)
from fedsim.comparison.rows import NO_SETTINGS, SEED, SETTINGS, ComparisonSettings, canonical
from fedsim.config.experiment import Experiment, default_name
from fedsim.config.load import COMPARISON, describe, drop_default_name, experiment_of, file_of, with_data
from fedsim.config.overrides import (
    Change,
    Removed,
    changes_in,
    component_table,
    key_changed,
    override,
    removed_warnings,
)
from fedsim.config.validation import (
    LACKS_LOCAL_TESTS,
    frozen_statistics,
    problem_with_worker_tests,
    rarely_intended,
    settings_without_effect,
)
from fedsim.core.import_policy import untrusted_config
from fedsim.core.input_limits import leaves_of
from fedsim.core.learning_task import correct_of
from fedsim.core.objects import plain
from fedsim.data.sources import data_loaded_once
from fedsim.errors import DataError, ExperimentError, SettingWarning, show
from fedsim.hints.meanings import meaning, nearest
from fedsim.hints.names import closest
from fedsim.records.record import METRICS, RoundRecord, metric_called, metrics_in
from fedsim.records.worker_results import METRIC as OF_WORKERS
from fedsim.runs.setup import task_of
from fedsim.system.devices import resolve_device

MOST_RUNS = 100_000  # all runs are checked, and kept in memory, before the first run starts
LONGEST_ID = 100  # characters; file systems allow 255 bytes
BY_NAME = tuple(f"{metric.key}." for metric in METRICS if "{}" in metric.label)  # metrics with names chosen at run time
KEYS = [metric.key for metric in METRICS if "{}" not in metric.label]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison.

    Attributes:
        id: name of the run's folder.
        point: the value of each compared setting, by key.
        experiment: the experiment to run.
    """

    id: str
    point: dict[str, Any]
    experiment: Experiment

    @functools.cached_property
    def tables(self) -> dict[str, Any]:
        """Return all settings of the run, including defaults, as nested dicts."""
        return self.experiment.resolved()


@dataclass(frozen=True)
class ComparisonPlan:
    """The runs of a comparison.

    Attributes:
        name: name of the experiment.
        axes: the compared settings: a list of values for each key.
        runs: one run for each combination of values. The seed varies fastest.
        engine_chosen: whether an experiment chooses how it uses processes (by `engine`, `processes` or mode "race").
        settings: settings of the comparison itself, such as the metric.
        left_out: one line of text for each reason why combinations were left out.
    """

    name: str
    axes: Axes
    runs: list[PlannedRun]
    engine_chosen: bool
    settings: ComparisonSettings = NO_SETTINGS
    left_out: list[str] = field(default_factory=list)

    @property
    def base(self) -> dict[str, Any]:
        """The settings of the experiment before the compared values are applied, as nested dicts."""
        return common_tables(self.runs)

    @property
    def shape(self) -> str:
        """The number of values of each compared setting, such as "3 aggregate.rule x 2 seed"."""
        return shape_of(self.axes)

    @functools.cached_property
    def warnings(self) -> list[str]:
        """Return one line for each setting without effect, or with an effect that users rarely intend."""
        groups: dict[str, list[PlannedRun]] = {}  # runs that differ only in the seed
        for run in self.runs:
            groups.setdefault(canonical({**run.tables, SEED: None}), []).append(run)
        first = [runs[0].experiment for runs in groups.values()]
        points = [run.point for run in self.runs]
        found = dict.fromkeys(settings_without_effect(*first), points)
        for runs in groups.values():
            for line in rarely_intended(runs[0].experiment):
                found[line] = [*found.get(line, ()), *(run.point for run in runs)]
        lines = [with_points(line, affected, points) for line, affected in found.items()]
        for run in distinct(self.runs, lambda experiment: [experiment.resolved()["model"], experiment.buffers]):
            lines += frozen_statistics(run.experiment)
        if self.settings.metric is None and (untrained := untrained_part(run.experiment for run in self.runs)):
            algorithm, number = untrained
            lines.append(
                f"{algorithm}: workers use different global models, so test results of the global model say little; "
                f"compare with metric={number}"
            )
        return list(dict.fromkeys(lines))


def distinct(runs: Iterable[PlannedRun], key: Callable[[Experiment], Any]) -> Iterable[PlannedRun]:
    """Return one run for each different value of `key(run.experiment)`."""
    return {canonical(key(run.experiment)): run for run in runs}.values()


def plan_comparison(
    source: Experiment | Mapping[str, Any] | str | Path | None = None,
    axes: Mapping[str, Any] | None = None,
    /,
    words: Iterable[str] = (),
    settings: ComparisonSettings = NO_SETTINGS,
    *,
    file: Path | None = None,
    allow_imports: bool = False,
    to_run: bool = True,
    **changes: Any,
) -> ComparisonPlan:
    """Return the runs of a comparison: one for each combination of the values to compare.

    Args:
        source: the experiment, as for `load_experiment`. A file may contain values to compare in a table [comparison].
        axes: more values to compare: a list for each key. They replace those in `source`.
        words: settings as on the command line. `key=v1,v2` compares values, and `key=value` sets one value in all runs.
        settings: settings of the comparison, such as `target` and `tune` (see `compare`).
        file: the file from which `source` and `axes` were read, if any.
        allow_imports: allow the file to name any import path (see `load_experiment`).
        to_run: whether to check that this machine has the device and the file `model.weights` of each run. False for
            finished runs.
        changes: settings for all runs, which replace all others.

    Raises ExperimentError if a run is invalid, unless `skip_invalid` is set.
    """
    description = describe(source)
    written = {} if file else axes
    axes, table_settings = _axes_and_settings([description.pop(COMPARISON, {}), axes or {}])
    settings = ComparisonSettings(**table_settings | settings.given)
    axes, word_axes, in_all = apply_words(axes, words, changes_in(plain(changes)))
    axes = {key: axes[key] for key in sorted(axes, key=lambda key: key == SEED)}  # a stable sort: the seed last
    _check_size(axes, in_all)
    if isinstance(records := description.setdefault("records", {}), dict):
        for name in ("model", "curve"):  # off by default, to save disk space
            records.setdefault(name, False)
    untrusted_values = [value for _, value in in_all] + [word_axes, written]
    with untrusted_config(file or file_of(source), untrusted_values, allowed=allow_imports), data_loaded_once():
        drop_default_name(description)
        points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        experiments, points, engine_chosen, left_out, changed = _experiments(
            description, in_all, points, skip_invalid=bool(settings.skip_invalid), to_run=to_run
        )
        lines = removed_warnings(changed) if to_run else []
    if left_out:
        used = {key: {canonical(point[key]) for point in points} for key in axes}
        axes = {key: [value for value in values if canonical(value) in used[key]] for key, values in axes.items()}
    settings = check_settings(settings, axes, experiments)
    _refuse_equal_runs(experiments, points)
    runs = [PlannedRun(*run) for run in zip(_ids(points), points, experiments, strict=True)]
    for line in lines:
        warnings.warn(line, SettingWarning, stacklevel=2)
    return ComparisonPlan(experiments[0].name, axes, runs, engine_chosen, settings, left_out)


def common_tables(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return the settings that are the same in all runs and are not compared, as nested dicts."""
    settings = [dict(leaves_of(run.tables)) for run in runs]
    keys = dict.fromkeys(key for leaves in settings for key in leaves)
    keys_by_run = [_keys_set_by(run, keys) for run in runs]
    tables: dict[str, Any] = {}
    for key in keys:
        values = [leaves.get(key) for leaves, changed in zip(settings, keys_by_run, strict=True) if key not in changed]
        if values and values[0] is not None and all(value == values[0] for value in values):
            *outer, last = key.split(".")
            functools.reduce(lambda table, name: table.setdefault(name, {}), outer, tables)[last] = values[0]
    return tables


def _keys_set_by(run: PlannedRun, keys: Collection[str]) -> set[str]:
    """Return those of `keys` that a run's compared values set, for example in a component's table."""
    changed = {key_changed(*change) for axis, value in run.point.items() for change in changes_of(axis, value)}
    tables = (*(f"{key}." for key in changed),)
    return {key for key in keys if key in changed or key.startswith(tables) or _naming_key(key) in changed}


@functools.cache
def _naming_key(key: str) -> str | None:
    """Return the key that names the component of a parameter, such as "attack.name" for "attack.z".

    Returns None if `key` is not a parameter of a component.
    """
    table, within = component_table(key.split("."))
    if table is None or within[0] in table.model_fields:
        return None
    return f"{key.removesuffix('.' + '.'.join(within))}.{table.named_by}"


def _axes_and_settings(tables: Iterable[Any]) -> tuple[Axes, dict[str, Any]]:
    """Merge several [comparison] tables, and return the values to compare and the settings. Later tables win."""
    axes: Axes = {}
    settings: dict[str, Any] = {}
    for table in tables:
        if isinstance(table, Mapping):
            settings |= {key: table[key] for key in SETTINGS if key in table}
            table = {key: value for key, value in table.items() if key not in SETTINGS}
        axes |= axes_of_tables(table)
    return axes, settings


def _check_size(axes: Axes, in_all: Iterable[Change]) -> None:
    """Raise ExperimentError if there is nothing to compare, or if there are too many combinations.

    `in_all`: changes for all runs, from which the error suggests what to compare.
    """
    if not axes:
        raise ExperimentError(f"nothing to compare: {_how_to_compare(in_all)}")
    count = math.prod(map(len, axes.values()))
    if count > MOST_RUNS:
        sizes = " x ".join(str(len(values)) for values in axes.values())
        raise ExperimentError(
            f"comparison: its axes have {sizes} = {count:,} combinations; at most {MOST_RUNS:,} are allowed"
        )


def _how_to_compare(changes: Iterable[Change]) -> str:
    """Return a hint on how to compare several values of a setting, for users who gave no values to compare."""
    for keys, value in changes:
        if isinstance(value, list) and len(value) > 1:
            key, hint = ".".join(keys), "" if keys[0] in Experiment.model_fields else meaning(".".join(keys), value)
            meant, names = re.match(r"write ([\w.]+)=", hint), closest(keys[0], Experiment.model_fields)[:1]
            place = meant[1] if meant else ".".join([*names, *keys[1:]]) or key
            return (
                f"{key} has one value, a list; for several values write {place}={','.join(map(label, value))}, or in "
                f"Python plan={{{show(place)}: {show(value)}}}"
            )
    return "every key has one value; write several values as in seed=0,1,2, or add a table [comparison] to the file"


def _experiments(
    description: dict[str, Any], in_all: list[Change], points: list[dict[str, Any]], *, skip_invalid: bool, to_run: bool
) -> tuple[list[Experiment], list[dict[str, Any]], bool, list[str], list[tuple[dict[str, Removed], dict[str, Any]]]]:
    """Create and check the experiment for each combination of values.

    Args:
        description: settings of the experiment, as nested dicts.
        in_all: changes for all runs.
        points: the combinations: a value for each compared setting.
        skip_invalid: leave out invalid combinations. Otherwise, they raise ExperimentError.
        to_run: whether to check that this machine has the device and the file `model.weights`.

    Returns the valid experiments, their combinations, whether an experiment sets its engine, one line of text for each
    problem, and, for each combination that removes settings of `description`, the removed settings and all settings of
    its experiment.
    """
    experiments, valid, engine_chosen = [], [], False
    problems: dict[str, list[dict[str, Any]]] = {}  # maps an error line to the points with this error
    models: dict[str, tuple[str, ...]] = {}
    varied = set()
    checked: dict[str, Experiment] = {}  # keyed by the values of the point without the seed
    seeds = set()  # seeds of valid experiments
    changed: list[tuple[dict[str, Removed], dict[str, Any]]] = []
    for point in points:
        combination, seed = canonical(point | {SEED: None}), canonical(point.get(SEED))
        if combination in checked and seed in seeds:
            experiments.append(checked[combination].model_copy(update={SEED: point[SEED]}))
            valid.append(point)
            continue
        point_changes = [change for key, value in point.items() for change in changes_of(key, value)]
        varied |= {key_changed(*change) for change in point_changes}
        tables = copy.deepcopy(description)
        try:
            _refuse_contradictions(in_all, point_changes)
            removed = override(tables, [*in_all, *copy.deepcopy(point_changes)])
            experiment = experiment_of(tables)
            with contextlib.suppress(DataError):  # a later check reports the error
                experiment = with_data(experiment) if to_run else experiment
            lines = _problems_with(experiment, models, to_run)
        except ExperimentError as error:
            lines = error.lines
        if not lines:
            experiments.append(experiment)
            valid.append(point)
            checked[combination] = experiment
            seeds.add(seed)
            changed += [(removed, experiment.resolved())] if removed else []
        for line in lines:
            problems.setdefault(line, []).append(point)
        engine_chosen |= not {"engine", "processes"}.isdisjoint(tables) or tables.get("mode") == "race"
    left_out = [with_points(line, affected, points) for line, affected in problems.items()]
    if left_out and not (skip_invalid and valid):
        raise ExperimentError(*left_out)
    return _with_default_name(experiments, varied), valid, engine_chosen, left_out, changed


def _with_default_name(experiments: Sequence[Experiment], varied: Collection[str]) -> list[Experiment]:
    """Return the experiments, with one common default name for all experiments whose name the user has not set.

    `varied` contains the keys in which the experiments differ.
    """
    name, with_names = default_name(experiments[0], varied), list[Experiment]()
    for experiment in experiments:
        if "name" not in experiment.model_fields_set:
            experiment = experiment.model_copy(update={"name": name})
            experiment.model_fields_set.discard("name")  # as if the user had not set it
        with_names.append(experiment)
    return with_names


def _problems_with(experiment: Experiment, models: dict[str, tuple[str, ...]], to_run: bool) -> tuple[str, ...]:
    """Return the reasons why an experiment cannot run, or () if it can.

    Args:
        experiment: the experiment.
        models: cache for the problems of models.
        to_run: whether to check that this machine has the device and the file `model.weights`.
    """
    tables = experiment.resolved()
    key = canonical([experiment.buffers, *(tables[name] for name in ("model", "local", "sampling", "stop"))])
    try:
        if to_run:
            resolve_device(experiment.device)
        if key not in models:
            models[key] = ()
            task_of(experiment, torch.device("cpu"), weights=to_run)  # builds the model, which may fail
    except ExperimentError as error:
        models[key] = error.lines
    return models[key]


def _refuse_contradictions(in_all: list[Change], point_changes: list[Change]) -> None:
    """Raise ExperimentError if two compared settings set the same key, or if one of them sets a key of all runs."""
    keys = [key_changed(*change) for change in point_changes]
    for key in keys:
        if keys.count(key) > 1:
            raise ExperimentError(f"{key}: is set by two comparison axes; remove one of the two")
    for path, value in in_all:
        if (key := key_changed(path, value)) in keys:
            raise ExperimentError(f"{key} = {show(value)}: is also set by a comparison axis; remove one of the two")


def _refuse_equal_runs(experiments: Iterable[Experiment], points: Iterable[dict[str, Any]]) -> None:
    first: dict[str, dict[str, Any]] = {}
    for experiment, point in zip(experiments, points, strict=True):
        earlier_point = first.setdefault(canonical(experiment.resolved()), point)
        if earlier_point is not point:
            raise ExperimentError(
                f"{describe_point(earlier_point)} and {describe_point(point)}: are the same experiment; remove one"
            )


def _ids(points: list[dict[str, Any]]) -> list[str]:
    """Return a readable name for each combination of values, such as "krum-lr0.1-seed0". All names are different."""
    names = [readable_id(point) for point in points]
    count = Counter(name.lower() for name in names)  # some file systems ignore case
    return [
        name
        if len(name) <= LONGEST_ID and count[name.lower()] == 1
        else f"{name[:LONGEST_ID]}-{hashlib.blake2b(canonical(point).encode(), digest_size=4).hexdigest()}"
        for name, point in zip(names, points, strict=True)
    ]


# -- Checks of the settings


def check_settings(settings: ComparisonSettings, axes: Axes, experiments: Sequence[Experiment]) -> ComparisonSettings:
    """Check the settings of a comparison, and return them with full key names.

    Raises ExperimentError if a setting does not fit the compared values and the experiments.
    """
    renamed: dict[str, Any] = {}
    for name in ("tune", "worst", "heatmap"):
        if isinstance(value := getattr(settings, name), str):
            renamed[name] = ",".join(axis_called(key.strip()) for key in value.split(","))
    settings = replace(settings, **renamed)
    if settings.target is not None:
        _check_target(settings.target, experiments)
    _check_choices(settings, axes, experiments)
    _check_heatmap(settings, axes)
    return settings if settings.metric is None else replace(settings, metric=check_number(settings.metric, experiments))


def _check_choices(settings: ComparisonSettings, axes: Axes, experiments: Iterable[Experiment]) -> None:
    varied = [axis for axis in axes if axis != SEED]
    for name, axis in (("tune", settings.tune), ("worst", settings.worst)):
        if axis is not None and axis not in varied:
            raise ExperimentError(f"{name} = {show(axis)}: is not a comparison axis; {nearest(str(axis), varied)}")
    if settings.tune is not None and settings.tune == settings.worst:
        raise ExperimentError(f"worst = {show(settings.worst)}: is also the axis of tune; choose another axis")
    if settings.tune is not None and not all(experiment.data.validation_fraction for experiment in experiments):
        raise ExperimentError(
            f"tune = {show(settings.tune)}: needs validation samples to choose values; add data.validation_fraction=0.1"
        )
    if settings.tune is not None and (untrained := untrained_part(experiments)):
        algorithm, number = untrained
        raise ExperimentError(
            f"tune = {show(settings.tune)}: needs validation results of the global model, but with {algorithm} workers "
            f"use different global models; remove tune, and compare all values of {settings.tune} with metric={number}"
        )


def untrained_part(experiments: Iterable[Experiment]) -> tuple[str, str] | None:
    """Return the name of a personalization algorithm that one of the experiments uses, and a metric that suits it.

    With such an algorithm, workers use different global models, so tests of the global model say little. Returns None
    if no experiment uses such an algorithm.
    """
    seen = set()
    for experiment in experiments:
        tables = experiment.resolved()
        key = canonical([tables["model"], tables["local"]])
        if key in seen or not isinstance(experiment.local.component, PersonalModel):
            continue
        seen.add(key)
        if not task_of(experiment, torch.device("cpu")).algorithm.shares_model:
            score = "accuracy" if correct_of(experiment.task.component) else "loss"
            personal = f"worker_{score} and data.local_test_fraction=0.2"
            number = personal if experiment.policy.component.in_rounds else "train_loss"
            return f"local.algorithm = {show(experiment.local.algorithm)}", number
    return None


def _check_heatmap(settings: ComparisonSettings, axes: Axes) -> None:
    where = f"heatmap = {show(settings.heatmap)}"
    keys = settings.heatmap.split(",") if isinstance(settings.heatmap, str) else []
    if settings.heatmap is not None and (len(keys) != 2 or keys[0] == keys[1]):
        raise ExperimentError(f"{where}: must be two different axes, such as partition.alpha,attack.fraction")
    compared = settings.compared(list(axes))
    if settings.heatmap is not None and len(compared) < 3 and set(keys) <= {*compared}:
        raise ExperimentError(f"{where}: with only two axes, the heat map shows both; omit it")
    first, *others = [*compared, ""]
    for key in keys:
        if key in settings.headings:
            setting = "tune" if key == settings.tune else "worst"
            raise ExperimentError(
                f"{where}: {key} is already used by {setting} and cannot be an axis of the heat map; choose another key"
            )
        if key == first:
            raise ExperimentError(
                f"{where}: {key} is the first axis, and the cells of the heat map already show the best value of the "
                "first axis; choose another axis"
            )
        if key not in others:
            raise ExperimentError(f"{where}: {show(key)} is not a comparison axis; {nearest(key, others[:-1])}")


def _check_target(target: Any, experiments: Iterable[Experiment]) -> None:
    number = isinstance(target, (int, float)) and not isinstance(target, bool) and math.isfinite(target)
    by_accuracy = all(correct_of(experiment.task.component) is not None for experiment in experiments)
    if by_accuracy and not (number and 0 < target <= 1):
        raise ExperimentError(f"target = {show(target)}: must be a test accuracy greater than 0 and at most 1")
    if not number:
        raise ExperimentError(
            f"target = {show(target)}: must be a number (the test loss to reach), because the task has no accuracy"
        )


def check_number(name: Any, experiments: Sequence[Experiment]) -> str:
    """Check the name of the metric by which runs are compared, and return it.

    If the metric itself says whether higher or lower is better, the name starts with "+" or "-". Raises ExperimentError
    if the experiments do not record the metric, or if it is unknown which direction is better.
    """
    where = f"metric = {show(name)}"
    if not isinstance(name, str):
        raise ExperimentError(f"{where}: must be the name of a recorded metric, such as test_loss")
    metric = metric_called(name)
    key = metric.key
    if key not in KEYS and not key.startswith(BY_NAME):
        metric_names = [
            f"metrics.{metric.component.label}" for experiment in experiments for metric in experiment.metrics
        ]
        raise ExperimentError(f"{where}: is not a recorded metric; {hint_for(key, [*KEYS, *metric_names])}")
    if key.startswith("validation_") and not all(experiment.data.validation_fraction for experiment in experiments):
        raise ExperimentError(f"{where}: needs validation samples; add data.validation_fraction=0.1")
    if OF_WORKERS.fullmatch(key):
        _check_worker_tests(where, key, experiments)
    if key in ("test_accuracy", "validation_accuracy", "worker_accuracy"):
        for experiment in experiments:
            if correct_of(experiment.task.component) is None:
                raise ExperimentError(
                    f"{where}: the task {experiment.task.name} has no accuracy; choose a loss or another metric"
                )
    if metric.better is None:
        raise ExperimentError(
            f"{where}: fedsim does not know whether higher or lower values are better; write +{key} if higher is "
            f"better, or -{key} if lower is better"
        )
    label = key.removeprefix("metrics.").removeprefix("validation_")
    components = [metric.component for experiment in experiments for metric in experiment.metrics]
    declared = next((component.higher_is_better for component in components if component.label == label), None)
    return name if declared is None or name != key else f"{'+' if declared else '-'}{key}"


def require_number(name: str, last: Sequence[RoundRecord]) -> None:
    """Raise ExperimentError if no run recorded the metric `name` in its last round.

    `last` contains the last record of each finished run.
    """
    metric = metric_called(name)
    if last and all(metric.read(record) is None for record in last):
        hint = hint_for(metric.key, [recorded.key for recorded in metrics_in(last)])
        raise ExperimentError(f"metric = {show(name)}: no run has recorded this metric in its last round; {hint}")


def hint_for(key: str, recorded: Sequence[str]) -> str:
    """Return how to get the metric `key`, which is not among the metrics that the runs have `recorded`."""
    if "," in key:
        return "name one metric for each figure or comparison"
    tested = any(map(OF_WORKERS.fullmatch, recorded))
    return LACKS_LOCAL_TESTS if OF_WORKERS.fullmatch(key) and not tested else nearest(key, recorded)


def _check_worker_tests(where: str, key: str, experiments: Sequence[Experiment]) -> None:
    """Raise ExperimentError if an experiment does not test workers in the way that the metric `key` needs."""
    for experiment in experiments:
        if problem := problem_with_worker_tests(experiment):
            raise ExperimentError(f"{where}: {problem}")
        if key.startswith("metrics.fine_tuned_") and not experiment.worker_evaluation.fine_tune:
            raise ExperimentError(f"{where}: needs tests of fine-tuned models; add worker_evaluation.fine_tune=1")
