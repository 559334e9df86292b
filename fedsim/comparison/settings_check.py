"""Checks of the settings of a comparison, before its runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedsim.comparison.compared_number import check_number
from fedsim.config.experiment import Experiment
from fedsim.core.learning_task import correct_of
from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show
from fedsim.records.axes import Axes, axis_called
from fedsim.records.combinations import SEED, canonical
from fedsim.records.comparison_settings import ComparisonSettings
from fedsim.runs.setup import task_of


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
        if key in seen or not each.client_algorithm.has("for_model"):
            continue
        seen.add(key)
        if task_of(each, torch.device("cpu")).solver.personal_columns.width:
            score = "accuracy" if correct_of(each.task.bind()) else "loss"
            personal = f"metrics.personal_worker_{score}_mean and data.worker_test=0.2"
            number = personal if each.policy.bind().in_rounds else "train_loss"
            return f"local.solver = {show(each.local.solver)}", number
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
    by_accuracy = all(correct_of(each.task.bind()) is not None for each in experiments)
    if by_accuracy and not (number and 0 < target <= 1):
        raise ExperimentError(f"target = {show(target)}: must be a test accuracy, more than 0 and at most 1")
    if not number:
        raise ExperimentError(f"target = {show(target)}: must be a test loss, since a task has no accuracy")
