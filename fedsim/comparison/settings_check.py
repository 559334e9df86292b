"""Checks of the settings of a comparison: before its runs, and of the compared number also in their records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedsim.config.experiment import Experiment
from fedsim.core.learning_task import correct_of
from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show
from fedsim.records.axes import Axes, axis_called
from fedsim.records.record import METRICS, RoundRecord, metric_called, metrics_in
from fedsim.records.rows import SEED, ComparisonSettings, canonical
from fedsim.runs.setup import task_of

BY_NAME = tuple(f"{metric.key}." for metric in METRICS if "{}" in metric.label)  # only records show which
KEYS = [metric.key for metric in METRICS if "{}" not in metric.label]


def check_settings(settings: ComparisonSettings, axes: Axes, experiments: Sequence[Experiment]) -> ComparisonSettings:
    """Return the settings with `by` as `check_number` returns it and axes under the names that the grid uses.

    Raises ExperimentError if the settings do not fit the axes and the experiments.
    """
    settings = _with_axes_as_called(settings)
    if settings.target is not None:
        _check_target(settings.target, experiments)
    _check_choices(settings, axes, experiments)
    _check_heatmap(settings, axes)
    return settings if settings.by is None else replace(settings, by=check_number(settings.by, experiments))


def _with_axes_as_called(settings: ComparisonSettings) -> ComparisonSettings:
    """Return the settings with the axes of `tune`, `worst` and `heatmap` as the grid calls them; see `axis_called`."""
    renamed: dict[str, Any] = {}
    for name in ("tune", "worst", "heatmap"):
        if isinstance(value := getattr(settings, name), str):
            renamed[name] = ",".join(axis_called(key.strip()) for key in value.split(","))
    return replace(settings, **renamed)


def _check_choices(settings: ComparisonSettings, axes: Axes, experiments: Iterable[Experiment]) -> None:
    varied = [axis for axis in axes if axis != SEED]
    for name, axis in (("tune", settings.tune), ("worst", settings.worst)):
        if axis is not None and axis not in varied:
            raise ExperimentError(f"{name} = {show(axis)}: is not an axis that varies; {nearest(str(axis), varied)}")
    if settings.tune is not None and settings.tune == settings.worst:
        raise ExperimentError(f"worst = {show(settings.worst)}: is tuned; choose another axis")
    if settings.tune is not None and not all(each.data.validation for each in experiments):
        raise ExperimentError(
            f"tune = {show(settings.tune)}: values are chosen by validation results; add data.validation=0.1"
        )
    if settings.tune is not None and (found := untrained_part(experiments)):
        solver, number = found
        raise ExperimentError(
            f"tune = {show(settings.tune)}: values are chosen by validation results of the global model, and with "
            f"{solver} workers keep a part of it; compare all values of {settings.tune}, without tune, with by={number}"
        )


def untrained_part(experiments: Iterable[Experiment]) -> tuple[str, str] | None:
    """Return the first `local.solver` that never trains a part of the global model, since workers keep that part.

    The second text is the number by which such runs can be compared, and the setting that it needs.
    """
    seen = set()
    for each in experiments:
        tables = each.resolved()
        key = canonical([tables["model"], tables["local"]])
        if key in seen or not each.local.component.has("for_model"):
            continue
        seen.add(key)
        if task_of(each, torch.device("cpu")).solver.personal_columns.width:
            score = "accuracy" if correct_of(each.task.component) else "loss"
            personal = f"metrics.personal_worker_{score}_mean and data.worker_test=0.2"
            number = personal if each.in_rounds else "train_loss"
            return each.local.setting, number
    return None


def _check_heatmap(settings: ComparisonSettings, axes: Axes) -> None:
    where = f"heatmap = {show(settings.heatmap)}"
    keys = settings.heatmap.split(",") if isinstance(settings.heatmap, str) else []
    if settings.heatmap is not None and (len(keys) != 2 or keys[0] == keys[1]):
        raise ExperimentError(f"{where}: must be two axes, such as partition.alpha,attack.fraction")
    first, *others = [*settings.compared(list(axes)), ""]
    for key in keys:
        if key in settings.headings:
            raise ExperimentError(f"{where}: {settings.headings[key]} is not compared; choose another axis")
        if key == first:
            raise ExperimentError(f"{where}: {key} is the first axis, of which a cell has the best; name another")
        if key not in others:
            raise ExperimentError(f"{where}: {show(key)} is not an axis that varies; {nearest(key, others[:-1])}")


def _check_target(target: Any, experiments: Iterable[Experiment]) -> None:
    number = isinstance(target, (int, float)) and not isinstance(target, bool) and math.isfinite(target)
    by_accuracy = all(correct_of(each.task.component) is not None for each in experiments)
    if by_accuracy and not (number and 0 < target <= 1):
        raise ExperimentError(f"target = {show(target)}: must be a test accuracy, more than 0 and at most 1")
    if not number:
        raise ExperimentError(f"target = {show(target)}: must be a test loss, since a task has no accuracy")


def check_number(by: Any, experiments: Sequence[Experiment]) -> str:
    """Return the number `by`, such as "-metrics.drift", with the sign that a metric of the experiments declares.

    Raises ExperimentError if these experiments cannot record the number, or no value of it is better than another.
    """
    where = f"by = {show(by)}"
    if not isinstance(by, str):
        raise ExperimentError(f"{where}: must be the name of a number of a round, such as test_loss")
    metric = metric_called(by)
    key = metric.key
    if key not in KEYS and not key.startswith(BY_NAME):
        own = [f"metrics.{each.component.label}" for experiment in experiments for each in experiment.metrics]
        raise ExperimentError(f"{where}: no such number of a round; {nearest(key, dict.fromkeys([*KEYS, *own]))}")
    if key.startswith("validation_") and not all(each.data.validation for each in experiments):
        raise ExperimentError(f"{where}: add data.validation=0.1")
    if key in ("test_accuracy", "validation_accuracy"):
        for each in experiments:
            if correct_of(each.task.component) is None:
                raise ExperimentError(f"{where}: the task {each.task.name} has no accuracy; use a loss or a metric")
    if metric.better is None:
        raise ExperimentError(
            f"{where}: neither a higher nor a lower one is better; write +{key} if a higher one is better for you, or "
            f"-{key}"
        )
    label = key.removeprefix("metrics.").removeprefix("validation_")
    found = [each.component for experiment in experiments for each in experiment.metrics]
    declared = next((each.higher_is_better for each in found if each.label == label), None)
    return by if declared is None or by != key else f"{'+' if declared else '-'}{key}"


def require_number(by: str, last: Sequence[RoundRecord]) -> None:
    """Raise ExperimentError if there are last rounds of finished runs, and none of them has the number `by`."""
    metric = metric_called(by)
    if last and all(metric.read(record) is None for record in last):
        hint = nearest(metric.key, [each.key for each in metrics_in(last)])
        raise ExperimentError(f"by = {show(by)}: no run has recorded this number in its last round; {hint}")
