"""Early stopping, computed from the records of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from fedsim.config.schema import Stop, WorkerEvaluation
from fedsim.errors import ExperimentError, plural, show
from fedsim.hints.meanings import nearest
from fedsim.records.record import Better, Metric, RoundRecord, metric_called
from fedsim.records.worker_results import METRIC as OF_WORKERS


class EarlyStopping:
    """Decides after each round whether the run should end early.

    The run ends once the metric reaches the target, or has not improved by more than `min_delta` for `patience` rounds
    (Prechelt 1998). Rounds in which the metric was not measured, or the global model cannot have changed, do not count.

    Args:
        stop: early-stopping settings.
        group_rounds: number of rounds after which the global model changes. More than 1 only with groups.
        tested_every: number of rounds between two tests of individual workers. An additional test after the last round
            of a run does not count, because a longer run would not have this test.

    >>> from fedsim.config.schema import Stop
    >>> stopping = EarlyStopping(Stop(metric="test_accuracy", patience=2))
    >>> for round, accuracy in enumerate([0.5, 0.7, 0.6, 0.7], start=1):
    ...     reason = stopping.update(RoundRecord(round=round, test_accuracy=accuracy, cohort=[0]))
    >>> reason
    'test_accuracy has not improved for 2 rounds; the best is 0.7 in round 2'
    """

    def __init__(self, stop: Stop, group_rounds: int = 1, tested_every: int = 1) -> None:
        better: Better = "lower" if stop.direction == "min" else "higher"
        self._stop, self._metric = stop, Metric("", better, path=metric_called(stop.metric).path)
        self._group_rounds, self._tested_every = group_rounds, tested_every
        self._best, self._best_round, self._without = math.nan, 0, 0
        self._updates, self._changed = 0, False  # of the global model: number, and whether there is one since last time

    def update(self, record: RoundRecord) -> str | None:
        """Return the reason why the run ends after this record's round, or None if the run continues."""
        stop = self._stop
        first, *name = self._metric.path
        # Files store a NaN train loss as null, so only a non-empty cohort shows that the train loss was measured.
        measured = record[first].keys() & set(name) if name else first != "train_loss" or record.cohort
        if first.startswith("worker_"):
            measured = any(map(OF_WORKERS.fullmatch, (f"metrics.{metric}" for metric in record.metrics)))
        if OF_WORKERS.fullmatch(stop.metric) and record.round % self._tested_every:
            measured = False
        self._changed |= self._changes_model(record)
        if not measured or not self._changed or record.round % self._group_rounds:
            return None
        self._changed = False
        value = self._metric.read(record)
        self._without += 1
        if value is not None and stop.target is not None and self._metric.reaches(value, stop.target):
            return f"{stop.metric} is {value:.6g} and has reached the target {stop.target:g}"
        enough = self._best + self._metric.sign * stop.min_delta  # NaN without a best value
        if value is not None and not self._metric.reaches(enough, value):
            self._best, self._best_round, self._without = value, record.round, 0
        if stop.patience is None or self._without < stop.patience:
            return None
        unit = "round" if self._group_rounds == 1 else "aggregation"
        more = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
        best = f"; the best is {self._best:.6g} in round {self._best_round}" if self._best_round else ""
        return f"{stop.metric} has not improved{more} for {plural(stop.patience, unit)}{best}"

    def _changes_model(self, record: RoundRecord) -> bool:
        """Whether the server has received updates in a round, or has added noise although there were none."""
        if record.asynchronous is None or record.asynchronous.updates is None:
            return bool(record.cohort) or "epsilon" in record.metrics
        before, self._updates = self._updates, record.asynchronous.updates
        return self._updates > before

    @property
    def has_best(self) -> bool:
        """Whether the metric had a finite value in any round so far."""
        return self._best_round > 0

    def require_number(self, record: RoundRecord, *, by_function: bool = False) -> None:
        """Raise ExperimentError if the record does not contain the metric.

        `by_function`: whether a user-defined function trains the model. Such a function may return no training loss, so
        that `train_loss` is NaN. This is an error too if it is the metric.
        """
        first, *name = self._metric.path
        if by_function and first == "train_loss" and self._metric.read(record) is None:
            raise ExperimentError(
                f"stop.metric = {show(first)}: is NaN in round {record.round}; return the mean training loss from your "
                "function in local.algorithm, or use stop.metric=test_loss"
            )
        if record[first] is None or any(part not in record[first] for part in name):
            known = [key for key in ("test_loss", "test_accuracy", "train_loss") if record[key] is not None]
            hint = nearest(self._stop.metric, [*known, *(f"metrics.{metric}" for metric in record.metrics)])
            raise ExperimentError(
                f"stop.metric = {show(self._stop.metric)}: was not recorded in round {record.round}; {hint}"
            )


def stop_reason(history: Iterable[RoundRecord], stop: Stop, *intervals: int) -> str | None:
    """Return the reason why the run ended early after its last record, or None if it did not.

    For the arguments after `history`, see `EarlyStopping`.
    """
    stopping, reason = EarlyStopping(stop, *intervals), None
    for record in history:
        reason = divergence(record) or (stopping.update(record) if stop.active else None)
    return reason


def divergence(record: RoundRecord) -> str | None:
    """Return the reason why the run ends because this round diverged, or None if it did not diverge.

    >>> divergence(RoundRecord(round=5, diverged="4 of 17 updates contain NaN or infinity"))
    'diverged in round 5: 4 of 17 updates contain NaN or infinity; the results are those of the model before this round'
    """
    if record.diverged is None:
        return None
    return f"diverged in round {record.round}: {record.diverged}; the results are those of the model before this round"


def stored_stop(experiment: Mapping[str, Any]) -> tuple[Stop, int, int]:
    """Return the arguments of `EarlyStopping` for a stored experiment."""
    try:
        stop = Stop.model_validate(experiment.get("stop", {}))
        tests = WorkerEvaluation.model_validate(experiment.get("worker_evaluation", {}))
    except ValidationError:
        return Stop(), 1, 1
    group_rounds = experiment.get("group_rounds")  # only stored if there are groups
    return stop, group_rounds if type(group_rounds) is int and group_rounds > 0 else 1, tests.every
