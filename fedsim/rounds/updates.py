"""Updates of the workers of a round, and the checks for NaN and infinity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.processes.team import Team
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext


class DeferredCheck:
    """Check of all updates of a round for NaN and infinity, made once at the end of the round.

    One check per round is faster than a check in every step, because the CPU must wait for the GPU only once.

    Attributes:
        usable: whether all updates have been finite so far. Otherwise, every step is checked from now on.
        active: whether a round is in progress.
    """

    def __init__(self, shared: SharedState) -> None:
        self._changed = [shared.server.row, shared.server.last, *shared.server.states.get("gradients", {}).values()]
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []
        self.usable, self.active = True, False

    def begin(self) -> None:
        """Begin a round: save a copy of the tensors that the round will change."""
        self.active, self._sums, self._before = True, [], [tensor.clone() for tensor in self._changed]

    def add(self, rows: Tensor) -> None:
        """Store the sum of each row of `rows` [n, d]. `end` checks these sums for NaN and infinity."""
        self._sums.append(rows.sum(1))

    def end(self, *, failed: bool) -> bool:
        """End a round, and return whether all its updates were finite. If not, restore the tensors saved by `begin`.

        Args:
            failed: whether the round has raised an error. The tensors are then restored, and the result is False.
        """
        finite = not failed and (not self._sums or bool(torch.cat(self._sums).isfinite().all()))
        if not finite:
            self.usable = False
            for tensor, before in zip(self._changed, self._before, strict=True):
                tensor.copy_(before)
        self.active, self._sums, self._before = False, [], []
        return finite


class CohortUpdates:
    """Updates (or gradients) of the workers that are aggregated together, and which of them contain NaN or infinity.

    Args:
        team: processes that compute together. All processes must call each method at the same time.
        task: run to compute.
        shared: tensors of the run.

    Attributes:
        root_slot: row index of the update that the server computes from its own samples; None if the rule uses no
            such update.
        losses: loss of the global model on the samples of each of n workers, [n]; empty if the rule uses no losses.
        rule_checks: whether the rule itself checks the updates for NaN and infinity.
        deferred_check: check for NaN and infinity at the end of each round; None if every step is checked.
    """

    def __init__(self, team: Team, task: RunTask, shared: SharedState) -> None:
        self._team, self._task, self._shared = team, task, shared
        self._number = 0  # number of aggregations so far, the same in every process
        self._gathered: Tensor | None = None  # all rows of the current aggregation, in the first process
        self.losses, rule = shared.cohort.losses[:0], task.experiment.rule
        self.root_slot = len(shared.cohort.workers) if rule.accepts("root") else None
        avoids_waits = task.device.type != "cpu" and task.experiment.nonfinite != "keep"
        avoids_waits = avoids_waits and team.process.count == 1 and not team.divided and task.algorithm.clusters == 1
        # A built-in rule that reads norms or distances of all updates finds out whether the updates are finite.
        self.rule_checks = avoids_waits and rule.built_in and not rule.columnwise
        # A round that fails the check is repeated. The state of an attack would then advance twice.
        defers = avoids_waits and rule.columnwise and "state" not in task.experiment.attack.component.accepts
        self.deferred_check = DeferredCheck(shared) if defers else None

    def begin(self, rows: Sequence[int] | np.ndarray, start: Tensor | None = None) -> None:
        """Begin an aggregation: compute the workers' updates, and check them for NaN and infinity.

        Args:
            rows: indices in `CohortRows.rows` of the workers that this process has trained.
            start: parameters [d] from which the workers started, which are subtracted from the trained parameters, in
                place. None if `CohortRows.rows` contains gradients.
        """
        self._number += 1
        if start is not None:
            for run in _runs(rows):
                self._shared.cohort.rows[run].sub_(start)  # `-=` would also copy the result
        self.changed(rows)

    def changed(self, rows: Sequence[int] | np.ndarray) -> None:
        """Check workers' updates for NaN and infinity. Call this method after the updates have changed.

        Args:
            rows: indices in `CohortRows.rows` of the workers that this process has trained.
        """
        self._gathered = None
        cohort = self._shared.cohort
        for run in _runs(rows) if self.checks_now else ():
            cohort.unfit[run] = 0
            sums = cohort.rows[run].sum(1).cpu()  # a sum of finite numbers may overflow: check again
            for position in (~sums.isfinite()).nonzero().flatten().tolist():
                if not cohort.rows[run.start + position].isfinite().all():
                    cohort.unfit[run.start + position] = self._number

    def replaced(self, rows: list[int], values: Tensor) -> None:
        """Check for NaN and infinity the `values` that have replaced the updates at the indices `rows`."""
        if self.checks_now:
            self._shared.cohort.unfit[rows] = torch.where(values.isfinite().all(1).cpu(), 0, self._number)

    @property
    def checks_now(self) -> bool:
        """Whether this object checks updates for NaN and infinity as they change.

        If false, the rule checks them, or they are checked at the end of the round, or nothing is checked.
        """
        is_deferred = self.deferred_check is not None and self.deferred_check.active
        return self._task.experiment.nonfinite != "keep" and not is_deferred and not self.rule_checks

    def nonfinite(self, context: AggregationContext) -> list[int]:
        """Return the positions in `context` of the updates in which a check has found NaN or infinity."""
        if not self.checks_now:
            return []
        unfit = self._team.of_all(self._shared.cohort.unfit, context.slots)
        return (unfit == self._number).nonzero().flatten().tolist()

    def any_here_is_nonfinite(self, context: AggregationContext) -> bool:
        """Whether a check has found NaN or infinity in an update that this process stores."""
        return bool((self._shared.cohort.unfit[self._team.here(context.slots)[1]] == self._number).any())

    def gathered(self, slots: Sequence[int]) -> Tensor:
        """Return the updates of all workers as one tensor. In all processes but the first, the result is undefined.

        `slots` are positions of the workers in the cohort.
        """
        if self._gathered is None:
            slots = [*slots] if self.root_slot is None else [*slots, self.root_slot]
            self._gathered = self._team.gather_rows(self._shared.cohort.rows, slots)
        return self._gathered

    def read_losses(self, context: AggregationContext) -> None:
        """Set the attribute `losses` to the losses of the workers in `context`."""
        if self._task.experiment.rule.accepts("losses"):
            losses = self._team.of_all(self._shared.cohort.losses, context.slots)
            self.losses = losses.clone()  # a rule may write to them


def _runs(slots: Sequence[int] | np.ndarray) -> list[slice]:
    """Return slices of consecutive numbers: [3, 1, 2, 7] is divided into slice(1, 4) and slice(7, 8)."""
    numbers = np.sort(np.asarray(slots, dtype=np.int64))
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [slice(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
