"""Application of the aggregation rule to the updates of the workers.

On one machine, `RuleByColumns` applies rules by columns, such as `weighted_mean`, the rule of FedAvg, and `RuleOnRows`
all other rules. The engine `distributed` communicates as much as the rule needs, for n rows of d numbers on P ranks
(`fedsim.engines.distributed.DistributedEngine` has the formulas):

    RowSums         rules that are a weighted mean: each rank sums its own rows, and the sums [d] are added over the
                    ranks
    StreamedSums    the same rules in a `WaveRound`, also on one machine: each process sums its own rows after each wave
                    of workers
    RuleByColumns   rules that treat each column separately or need only inner products of rows: each rank receives its
                    columns of all rows [n, d / P], and inner products are summed over the ranks
    RuleOnRows      all other rules: rank 0 receives all rows and computes the result
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, Pipeline
from fedsim.aggregation.numerics.columns import Reduce, bad_rows, combine, keep_own
from fedsim.clients import State
from fedsim.errors import ExperimentError
from fedsim.processes.team import Team, rows_at
from fedsim.records.round_stats import AggregationStats
from fedsim.rounds.parameter_server import AggregatedUpdate, ParameterServer, moved
from fedsim.rounds.updates import CohortUpdates
from fedsim.server import Cohort
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext, linear_shares, screen

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment


def inputs_of(
    experiment: Experiment,
    moment: tuple[int, ...],
    *,
    updates: Tensor,
    workers: Sequence[int],
    weights: Tensor | None,
    **more: Any,
) -> AggregationInputs:
    """Return the inputs of an aggregation rule in a run of `experiment`, for the run itself and for `fedsim replay`.

    Args:
        experiment: experiment of the run.
        moment: (round,), or (round, step) if every step aggregates gradients.
        updates: update of each of n workers, [n, d], or some columns of the updates.
        workers: IDs of the workers.
        weights: weights of the workers, [n]; None for equal weights.
        more: further inputs by name.
    """
    return AggregationInputs(
        updates=updates,
        weights=weights,
        workers=list(workers),
        seed=experiment.seed,
        moment=moment,
        local_lr=experiment.local_lr_at(*moment),
        sync=experiment.sync_in(moment[0]),
        weight_total=experiment.weight_total,
        **more,
    )


class Aggregator(ABC):
    """Applies the aggregation rule to the workers' updates.

    Each process has one aggregator. All processes must call each method at the same time.

    Args:
        team: processes that compute together.
        task: run to compute.
        shared: tensors of the run.
        server: parameter server, which stores the previous aggregated update and applies the next one.

    Attributes:
        rule: aggregation rule.
        updates: updates of the workers.
        state: state that the rule returned in the previous aggregation.
    """

    def __init__(self, team: Team, task: RunTask, shared: SharedState, server: ParameterServer) -> None:
        self.team, self.task, self.shared, self.server = team, task, shared, server
        self.rule, self.updates = task.experiment.rule, CohortUpdates(team, task, shared)
        self.state: dict[str, Tensor] = {}
        self._shares_by_weights = lru_cache(1)(partial(linear_shares, task))  # shares rarely change between steps

    @staticmethod
    def of(team: Team, task: RunTask, shared: SharedState, server: ParameterServer) -> Aggregator:
        """Return the aggregator for the rule of a run that stores the updates of a whole cohort."""
        rule, divided = task.experiment.rule, team.divided
        if rule.linear_by_weights and divided:
            return RowSums(team, task, shared, server)
        by_columns = rule.columnwise or (rule.by_parts and divided)
        return (RuleByColumns if by_columns else RuleOnRows)(team, task, shared, server)

    @abstractmethod
    def aggregate(self, context: AggregationContext) -> tuple[AggregatedUpdate, AggregationStats]:
        """Apply the rule to the workers' updates. Return the aggregated update, and statistics of the aggregation."""

    def inputs(self, context: AggregationContext, rows: Tensor, reduce: Reduce = keep_own) -> AggregationInputs:
        """Return the inputs of the aggregation rule.

        Args:
            context: workers that take part in this aggregation.
            rows: updates of all workers, [n, d], or some of their columns.
            reduce: function that adds up values, or takes their maximum, over all processes.
        """
        return inputs_of(
            self.task.experiment,
            context.moment,
            updates=rows_at(rows, context.slots),
            workers=context.workers,
            weights=context.weights,
            root=None if self.updates.root_slot is None else rows[self.updates.root_slot],
            losses=self.updates.losses if self.rule.accepts("losses") else None,
            state=self.state,
            last=self.server.last,
            reduce=reduce,
        )

    def screened(
        self, context: AggregationContext, bad: list[int], rows: Tensor, reduce: Reduce = keep_own
    ) -> AggregationInputs:
        """Return the inputs of the rule (see `inputs`) without the updates at positions `bad` in `context`."""
        return screen(self.task, context.moment[0], self.inputs(context, rows, reduce), bad)

    def require_finite(self, context: AggregationContext, update: Tensor) -> None:
        """Raise DivergedError if a rule of the user returned NaN or infinity for finite updates."""
        if self.task.experiment.nonfinite != "keep":
            self.rule.require_finite_result(update, context.moment[0])

    def shares(self, context: AggregationContext, inputs: AggregationInputs, bad: list[int]) -> Tensor | None:
        """Return the coefficients [n] that a linear rule gives to n finite updates; None if the rule is not linear.

        Args:
            context: updates to aggregate.
            inputs: inputs of the rule, without the updates at positions `bad`.
            bad: positions of the updates with NaN or infinity.
        """
        if bad or not self.rule.linear_by_weights:
            return self.rule.shares(inputs)
        return self._shares_by_weights(context.weights, len(context.slots))

    def linear(self, context: AggregationContext, bad: list[int]) -> AggregationStats:
        """Return the statistics of an aggregation by a linear rule, including the coefficients of the updates.

        Args:
            context: updates to aggregate.
            bad: positions of the updates with NaN or infinity, which are excluded.
        """
        no_columns = self.shared.cohort.rows.new_empty(len(self.shared.cohort.workers), 0)
        inputs = self.screened(context, bad, no_columns)
        return _stats(context, bad, self.shares(context, inputs, bad), inputs)

    def sums_of_messages(self, slots: Sequence[int]) -> State:
        """Return the sum over workers of each message, by name. `slots` are the workers' positions in the cohort."""
        return {name: self.team.sum_of(rows, slots) for name, rows in self.shared.cohort.messages.items()}

    def train_losses(self, context: AggregationContext) -> Tensor:
        """Return the mean training loss of each worker in `context`, float64 [n]."""
        return self.team.of_all(self.shared.cohort.train_loss, context.slots)

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Set the global model's buffers to the weighted mean of the workers' buffers, without `excluded` workers."""
        self.server.combine_buffers(context, excluded)


class RuleOnRows(Aggregator):
    """Aggregator for rules that need whole updates. The first process aggregates all of them."""

    def aggregate(self, context: AggregationContext) -> tuple[AggregatedUpdate, AggregationStats]:
        self.updates.read_losses(context)
        bad, parts = self.updates.nonfinite(context), list[tuple[slice, Tensor]]()
        n, rows = len(context.slots) - len(bad), self.updates.gathered(context.slots)
        with self.team.at_first() as results:
            if self.team.index == 0:
                inputs, outcome, are_finite = self.inputs(context, rows), None, False
                if self.updates.rule_checks:
                    outcome, are_finite = self.rule.without_check(inputs)
                    bad = [] if are_finite else bad_rows(inputs.updates)
                    n -= len(bad)
                if outcome is None or bad:
                    inputs = self.screened(context, bad, rows)
                    outcome = self.rule(inputs)
                self.require_finite(context, outcome.update)
                self.state, parts = outcome.state, [(slice(0, len(outcome.update)), outcome.update)]
                stats = _stats(context, bad, outcome.shares, inputs)
                results.append(stats.on_host() if self.team.divided else stats)
        return AggregatedUpdate(self.team.divide(parts), n), results[0] if results else AggregationStats()


class RuleByColumns(Aggregator):
    """Aggregator for rules that each process can apply to some columns of all updates."""

    def aggregate(self, context: AggregationContext) -> tuple[AggregatedUpdate, AggregationStats]:
        self.updates.read_losses(context)
        bad, start = self.updates.nonfinite(context), self.server.columns.start
        rows = self.team.columns_of(self.shared.cohort.rows, context.slots)
        inputs = self.screened(context, bad, rows, self.team.reduce)
        if self.rule.columnwise:
            lazy, shares = inputs.rows(), self.shares(context, inputs, bad)
            parts = [
                (block, self.rule.of_columns(inputs.updates[:, moved(block, -start)], lazy, inputs, shares))
                for block in self.server.blocks
            ]
        else:
            outcome = self.rule(inputs)
            self.state, shares = outcome.state, outcome.shares
            parts = [(self.server.columns, outcome.update)]
        for _, update in parts:
            self.require_finite(context, update)
        if (check := self.updates.deferred_check) is not None and check.active:
            # If no coefficient is 0, NaN and infinity in any update are also in the result.
            is_in_result = shares is not None and bool(shares.all())
            of_result = [update.unsqueeze(0) for _, update in parts]
            for rows in of_result if is_in_result else [inputs.updates]:
                check.add(rows)
        return AggregatedUpdate(parts, len(inputs.updates)), _stats(context, bad, shares, inputs)


class RowSums(Aggregator):
    """Aggregator for linear rules on ranks.

    Each rank computes the weighted sum of its own workers' updates. The ranks then add up these sums.
    """

    def aggregate(self, context: AggregationContext) -> tuple[AggregatedUpdate, AggregationStats]:
        optimizer_state = self.shared.server.states[self.task.sync_in(context.moment[0])]
        if optimizer_state:
            bad = self.updates.nonfinite(context)
            stats, total = self._sum_own_rows(context, bad)
            parts = [(self.server.columns, self.team.sum_columns(total))]
            return AggregatedUpdate(parts, len(context.slots) - len(bad)), stats
        bad = []
        stats, total = self._sum_own_rows(context, bad)
        if self.updates.any_here_is_nonfinite(context):
            total.fill_(math.nan)
        self.team.reduce(total)
        if self.updates.checks_now and not math.isfinite(total.sum()) and (bad := self.updates.nonfinite(context)):
            stats, total = self._sum_own_rows(context, bad)
            self.team.reduce(total)
        return AggregatedUpdate([(slice(0, len(total)), total)], len(context.slots) - len(bad), complete=True), stats

    def _sum_own_rows(self, context: AggregationContext, bad: list[int]) -> tuple[AggregationStats, Tensor]:
        """Return statistics of an aggregation by a linear rule, and the weighted sum [d] of this rank's updates.

        Args:
            context: updates to aggregate, of all ranks.
            bad: positions of the updates with NaN or infinity, which are excluded.
        """
        stats = self.linear(context, bad)
        assert stats.shares is not None
        positions, rows = self.team.here(context.slots)
        shares = torch.tensor([stats.shares[position] for position in positions], dtype=torch.double)
        return stats, combine(shares, rows_at(self.shared.cohort.rows, rows))


class StreamedSums(Aggregator):
    """Aggregator for linear rules that adds up updates while the cohort is trained part by part (in waves).

    Besides the updates, it adds up the messages and buffers of the workers, and keeps their losses. All sums have one
    term for each stack, in a fixed order, so that rounding does not depend on the number of processes.
    """

    def begin(self, context: AggregationContext) -> None:
        """Begin a round with the workers in `context`."""
        shared, row = self.shared, self.shared.server.row
        self._coefficients, self._bad = torch.tensor(self.linear(context, []).shares, dtype=torch.double), list[int]()
        self._losses = torch.zeros(len(context.slots), dtype=torch.double)
        blocks = [slice(0, len(row))] if self.team.divided else self.server.blocks
        self._sums = [(block, torch.zeros_like(row[block])) for block in blocks]
        self._messages = {name: rows.new_zeros(rows.shape[1]) for name, rows in shared.cohort.messages.items()}
        self._buffers = torch.zeros_like(shared.server.buffers)
        self._weight = self._buffers.new_zeros(1)

    def add(self, context: AggregationContext, positions: np.ndarray, stacks: np.ndarray) -> list[int]:
        """Add the updates, messages and buffers of a wave to the sums. Return the IDs of excluded workers.

        Args:
            context: workers of the wave.
            positions: position in the cohort of each worker of the wave.
            stacks: number of each worker's stack.
        """
        cohort, coefficients = self.shared.cohort, self._coefficients[positions]
        bad = self.updates.nonfinite(context)
        self._losses[positions] = super().train_losses(context)
        self._bad += positions[bad].tolist()
        coefficients[bad] = 0
        here, rows = (np.array(numbers, dtype=np.int64) for numbers in self.team.here(context.slots))
        for stack in np.unique(stacks[here]):
            of_stack = stacks[here] == stack
            updates = rows_at(cohort.rows, rows[of_stack])
            for block, total in self._sums:
                total += combine(coefficients[here[of_stack]], updates[:, block])
            is_added = of_stack & ~np.isin(here, bad)
            if self.team.computes:
                for name, messages in cohort.messages.items():
                    self._messages[name] += rows_at(messages, rows[is_added]).sum(0)
                self._add_buffers(context, here[is_added], rows[is_added])
        return [context.workers[position] for position in bad]

    def _add_buffers(self, context: AggregationContext, positions: np.ndarray, rows: np.ndarray) -> None:
        buffers = rows_at(self.shared.cohort.buffers, rows)
        weights = torch.ones(len(rows)) if context.weights is None else context.weights[positions]
        weights = weights.to(buffers)
        if self.task.experiment.nonfinite == "exclude":
            weights = weights * buffers.isfinite().all(1)
        used = weights > 0
        self._buffers += weights[used] @ buffers[used]
        self._weight += weights.sum()

    def aggregate(self, context: AggregationContext) -> tuple[AggregatedUpdate, AggregationStats]:
        bad = sorted(self._bad)
        stats = self.linear(context, bad)
        if bad:  # the coefficients of the other updates have all changed by the same factor
            before, after = self._coefficients, torch.tensor(stats.shares, dtype=torch.double)
            largest = int((before * (after != 0)).argmax())
            for _, total in self._sums:
                total *= float(after[largest] / before[largest])
        parts, self._sums = self._sums, []
        if self.team.divided:
            parts = [(self.server.columns, self.team.sum_columns(parts[0][1]))]
        return AggregatedUpdate(parts, len(context.slots) - len(bad)), stats

    def sums_of_messages(self, slots: Sequence[int]) -> State:
        return {name: self.team.reduce(total) for name, total in self._messages.items()}

    def train_losses(self, context: AggregationContext) -> Tensor:
        return self._losses

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        if not self.team.computes or not len(self._buffers) or self.task.experiment.buffers == "frozen":
            return
        total, weight = self.team.reduce(self._buffers), self.team.reduce(self._weight)
        if weight > 0:
            self.shared.server.buffers.copy_(total / weight)


def _stats(
    context: AggregationContext, bad: list[int], shares: Tensor | None, inputs: AggregationInputs
) -> AggregationStats:
    """Return the statistics of an aggregation.

    Args:
        context: workers of the aggregation, including the workers whose updates were excluded.
        bad: positions of the updates that were excluded because of NaN or infinity.
        shares: coefficients of the other updates; None if the rule is not linear.
        inputs: inputs of the rule, with the metrics that the rule recorded.
    """
    stats = AggregationStats(excluded=[context.workers[position] for position in bad])
    if shares is not None:
        values = iter(shares.tolist())
        stats.shares = [0.0 if position in bad else next(values) for position in range(len(context.slots))]
    stats.metrics.record(inputs.metrics)
    return stats


class ReportCheck:
    """Check whether the aggregation rule can aggregate the updates of a round, from which workers may drop out."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self._refusal = experiment, cache(partial(_refusal, experiment.rule))

    def __call__(self, round: int, cohort: Cohort, where: str = "") -> None:
        """Raise ExperimentError if the rule cannot aggregate the updates of the workers that remain in `cohort`.

        `where` follows the round in the message, for example ", group 3".
        """
        weights = self._experiment.weights if self._experiment.rule.accepts_weights else None
        n, weightless = len(cohort.workers), isinstance(weights, list) and not any(weights[k] for k in cohort.workers)
        if reason := self._refusal(n, weightless):
            problem, remedy = f"the cohort has {n} workers", "other aggregate.weights or " * weightless
            if cohort.dropped:
                dropout, chosen = self._experiment.sampling.dropout_rate, n + len(cohort.dropped)
                problem = f"sampling.dropout_rate = {dropout:g} leaves {n} of {chosen} workers"
                remedy = f"a lower sampling.dropout_rate or {remedy}"
            raise ExperimentError(f"round {round}{where}: {problem}; {reason}; or use {remedy}another aggregate.rule")


def _refusal(rule: Pipeline, n: int, weightless: bool) -> str:
    """Return why the rule cannot aggregate the updates of n workers; "" if it can.

    `weightless` says whether all of these updates have weight 0.
    """
    try:
        rule.dry_run(n, weights=torch.zeros(n).double() if weightless else None)
    except ExperimentError as error:
        return str(error)
    return ""
