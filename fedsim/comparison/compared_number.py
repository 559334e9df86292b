"""Check the number that runs are compared by: before the runs in their experiments, afterwards in their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.config.experiment import Experiment
from fedsim.core.learning_task import correct_of
from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show
from fedsim.records.record import METRICS, RoundRecord, metric_called, metrics_in

BY_NAME = tuple(f"{metric.key}." for metric in METRICS if "{}" in metric.label)  # only records show which
KEYS = [metric.key for metric in METRICS if "{}" not in metric.label]


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
        own = [f"metrics.{each.bind().label}" for experiment in experiments for each in experiment.metrics]
        raise ExperimentError(f"{where}: no such number of a round; {nearest(key, dict.fromkeys([*KEYS, *own]))}")
    if key.startswith("validation_") and not all(each.data.validation for each in experiments):
        raise ExperimentError(f"{where}: add data.validation=0.1")
    if key in ("test_accuracy", "validation_accuracy"):
        for each in experiments:
            if correct_of(each.task.bind()) is None:
                raise ExperimentError(f"{where}: the task {each.task.name} has no accuracy; use a loss or a metric")
    if metric.better is None:
        raise ExperimentError(
            f"{where}: neither a higher nor a lower one is better; write +{key} if a higher one is better for you, or "
            f"-{key}"
        )
    label = key.removeprefix("metrics.").removeprefix("validation_")
    found = [each.bind() for experiment in experiments for each in experiment.metrics]
    declared = next((each.higher_is_better for each in found if each.label == label), None)
    return by if declared is None or by != key else f"{'+' if declared else '-'}{key}"


def require_number(by: str, last: Sequence[RoundRecord]) -> None:
    """Raise ExperimentError if there are last rounds of finished runs, and none of them has the number `by`."""
    metric = metric_called(by)
    if last and all(metric.read(record) is None for record in last):
        hint = nearest(metric.key, [each.key for each in metrics_in(last)])
        raise ExperimentError(f"by = {show(by)}: no run has recorded this number in its last round; {hint}")
