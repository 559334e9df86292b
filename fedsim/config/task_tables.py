"""The tables of the task, of the metrics of its tests, and of early stopping; and the checks of what tests record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field
from torch import nn

from fedsim.core.base_table import PlugTable, Table
from fedsim.core.learning_task import REDUCTION, LearningTask, LossTask, correct_of, learning_task
from fedsim.core.metrics import BoundMetric, bind_metric, metric
from fedsim.core.objects import Name
from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

DIRECTIONS: dict[str, Literal["min", "max"]] = {
    "validation_accuracy": "max",
    "validation_loss": "min",
    "test_accuracy": "max",
    "test_loss": "min",
    "train_loss": "min",
}


def _label(label: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,49}", label):
        raise ValueError("a name of letters, digits and _, at most 50 characters")
    return label


class Task(PlugTable):
    """The loss of training and tests, and which answers are correct.

    A loss function or loss module, such as `torch.nn.functional:mse_loss`, is a task without accuracy.
    """

    place, named_by, registry = "task", "name", learning_task

    name: Name = "classification"

    def check_parameters(self) -> None:
        super().check_parameters()
        self.bind()

    def bind(self) -> LearningTask:
        """The task with its parameters: an instance of the dataclass `name`, or the result of the function `name`."""
        plug, bound = self.plug, super().bind()
        if plug.takes:
            return LossTask(self.name, bound, tuple(plug.takes))
        task = bound if is_dataclass(plug.target) else bound()
        if isinstance(task, nn.Module):
            reduction = getattr(task, REDUCTION, "mean")
            if reduction not in ("mean", "none"):
                raise ExperimentError(
                    f'task.name = {show(self.name)}: has the reduction {show(reduction)}; must be "mean" or "none", '
                    'since the loss of a batch is the mean over its samples; use reduction="mean" and scale local.lr'
                )
            return LossTask(self.name, bound)
        if missing := [name for name in ("loss", "check_outputs") if not hasattr(task, name)]:
            raise ExperimentError(
                f"task.name = {show(self.name)}: has no method {missing[0]}; must be a loss function of (outputs, "
                "targets), a loss module, or a task with the methods of fedsim.core.learning_task.LearningTask"
            )
        return task


class EvaluationMetric(PlugTable):
    """A metric of each test; `label` is its name in the records, by default that of the metric."""

    place, named_by, registry = "metrics", "name", metric

    name: Name
    label: Annotated[str, AfterValidator(_label)] | None = None
    """Its name in the records. Unset: that of the metric."""

    def bind(self) -> BoundMetric:
        return bind_metric(self.plug, self.params, self.label)


class Stop(Table):
    """A run ends after a round in which `metric` reaches `target`, or has not improved for `patience` rounds. Its model
    is that of the last round."""

    metric: str = "validation_accuracy"
    """The number of a round that is compared: `validation_accuracy`, `validation_loss`, `test_accuracy`, `test_loss`,
    `train_loss`, or `metrics.NAME`."""
    mode: Literal["min", "max"] | None = None
    """Whether a higher or a lower value is better. Unset: as of an accuracy or a loss."""
    patience: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Rounds without an improvement after which the run ends. Unset: it does not end so."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """By how much a value must be better to be an improvement."""
    target: float | None = None
    """A value of the metric at which the run ends. Unset: it does not end so."""

    @property
    def direction(self) -> Literal["min", "max"]:
        return self.mode or DIRECTIONS.get(self.metric, "max")

    @property
    def active(self) -> bool:
        """Whether a run can end early."""
        return self.patience is not None or self.target is not None


def check_metrics(experiment: Experiment) -> Iterator[str]:
    """One error line for each label that several metrics have."""
    labels = [each.bind().label for each in experiment.metrics]
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        yield f"metrics: {labels.count(label)} metrics are called {show(label)}; give each another `label`"


def check_stop(experiment: Experiment) -> Iterator[str]:
    """One error line for each setting of `stop` that does not work."""
    stop = experiment.stop
    where = f"stop.metric = {show(stop.metric)}"
    if not stop.active:
        if stop != Stop():
            yield "stop: needs stop.patience, a number of rounds, or stop.target, a value of the metric; omit it"
        return
    if experiment.mode == "race":
        yield "stop: does not work with mode=race, whose runs are not repeatable; omit it"
    if stop.min_delta and stop.patience is None:
        yield f"stop.min_delta = {stop.min_delta}: needs stop.patience; omit it"
    label = stop.metric.removeprefix("metrics.")
    if label == stop.metric:
        if stop.metric not in DIRECTIONS:
            labels = [each.bind().label for each in experiment.metrics]
            hint = nearest(stop.metric, [*DIRECTIONS, *(f"metrics.{each}" for each in labels)])
            yield f"{where}: no such number of a round; {hint}"
    elif stop.mode is None:
        yield f'{where}: needs stop.mode, "max" if a higher value is better, or "min"'
    if label.endswith("_accuracy") and label in DIRECTIONS and correct_of(experiment.task.bind()) is None:
        yield f"{where}: the task {experiment.task.name} has no accuracy; use stop.metric=test_loss or a metric"
        return
    if label.startswith("validation_") and not experiment.data.validation:
        yield f"{where}: needs data.validation, such as data.validation=0.1; or use stop.metric=test_accuracy"


def check_evaluation(experiment: Experiment) -> Iterator[str]:
    """Yield the problems of `evaluation` and `data.worker_test`."""
    every, updates = experiment.evaluation.every, experiment.records.updates
    if not experiment.data.worker_test:
        if experiment.evaluation != type(experiment.evaluation)():
            yield "evaluation: needs data.worker_test, the fraction of each worker's samples that it tests on; omit it"
        return
    if experiment.mode == "race" or not experiment.policy.bind().in_rounds:
        yield f"data.worker_test = {experiment.data.worker_test}: needs synchronous rounds; omit it"
    if experiment.attack.redraw:
        yield (
            f"data.worker_test = {experiment.data.worker_test}: tests workers that never attack, but with "
            "attack.redraw any worker may attack; omit one of them"
        )
    for round in updates:
        if round % every == 0 or round == experiment.rounds:
            yield f"records.updates: workers are tested after round {round}, which overwrites its updates; omit it"
