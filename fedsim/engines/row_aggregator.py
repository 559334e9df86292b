"""The aggregation of rows that lie in the memory of this process: attack, screening, rule, server step, buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, column_blocks, screened
from fedsim.aggregation.inputs import Reduce, keep_own
from fedsim.engines.aggregator import combine_buffers, combines_buffers, write_attacked
from fedsim.engines.attacked_rows import AttackedRows
from fedsim.engines.deferred_check import DeferredCheck
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.task import SharedState, Sync, TaskSpec
from fedsim.errors import DivergedError
from fedsim.system.devices import synchronize, to_device


class RowAggregator:
    """One process's share of an aggregation; see `Aggregator` for the methods of a round.

    Each process applies a columnwise rule to its blocks of columns. Other rules, and attacks, need whole rows, so the
    first process computes them.

    Args:
        process: which share of the columns is this process's.
        shared: with the rows of all members of the cohort.
        root_slot: the slot of the server's own row, if it has one.
        reduce: combines values of several aggregators that have some columns of the rows each.

    Attributes:
        result: the aggregated update in this process's columns, after `aggregate`.
        workers: of how many workers the last aggregation used the rows.
    """

    def __init__(
        self,
        process: ProcessContext,
        task: TaskSpec,
        shared: SharedState,
        root_slot: int | None,
        reduce: Reduce = keep_own,
    ) -> None:
        self._task, self._shared, self._root_slot, self._reduce = task, shared, root_slot, reduce
        cuts = column_blocks(
            len(shared.global_row), process.index, process.count, n=len(shared.rows), device=task.device
        )
        self._blocks = list(cuts)
        self._first = process.index == 0
        self._state: dict[str, Tensor] = {}  # of the rule
        self._attack_state: dict[str, Tensor] = {}
        self._number = 0  # of aggregations so far, the same in every process
        self.workers = 0  # whose rows the current aggregation uses
        self._sync: Sync = task.sync_in(1)  # of the current aggregation
        self._moment: tuple[int, ...] = (1,)  # of it
        self._sent = shared.global_row
        self._known_shares: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)  # weights, rows, their shares
        self.has_last = False
        self.result: list[tuple[slice, Tensor]] = []
        may_defer = task.device.type != "cpu" and process.count == 1 and task.nonfinite != "keep"
        may_defer = may_defer and "state" not in task.attack.accepts  # its state would be that of the repeated steps
        self.deferred_check = DeferredCheck(shared) if may_defer and task.rule.columnwise else None

    def sent_row(self, round: int) -> Tensor:
        server = self._task.server_at(round)
        self._sent = server.broadcast(self._shared.global_row, self._shared.states["parameters"])
        return self._sent

    def begin(self, round: int, slots: Sequence[int]) -> None:
        self._number += 1
        for run in _runs(slots) if self._task.sync_in(round) == "parameters" else ():
            self._shared.rows[run.start : run.stop].sub_(self._sent)  # `-=` would copy the rows onto themselves
        self.rows_processed(slots)

    def rows_processed(self, slots: Sequence[int]) -> None:
        for run in _runs(slots) if self._checks_now else ():  # a sum may overflow, so this is a suspicion only
            sums = self._shared.rows[run.start : run.stop].sum(1)
            suspects = (~sums.cpu().isfinite()).nonzero().flatten() + run.start
            self._shared.unfit[suspects] = self._number

    @property
    def _checks_now(self) -> bool:
        """Whether each aggregation finds out which rows are not finite."""
        return self._task.nonfinite != "keep" and not self._defers

    @property
    def _defers(self) -> bool:
        return self.deferred_check is not None and self.deferred_check.active

    def attack(self, context: AggregationContext) -> None:
        task, shared = self._task, self._shared
        workers = task.byzantine.in_round(context.moment[0])
        attackers = [worker in workers for worker in context.workers]
        byzantine = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if attacks]
        honest = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if not attacks]
        if not self._first or not byzantine or (not honest and task.attack.needs_honest):
            return  # without honest rows, the Byzantine workers send what they have trained
        index = to_device(torch.tensor(byzantine), task.device)
        attacked = AttackedRows(shared.rows, to_device(torch.tensor(honest, dtype=torch.int64), task.device), attackers)

        def aggregate(rows: Tensor) -> Tensor:
            shared.rows[index] = rows
            inputs, bad = screened(self._inputs(context), "exclude")
            if not bad and task.rule.accepts("gram"):
                inputs.gram = attacked.gram(rows)
            return task.rule(inputs).update

        rows, self._attack_state = task.attack(
            attacked.honest,
            shared.rows[index],
            seed=task.seed,
            moment=context.moment,
            last=shared.last if self.has_last else None,
            aggregate=aggregate,
            workers=[worker for worker, attacks in zip(context.workers, attackers, strict=True) if not attacks],
            state=self._attack_state,
        )
        personal = task.solver.personal_columns
        if personal.width:  # an attacker cannot send them
            rows = rows.clone()
            personal.write(rows, rows.new_zeros(personal.width))
        write_attacked(task, shared, index, rows)
        if self._checks_now:
            shared.unfit[byzantine] = torch.where(shared.rows[index].isfinite().all(1).cpu(), 0, self._number)

    def aggregate(self, context: AggregationContext, bad: list[int] | None = None) -> AggregationStats:
        """Apply the rule to the rows. The first process returns the stats.

        Args:
            bad: positions of the rows that are not finite, if the caller knows them.
        """
        rule = self._task.rule
        self._sync, self._moment = self._task.sync_in(context.moment[0]), context.moment
        inputs, bad = self._screened(context, bad)
        self.workers = len(inputs.updates)
        if rule.columnwise:
            rows, shares = inputs.rows(), self._shares(context, inputs, bad)
            self.result = [
                (block, rule.of_columns(inputs.updates[:, block], rows, inputs, shares)) for block in self._blocks
            ]
        elif self._first:
            outcome = rule(inputs)
            self._state, shares = outcome.state, outcome.shares
            self.result = [(slice(None), outcome.update)]
        else:
            return AggregationStats()
        stats = _stats(context, bad, shares)
        stats.metrics.record(inputs.metrics)
        return stats

    def linear_stats(self, context: AggregationContext, bad: list[int]) -> AggregationStats:
        """The stats of a linear rule, from which the caller computes the result.

        Args:
            bad: positions of the rows that are not finite.
        """
        inputs, bad = self._screened(context, bad)
        self.workers = len(inputs.updates)
        return _stats(context, bad, self._shares(context, inputs, bad))

    def set_result(self, context: AggregationContext, update: Tensor, bad: list[int]) -> None:
        """Set the aggregated update [d], which the caller has computed without the rows at the positions `bad`."""
        self.workers = len(context.slots) - len(bad)
        self._sync, self._moment = self._task.sync_in(context.moment[0]), context.moment
        self.result = [(slice(None), update)]

    def server_step(self) -> None:
        task, shared = self._task, self._shared
        for block, update in self.result:
            if task.keeps_last:
                shared.last[block] = update
            self._correct(update, block)
            task.stepper_at(self._moment).step(shared.global_row[block], update, self._state_of(block))
        self.result = []
        self.has_last = task.keeps_last

    def _correct(self, update: Tensor, block: slice) -> None:
        """Let the client algorithm correct an update in place."""
        shared, algorithm = self._shared, self._task.solver_at(*self._moment)
        if self._sync == "parameters" and algorithm.has("correct"):
            d = len(shared.global_row)
            server = {name: kept[block] if len(kept) == d else kept for name, kept in shared.server_state.items()}
            algorithm.correct(update, server, self.workers, len(shared.shards))

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        if self._first and combines_buffers(self._task, self._shared):
            buffers = self._shared.buffers[: len(context.slots)]
            combine_buffers(self._task, self._shared, context, excluded, buffers)

    def rule_state(self) -> dict[str, Tensor]:
        named = self._state | {f"attack.{name}": tensor for name, tensor in self._attack_state.items()}
        return {name: tensor.clone() for name, tensor in named.items()}

    def restore_rule(self, state: dict[str, Tensor]) -> None:
        self._state, self._attack_state = {}, {}
        for name, tensor in state.items() if self._first else ():
            of_attack = name.startswith("attack.")
            kept = self._attack_state if of_attack else self._state
            kept[name.removeprefix("attack.")] = tensor.to(self._task.device, copy=True)

    def states_by_columns(self) -> dict[str, Tensor]:
        return {}

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        """Do nothing: optimizer states lie whole in the shared memory."""

    def train_losses(self) -> Tensor:
        return self._shared.train_loss

    def round_rows(self, context: AggregationContext) -> tuple[Tensor, Tensor] | None:
        return self._shared.rows, self._shared.losses

    def begin_with_parameters(self) -> None:
        self._state, self._attack_state, self.has_last, self._sync = {}, {}, False, "parameters"
        for block in self._blocks:
            start = self._task.server.start(self._shared.global_row[block])
            for name, tensor in self._state_of(block).items():
                tensor.copy_(start[name])
        synchronize(self._task.device)

    def _state_of(self, block: slice) -> dict[str, Tensor]:
        return {name: tensor[block] for name, tensor in self._shared.states[self._sync].items()}

    def _inputs(self, context: AggregationContext) -> AggregationInputs:
        task, shared = self._task, self._shared
        slots = list(context.slots)
        return AggregationInputs(
            updates=_rows_at(shared.rows, slots),
            weights=context.weights,
            root=None if self._root_slot is None else shared.rows[self._root_slot],
            losses=shared.losses[slots] if task.rule.accepts("losses") else None,
            workers=list(context.workers),
            seed=task.seed,
            moment=context.moment,
            state=self._state,
            last=shared.last if self.has_last else None,
            local_lr=task.local_lr_at(*context.moment),
            sync=task.sync_in(context.moment[0]),
            reduce=self._reduce,
            weight_total=1.0 if task.weights == "inverse_probability" else None,
        )

    def _shares(self, context: AggregationContext, inputs: AggregationInputs, bad: list[int]) -> Tensor | None:
        """The shares of a linear rule; those of the step before if only the weights determine them."""
        if bad or not self._task.rule.linear_by_weights:
            return self._task.rule.shares(inputs)
        weights, n, shares = self._known_shares
        if context.weights is not weights or len(context.slots) != n:
            shares = self._task.rule.shares(inputs)
            self._known_shares = context.weights, len(context.slots), shares
        return shares

    def _screened(self, context: AggregationContext, bad: list[int] | None) -> tuple[AggregationInputs, list[int]]:
        """The inputs without rows that are not finite, and the positions of these."""
        inputs = self._inputs(context)
        if self.deferred_check is not None and self.deferred_check.active:
            self.deferred_check.add(inputs.updates)
            return inputs, []
        if bad is None and not (self._shared.unfit[list(context.slots)] == self._number).any():
            return inputs, []
        try:
            return screened(inputs, self._task.nonfinite, bad)
        except DivergedError as error:
            raise DivergedError(error.what, error.remedy, context.moment[0]) from None


def _stats(context: AggregationContext, bad: list[int], shares: Tensor | None) -> AggregationStats:
    """Stats if the rows at the positions `bad` were excluded, and the others had these shares."""
    excluded = [context.workers[place] for place in bad]
    if shares is None:
        return AggregationStats(None, excluded)
    values = iter(shares.tolist())
    return AggregationStats([0.0 if place in bad else next(values) for place in range(len(context.slots))], excluded)


def _rows_at(rows: Tensor, slots: list[int]) -> Tensor:
    """The rows at these slots; a view if the slots are consecutive."""
    if slots == list(range(slots[0], slots[-1] + 1)):
        return rows[slots[0] : slots[-1] + 1]
    return _copies_of(rows, slots)


def _copies_of(rows: Tensor, slots: list[int]) -> Tensor:
    return rows[to_device(torch.tensor(slots, dtype=torch.int64), rows.device)]


def _runs(slots: Sequence[int]) -> list[range]:
    """Slots in ascending order as ranges of consecutive ones."""
    groups = groupby(enumerate(slots), lambda pair: pair[1] - pair[0])
    runs = [[slot for _, slot in group] for _, group in groups]
    return [range(run[0], run[-1] + 1) for run in runs]
