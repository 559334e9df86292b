"""Whether the rule can aggregate the rows of the workers that report, where chosen workers drop out."""

from __future__ import annotations

import torch

from fedsim.engines import TaskSpec
from fedsim.errors import ExperimentError
from fedsim.server import Cohort


class ReportCheck:
    """Checks cohorts from which workers dropped out against what the rule needs.

    Args:
        dropout: the probability that a chosen worker does not report.
    """

    def __init__(self, task: TaskSpec, dropout: float) -> None:
        self._task, self._dropout = task, dropout
        self._reasons: dict[tuple[int, bool], str] = {}  # by number of rows, and whether all have weight 0

    def __call__(self, round: int, cohort: Cohort) -> None:
        """Raise ExperimentError if the rule cannot aggregate what is left of the cohort; an empty round is skipped."""
        if not cohort.dropped or not cohort.workers:
            return
        weights = self._task.weights if self._task.rule.accepts_weights else None
        n, weightless = len(cohort.workers), isinstance(weights, tuple) and not any(weights[k] for k in cohort.workers)
        if (n, weightless) not in self._reasons:
            self._reasons[n, weightless] = self._reason(n, weightless)
        if reason := self._reasons[n, weightless]:
            instead = "other aggregate.weights" if weightless else "a smaller aggregate.f"
            raise ExperimentError(
                f"round {round}: worker_dropout = {self._dropout:g} leaves {n} of {n + len(cohort.dropped)} workers; "
                f"{reason}; use a lower worker_dropout, {instead} or another aggregate.rule"
            )

    def _reason(self, n: int, weightless: bool) -> str:
        """Why n rows cannot be aggregated; empty if they can."""
        try:
            self._task.rule.dry_run(n, weights=torch.zeros(n).double() if weightless else None)
        except ExperimentError as error:
            return str(error)
        return ""
