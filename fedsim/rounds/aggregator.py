"""One aggregation: attack, check for NaN and infinity, aggregation rule, server step, buffers.

The engine `distributed` communicates as much as the rule needs, for n rows of d numbers on P ranks
(docs/explanation/performance.md has the formulas):

    rules that are a weighted mean          each rank sums its own rows, and the sums [d] are added over the ranks
    rules by columns or by inner products   each rank receives its columns of all rows [n, d / P]; inner products are
                                            summed over the ranks
    all other rules, and attacks            rank 0 receives all rows and computes the result
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, Gram, column_blocks, screened
from fedsim.aggregation.numerics.columns import NonfiniteError, Reduce, bad_rows, combine, keep_own, reading
from fedsim.aggregation.rules.averages import mean
from fedsim.clients import UpdateCorrection
from fedsim.processes.group import Group, rows_at
from fedsim.processing import apply_chain
from fedsim.rounds.round_stats import AggregationStats
from fedsim.system.devices import synchronize, to_device
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask, Sync
from fedsim.training.weights import AggregationContext, linear_shares, screen, spoil

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


class AttackedRows:
    """Updates of all workers, for an attack that tries several values of the Byzantine updates.

    Args:
        rows: updates of all workers of the round, [n, d].
        honest: positions of the h honest workers in `rows`.
        attackers: for each worker, whether it is Byzantine, in the order of `rows`.

    Attributes:
        honest: updates of the honest workers, [h, d].
    """

    def __init__(self, rows: Tensor, honest: Tensor, attackers: Sequence[bool]) -> None:
        self._attackers, h = torch.tensor(attackers), len(honest)
        self._distinct = rows.new_empty(len(attackers), rows.shape[1])  # the honest rows, then the Byzantine rows
        self.honest = torch.index_select(rows, 0, honest, out=self._distinct[:h])
        self._of_honest: Gram | None = None

    def gram(self, byzantine: Tensor) -> Gram:
        """Return the inner products of all workers' updates, if the Byzantine workers send `byzantine`.

        Args:
            byzantine: one update for each of b Byzantine workers, [b, d], or a single update [d] that all of them send.
        """
        n, h = len(self._attackers), len(self.honest)
        added = 1 if byzantine.ndim == 1 else n - h
        distinct = self._distinct[: h + added]
        distinct[h:] = byzantine
        self._of_honest = self._of_honest or Gram(self.honest)
        places = torch.where(self._attackers, h, self._attackers.logical_not().cumsum(0) - 1)
        if added > 1:
            places += torch.where(self._attackers, self._attackers.cumsum(0) - 1, 0)
        return self._of_honest.extended(distinct).mixed(torch.eye(len(distinct), dtype=torch.double)[places])


class Aggregator:
    """Computes the new global model from the updates of the workers.

    Each process has one aggregator. If the rule treats each parameter separately, each process aggregates a part of the
    parameters. Otherwise the first process computes the whole aggregation.

    Args:
        group: processes that compute together. All processes must call each method at the same time.
        task: run to compute.
        shared: tensors of the run.

    Attributes:
        root_slot: row index of the update that the server computes from its own samples; None if the rule uses no
            such update.
        has_last: whether the aggregated update of the previous aggregation is available to rules and attacks.
        losses: loss of the global model on the samples of each of n workers, [n]; empty if the rule uses no losses.
        broadcast_bytes: bytes that every worker received in the current round; 0 without the setting `broadcast`.
        deferred_check: check for NaN and infinity at the end of each round; None if every step is checked.
    """

    def __init__(self, group: Group, task: RunTask, shared: SharedState) -> None:
        self._group, self._task, self._shared = group, task, shared
        n_rows, process = len(shared.cohort.workers), group.process
        self.root_slot = n_rows if task.experiment.rule.accepts("root") else None
        self._columns = columns = group.columns(len(shared.server.row))
        width = columns.stop - columns.start
        self._blocks = list(column_blocks(width, process.index, process.count, n=n_rows, device=task.device))
        self._own_row = shared.server.row[columns]
        self._sent = shared.server.row  # row from which the workers of this round started
        self._state: dict[str, Tensor] = {}  # state of the rule
        self._attack_state: dict[str, Tensor] = {}
        self._number = 0  # number of aggregations so far, the same in every process
        self._workers = 0  # number of workers whose rows the current aggregation uses
        self._moment: tuple[int, ...] = (1,)  # (round,) or (round, step) of the current aggregation
        self._gathered: Tensor | None = None  # all rows of the current aggregation, in the first process
        self._shares_by_weights = lru_cache(1)(partial(linear_shares, task))  # shares rarely change between steps
        self._result: list[tuple[slice, Tensor]] = []  # (columns, aggregated update in these columns)
        self._complete = False  # whether every process has the whole aggregated update
        self.has_last, self.losses, self.broadcast_bytes = False, shared.cohort.losses[:0], 0
        rule, avoids_waits = task.experiment.rule, task.device.type != "cpu" and task.experiment.nonfinite != "keep"
        avoids_waits = avoids_waits and process.count == 1 and not group.divided
        # A built-in rule that reads norms or distances of all updates finds out whether the updates are finite.
        self._rule_checks = avoids_waits and rule.built_in and not rule.columnwise
        # A round that fails the check is repeated. The state of an attack would then advance twice.
        defers = avoids_waits and rule.columnwise and "state" not in task.experiment.attack.component.accepts
        self.deferred_check = DeferredCheck(shared) if defers else None

    def sent_row(self, round: int) -> Tensor:
        """Send parameters to the workers, and return those [d] from which they start in `round`, read-only."""
        start = self._task.server_at(round).broadcast(self._own_row, self._shared.server.states["parameters"])
        self._sent = self._shared.server.row
        if start is not self._own_row:
            self._sent = torch.empty_like(self._sent)
            self._sent[self._columns] = start
            self._group.complete(self._sent)
        if self._task.experiment.broadcast:
            self.broadcast_bytes = self._group.from_first(self._update_copy(round) if self._group.computes else 0)
            self._sent = self._shared.server.broadcast["copy"]
        return self._sent

    def _update_copy(self, round: int) -> int:
        """Add the processed difference of the sent parameters to the workers' copy (EF21-P, Gruntkowska et al. 2023).

        Returns the number of bytes that each worker receives.
        """
        task, state = self._task, self._shared.server.broadcast
        columns = task.algorithm.personal_columns.others(len(self._sent))
        difference = columns.of(self._sent - state["copy"])
        chain, seed = task.experiment.broadcast_chain, task.experiment.seed
        nbytes = apply_chain(chain, difference, seed, (round,), {}, state, task.shapes, "broadcast")
        columns.write(state["copy"], columns.of(state["copy"]).add_(difference))
        return nbytes

    def begin(self, round: int, rows: Sequence[int] | np.ndarray) -> None:
        """Begin an aggregation: replace trained parameters by updates, in place, and check for NaN and infinity.

        If the round aggregates gradients, the rows already contain them and are only checked.

        Args:
            round: number of the round.
            rows: indices of the workers' rows that this process has trained.
        """
        self._number += 1
        for run in _runs(rows) if self._task.sync_in(round) == "parameters" else ():
            self._shared.cohort.rows[run].sub_(self._sent)  # `-=` would also copy the result
        self.rows_changed(rows)

    def rows_changed(self, rows: Sequence[int] | np.ndarray) -> None:
        """Check workers' rows for NaN and infinity. Call this method after the rows have changed.

        Args:
            rows: indices of the workers' rows that this process has trained.
        """
        self._gathered = None
        cohort = self._shared.cohort
        for run in _runs(rows) if self._checks_now else ():
            cohort.unfit[run] = 0
            sums = cohort.rows[run].sum(1).cpu()  # a sum of finite numbers may overflow: check again
            for place in (~sums.isfinite()).nonzero().flatten().tolist():
                if not cohort.rows[run.start + place].isfinite().all():
                    cohort.unfit[run.start + place] = self._number

    @property
    def _checks_now(self) -> bool:
        """Whether rows are checked for NaN and infinity now, not by the rule or at the end of the round."""
        return self._task.experiment.nonfinite != "keep" and not self._defers and not self._rule_checks

    @property
    def _defers(self) -> bool:
        return self.deferred_check is not None and self.deferred_check.active

    def attack(self, context: AggregationContext) -> None:
        """Replace the Byzantine workers' updates by those that the attack computes.

        If the attack needs honest updates and there are none, nothing changes.
        """
        task, shared, group = self._task, self._shared, self._group
        workers = task.byzantine.in_round(context.moment[0])
        attackers = [worker in workers for worker in context.workers]
        byzantine = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if attacks]
        if not byzantine or (all(attackers) and task.experiment.attack.component.needs_honest):
            return  # without honest rows, the Byzantine workers send their trained rows
        self._read_losses(context)
        rows = self.gathered(context.slots)
        with group.at_first():
            if group.index == 0:
                self._write_byzantine(context, attackers, rows)
        mine, sent = group.return_rows(rows, byzantine)
        index = to_device(torch.tensor(mine, dtype=torch.int64), task.device)
        for message in shared.cohort.messages.values():  # an attack does not replace messages
            spoil(task, sent, message[index])
        shared.cohort.rows[index] = sent
        if self._checks_now:
            shared.cohort.unfit[mine] = torch.where(sent.isfinite().all(1).cpu(), 0, self._number)

    def _write_byzantine(self, context: AggregationContext, attackers: list[bool], rows: Tensor) -> None:
        """Compute the updates that the Byzantine workers send, and write them to `rows`.

        Args:
            context: workers of this aggregation.
            attackers: for each worker of `context`, whether it is Byzantine.
            rows: updates of all workers, changed in place.
        """
        task, shared = self._task, self._shared
        slots, of_attackers = torch.tensor(context.slots), torch.tensor(attackers)
        index = to_device(slots[of_attackers], task.device)
        attacked = AttackedRows(rows, to_device(slots[~of_attackers], task.device), attackers)

        def aggregate(byzantine: Tensor) -> Tensor:
            rows[index] = byzantine
            if self._rule_checks and task.experiment.rule.accepts("gram"):
                with contextlib.suppress(NonfiniteError), reading():
                    inputs = self._inputs(context, rows)
                    inputs.gram = attacked.gram(byzantine)
                    return task.experiment.rule(inputs).update
            inputs, bad = screened(self._inputs(context, rows), "exclude")
            if not bad and task.experiment.rule.accepts("gram"):
                inputs.gram = attacked.gram(byzantine)
            return task.experiment.rule(inputs).update

        byzantine, self._attack_state = task.experiment.attack.component(
            attacked.honest,
            rows[index],
            seed=task.experiment.seed,
            moment=context.moment,
            last=shared.server.last if self.has_last else None,
            aggregate=aggregate,
            workers=[worker for worker, attacks in zip(context.workers, attackers, strict=True) if not attacks],
            state=self._attack_state,
        )
        personal = task.algorithm.personal_columns
        if personal.width:  # workers never send personal parameters
            byzantine = byzantine.clone()
            personal.write(byzantine, byzantine.new_zeros(personal.width))
        rows[index] = byzantine

    def aggregate(self, context: AggregationContext) -> AggregationStats:
        """Apply the aggregation rule to the workers' updates, and return statistics of the aggregation.

        The method `server_step` then applies the result to the global model.
        """
        rule, group = self._task.experiment.rule, self._group
        self._moment = context.moment
        if rule.linear_by_weights and group.divided:
            return self._add_rows(context)
        self._read_losses(context)
        bad = self._bad(context)
        self._workers = len(context.slots) - len(bad)
        if rule.columnwise or (rule.by_parts and group.divided):
            return self._aggregate_columns(context, bad)
        rows = self.gathered(context.slots)
        with group.at_first() as results:
            if group.index == 0:
                inputs, outcome, are_finite = self._inputs(context, rows), None, False
                if self._rule_checks:
                    outcome, are_finite = rule.without_check(inputs)
                    bad = [] if are_finite else bad_rows(inputs.updates)
                    self._workers -= len(bad)
                if outcome is None or bad:
                    inputs = screen(self._task, context.moment[0], self._inputs(context, rows), bad)
                    outcome = rule(inputs)
                self._state, self._result = outcome.state, [(slice(0, len(outcome.update)), outcome.update)]
                stats = _stats(context, bad, outcome.shares, inputs)
                results.append(stats.on_host() if group.divided else stats)
        self._result = group.divide(self._result)
        return results[0] if results else AggregationStats()

    def _aggregate_columns(self, context: AggregationContext, bad: list[int]) -> AggregationStats:
        """Aggregate the parameters that are assigned to this process, and return statistics of the aggregation.

        Args:
            context: updates to aggregate.
            bad: positions of the updates with NaN or infinity, which are excluded.
        """
        rule, group, start = self._task.experiment.rule, self._group, self._columns.start
        rows = group.columns_of(self._shared.cohort.rows, context.slots)
        inputs = self._inputs(context, rows, group.reduce)
        inputs = screen(self._task, context.moment[0], inputs, bad)
        if rule.columnwise:
            lazy, shares = inputs.rows(), self._shares(context, inputs, bad)
            self._result = [
                (moved(block, start), rule.of_columns(inputs.updates[:, block], lazy, inputs, shares))
                for block in self._blocks
            ]
        else:
            outcome = rule(inputs)
            self._state, shares = outcome.state, outcome.shares
            self._result = [(self._columns, outcome.update)]
        if self.deferred_check is not None and self._defers:
            # If no coefficient is 0, NaN and infinity in any update are also in the result.
            is_in_result = shares is not None and bool(shares.all())
            of_result = [update.unsqueeze(0) for _, update in self._result]
            for rows in of_result if is_in_result else [inputs.updates]:
                self.deferred_check.add(rows)
        return _stats(context, bad, shares, inputs)

    def _add_rows(self, context: AggregationContext) -> AggregationStats:
        """Apply a linear rule to the updates of all ranks, and return statistics of the aggregation.

        Each rank computes the weighted sum of its own workers' updates. The ranks then add up these sums.
        """
        task, shared, group = self._task, self._shared, self._group
        if shared.server.states[task.sync_in(context.moment[0])]:
            stats, total = self._sum_own_rows(context, self._bad(context))
            self._result = [(self._columns, group.sum_columns(total))]
            return stats
        stats, total = self._sum_own_rows(context, [])
        if (shared.cohort.unfit[group.here(context.slots)[1]] == self._number).any():
            total.fill_(math.nan)
        group.reduce(total)
        if self._checks_now and not math.isfinite(total.sum()) and (bad := self._bad(context)):
            stats, total = self._sum_own_rows(context, bad)
            group.reduce(total)
        self._result, self._complete = [(slice(0, len(total)), total)], True
        return stats

    def _sum_own_rows(self, context: AggregationContext, bad: list[int]) -> tuple[AggregationStats, Tensor]:
        """Return statistics of an aggregation by a linear rule, and the weighted sum [d] of this rank's updates.

        Args:
            context: updates to aggregate, of all ranks.
            bad: positions of the updates with NaN or infinity, which are excluded.
        """
        no_columns = self._shared.cohort.rows.new_empty(len(self._shared.cohort.workers), 0)
        inputs = screen(self._task, context.moment[0], self._inputs(context, no_columns), bad)
        stats = _stats(context, bad, self._shares(context, inputs, bad), inputs)
        assert stats.shares is not None
        self._workers = len(inputs.updates)
        places, rows = self._group.here(context.slots)
        shares = torch.tensor([stats.shares[place] for place in places], dtype=torch.double)
        return stats, combine(shares, rows_at(self._shared.cohort.rows, rows))

    def aggregate_nothing(self, round: int) -> None:
        """Set the result of a round without updates: zeros, to which noise can be added."""
        self._moment, start = (round,), self._columns.start
        self._result = [(moved(block, start), torch.zeros_like(self._own_row[block])) for block in self._blocks]

    def add_to_result(self, row: Tensor) -> None:
        """Add `row` [d] to the aggregated update. All processes must pass the same numbers."""
        self._result = [(columns, update + row[columns]) for columns, update in self._result]

    def server_step(self) -> None:
        """Update the global model with the result of `aggregate`."""
        task, server, workers = self._task, self._shared.server, len(self._shared.data.shards)
        sync, algorithm = task.sync_in(self._moment[0]), task.algorithm_at(*self._moment)
        correction = algorithm if sync == "parameters" and isinstance(algorithm, UpdateCorrection) else None
        hides_cohort = task.experiment.privacy.component.at_server  # its actual size would not be covered by epsilon
        counted = task.experiment.expected_updates if hides_cohort else self._workers
        row_state = {name: row for name, row in server.algorithm.items() if correction and len(row) == len(server.row)}
        for block, update in self._result:
            if task.keeps_last:
                server.last[block] = update
            if correction:
                columns = {name: row[block] for name, row in row_state.items()}
                correction.correct(update, server.algorithm | columns, counted, workers)
            task.stepper_at(self._moment).step(server.row[block], update, self._state_of(sync, block))
        for row in (server.row, *[server.last] * task.keeps_last, *row_state.values()) if not self._complete else ():
            self._group.complete(row)
        self._result, self._complete, self.has_last = [], False, task.keeps_last

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Set the global model's buffers to the weighted mean of the workers' buffers.

        The buffers of `excluded` workers are left out. If no worker is left, the global buffers do not change.
        """
        task, shared = self._task, self._shared
        if not self._group.computes or not shared.server.buffers.numel() or task.experiment.buffers == "frozen":
            return
        workers, weights = context.workers, context.weights
        buffers = self._group.of_all(shared.cohort.buffers, context.slots)
        if task.experiment.nonfinite == "exclude":
            unfit = {worker for worker, fit in zip(workers, buffers.isfinite().all(1).tolist(), strict=True) if not fit}
            excluded = unfit.union(excluded)
        if excluded:
            counted = [place for place, worker in enumerate(workers) if worker not in excluded]
            workers, buffers = [workers[place] for place in counted], buffers[counted]
            weights = None if weights is None else weights[counted]
        if workers and (weights is None or weights.any()):
            shared.server.buffers.copy_(mean(buffers, weights))

    def begin_with_parameters(self) -> None:
        """Reset the states of the aggregation rule, the attack and the server optimizer.

        Call this method when a run changes from aggregating gradients to aggregating parameters.
        """
        self._state, self._attack_state, self.has_last = {}, {}, False
        for block in self._blocks:
            block = moved(block, self._columns.start)
            start = self._task.experiment.server.component.start(self._shared.server.row[block])
            for name, tensor in self._state_of("parameters", block).items():
                tensor.copy_(start[name])
        synchronize(self._task.device)

    def rule_state(self) -> dict[str, Tensor]:
        """Return a copy of the state tensors of the aggregation rule and the attack, by name."""
        named = self._state | {f"attack.{name}": tensor for name, tensor in self._attack_state.items()}
        return {name: tensor.clone() for name, tensor in named.items()}

    def restore_rule(self, state: dict[str, Tensor]) -> None:
        """Restore the states of the aggregation rule and the attack from the tensors that `rule_state` returned."""
        self._state, self._attack_state = {}, {}
        for name, tensor in state.items() if self._group.computes else ():
            target = self._attack_state if name.startswith("attack.") else self._state
            target[name.removeprefix("attack.")] = tensor.to(self._task.device, copy=True)

    def gathered(self, slots: Sequence[int]) -> Tensor:
        """Return the updates of all workers as one tensor. In all processes but the first, the result is undefined.

        `slots` are positions of the workers in the cohort.
        """
        if self._gathered is None:
            slots = [*slots] if self.root_slot is None else [*slots, self.root_slot]
            self._gathered = self._group.gather_rows(self._shared.cohort.rows, slots)
        return self._gathered

    def _state_of(self, sync: Sync, block: slice) -> dict[str, Tensor]:
        """Return the part of an optimizer's state that concerns some parameters: views of the state tensors, by name.

        Args:
            sync: "parameters" for the server optimizer, "gradients" for the client algorithm.
            block: positions of the parameters in the flat vector of all parameters.
        """
        place = moved(block, -self._columns.start)
        return {name: tensor[place] for name, tensor in self._shared.server.states[sync].items()}

    def _inputs(self, context: AggregationContext, rows: Tensor, reduce: Reduce = keep_own) -> AggregationInputs:
        """Return the inputs of the aggregation rule.

        Args:
            context: workers that take part in this aggregation.
            rows: updates of all workers, [n, d], or some of their columns.
            reduce: function that adds up values, or takes their maximum, over all processes.
        """
        return inputs_of(
            self._task.experiment,
            context.moment,
            updates=rows_at(rows, context.slots),
            workers=context.workers,
            weights=context.weights,
            root=None if self.root_slot is None else rows[self.root_slot],
            losses=self.losses if self._task.experiment.rule.accepts("losses") else None,
            state=self._state,
            last=self._shared.server.last if self.has_last else None,
            reduce=reduce,
        )

    def _read_losses(self, context: AggregationContext) -> None:
        if self._task.experiment.rule.accepts("losses"):
            losses = self._group.of_all(self._shared.cohort.losses, context.slots)
            self.losses = losses.clone()  # a rule may write to them

    def _bad(self, context: AggregationContext) -> list[int]:
        """Return the positions in `context` of the updates with NaN or infinity."""
        if not self._checks_now:
            return []
        unfit = self._group.of_all(self._shared.cohort.unfit, context.slots)
        return (unfit == self._number).nonzero().flatten().tolist()

    def _shares(self, context: AggregationContext, inputs: AggregationInputs, bad: list[int]) -> Tensor | None:
        """Return the coefficients [n] that a linear rule gives to n finite updates; None if the rule is not linear.

        Args:
            context: updates to aggregate.
            inputs: inputs of the rule, without the updates at positions `bad`.
            bad: positions of the updates with NaN or infinity.
        """
        if bad or not self._task.experiment.rule.linear_by_weights:
            return self._task.experiment.rule.shares(inputs)
        return self._shares_by_weights(context.weights, len(context.slots))


def moved(block: slice, by: int) -> slice:
    """Return a slice whose start and stop are increased by `by`."""
    return slice(block.start + by, block.stop + by)


def _stats(
    context: AggregationContext, bad: list[int], shares: Tensor | None, inputs: AggregationInputs
) -> AggregationStats:
    """Return the statistics of an aggregation.

    Args:
        context: aggregated updates, including excluded ones.
        bad: positions of the updates that were excluded because of NaN or infinity.
        shares: coefficients of the other updates; None if the rule is not linear.
        inputs: inputs of the rule, with the metrics that the rule recorded.
    """
    stats = AggregationStats(excluded=[context.workers[place] for place in bad])
    if shares is not None:
        values = iter(shares.tolist())
        stats.shares = [0.0 if place in bad else next(values) for place in range(len(context.slots))]
    stats.metrics.record(inputs.metrics)
    return stats


def _runs(slots: Sequence[int] | np.ndarray) -> list[slice]:
    """Return slices of consecutive numbers: [3, 1, 2, 7] is divided into slice(1, 4) and slice(7, 8)."""
    numbers = np.sort(np.asarray(slots, dtype=np.int64))
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [slice(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
