"""An aggregation: attack, screening, rule, server step, buffers.

`RowAggregator` aggregates rows in the memory of this process; `RankAggregator` rows of several ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, Gram, column_blocks, screened
from fedsim.aggregation.inputs import Reduce, keep_own
from fedsim.aggregation.rules.averages import mean
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask, Sync
from fedsim.errors import DivergedError
from fedsim.system.devices import synchronize, to_device


class Aggregator(Protocol):
    """From the workers' rows to the next global row, in the order in which a round calls the methods.

    Attributes:
        has_last: whether there is a last aggregated update, for rules and attacks that take it.
        deferred_check: checks the rows of a round together, where that is possible.
    """

    has_last: bool
    deferred_check: DeferredCheck | None

    def sent_row(self, round: int) -> Tensor:
        """The row [d] that the workers get in a round in which parameters are aggregated; read only."""

    def begin(self, round: int, slots: Sequence[int]) -> None:
        """Begin an aggregation with the rows that this process has trained: parameters become updates, in place."""

    def rows_processed(self, slots: Sequence[int]) -> None:
        """Note that processors have changed the rows at these slots, which this process has trained."""

    def attack(self, context: AggregationContext) -> None:
        """Replace the rows of the Byzantine workers, after the rows of all processes are ready."""

    def aggregate(self, context: AggregationContext) -> AggregationStats:
        """Apply the rule to the rows. Keeps the result for `server_step`."""

    def server_step(self) -> None:
        """Move the global row along the aggregated update."""

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Update the global buffers from those of the cohort, without the excluded workers."""

    def begin_with_parameters(self) -> None:
        """Reset the states of rule and server after the last round in which gradients are aggregated."""

    def rule_state(self) -> dict[str, Tensor]:
        """A copy of the state of the rule, and of that of the attack under names that begin with "attack."."""

    def restore_rule(self, state: dict[str, Tensor]) -> None:
        """Continue with the states of the rule and of the attack."""

    def states_by_columns(self) -> dict[str, Tensor]:
        """Copies [d] of the optimizer states that ranks divide by columns; empty where memory is shared."""

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        """Set them from such tensors."""

    def train_losses(self) -> Tensor:
        """Mean training losses of the last round [cohort], float64, by slot."""


def set_cohort_weights(shared: SharedState, weights: Mapping[int, float]) -> None:
    """Set the weights by inverse probability of the workers of a cohort."""
    workers, n = sorted(weights), len(weights)
    shared.cohort.workers.fill_(torch.iinfo(torch.int64).max)
    shared.cohort.workers[:n] = torch.tensor(workers)
    shared.cohort.weights[:n] = torch.tensor([weights[worker] for worker in workers], dtype=torch.double)


def weights_by_probability(shared: SharedState, workers: Sequence[int]) -> Tensor:
    """The weights [n] by inverse probability of some workers; 1 for workers that are not in the cohort."""
    wanted = torch.tensor(workers)
    places = torch.searchsorted(shared.cohort.workers, wanted).clamp_(max=len(shared.cohort.workers) - 1)
    return torch.where(shared.cohort.workers[places] == wanted, shared.cohort.weights[places], 1.0)


def weights_of(task: RunTask, shared: SharedState, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
    """The weights [n] of these workers for the rule, on the CPU, or None for equal ones.

    Args:
        samples: the number of samples of each, for weights by samples.
    """
    kind, rule = task.experiment.weights, task.experiment.rule
    if not rule.accepts_weights or (kind == "uniform" and not rule.needs_weights):
        return None
    if kind == "inverse_probability":
        return weights_by_probability(shared, workers)
    values: Sequence[float] = samples
    if kind != "samples":
        values = [1.0] * len(workers) if kind == "uniform" else [kind[worker] for worker in workers]
    return torch.tensor(values, dtype=torch.double)


def spoil(task: RunTask, rows: Tensor, of_workers: Tensor) -> None:
    """Set the rows [..., d] of workers that send or keep NaN or infinity [..., w] to NaN, which excludes these workers.

    Does nothing if the task keeps such numbers.
    """
    if task.experiment.nonfinite != "keep":
        rows += (of_workers * 0).sum(-1, keepdim=True).to(rows.dtype)


def write_attacked(task: RunTask, shared: SharedState, index: Tensor | list[int], rows: Tensor) -> None:
    """Write the rows of Byzantine workers; NaN if their messages, which an attack does not replace, are not finite."""
    rows = rows.clone()
    for message in shared.cohort.messages.values():
        spoil(task, rows, message[index])
    shared.cohort.rows[index] = rows


def combines_buffers(task: RunTask, shared: SharedState) -> bool:
    """Whether the buffers of workers are used after a round."""
    return shared.server.buffers.numel() > 0 and task.experiment.buffers != "server"


def combine_buffers(
    task: RunTask, shared: SharedState, context: AggregationContext, excluded: Collection[int], buffers: Tensor
) -> None:
    """Set the global buffers to the mean of `buffers` [n, b], weighted as rows are.

    The buffers of excluded workers do not count, and with `nonfinite = "exclude"` neither do buffers with NaN or
    infinity, which a Byzantine worker may send with a finite row. Without a worker that counts, the global buffers stay
    as they are.
    """
    workers, weights = context.workers, context.weights
    if task.experiment.nonfinite == "exclude":
        unfit = {worker for worker, fit in zip(workers, buffers.isfinite().all(1).tolist(), strict=True) if not fit}
        excluded = unfit.union(excluded)
    if excluded:
        kept = [place for place, worker in enumerate(workers) if worker not in excluded]
        workers, buffers = [workers[place] for place in kept], buffers[kept]
        weights = None if weights is None else weights[kept]
    if workers and (weights is None or weights.any()):
        shared.server.buffers.copy_(mean(buffers, weights))


class DeferredCheck:
    """Collects sums of rows on the device and reads them together, because each read waits for the device.

    For aggregations in one process by rules that run to their end even if a row is not finite.

    Attributes:
        usable: False after a row was not finite: then each aggregation is checked.
        active: whether sums are collected now.
    """

    def __init__(self, shared: SharedState) -> None:
        self._changed = [shared.server.row, shared.server.last, *shared.server.states.get("gradients", {}).values()]
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []
        self.usable, self.active = True, False

    def begin(self) -> None:
        """Collect sums from now on."""
        self.active, self._sums, self._before = True, [], [tensor.clone() for tensor in self._changed]

    def add(self, rows: Tensor) -> None:
        """Collect the sums of rows."""
        self._sums.append(rows.sum(1))

    def end(self, *, failed: bool) -> bool:
        """Whether all rows were finite, by their sums, which may overflow.

        If they were not, or the round has `failed`, undo the changes of its aggregations and return False.
        """
        finite = not failed and (not self._sums or bool(torch.cat(self._sums).isfinite().all()))
        if not finite:
            self.usable = False
            for tensor, before in zip(self._changed, self._before, strict=True):
                tensor.copy_(before)
        self.active, self._sums, self._before = False, [], []
        return finite


class AttackedRows:
    """Honest rows, which are multiplied with each other once, and Byzantine rows that change.

    Args:
        rows: of all slots; the honest rows are copied.
        honest: the slots of the h honest workers.
        attackers: whether each worker of the cohort is Byzantine, in the order of their rows.

    Attributes:
        honest: [h, d].
    """

    def __init__(self, rows: Tensor, honest: Tensor, attackers: Sequence[bool]) -> None:
        self._attackers, h = torch.tensor(attackers), len(honest)
        self._distinct = rows.new_empty(len(attackers), rows.shape[1])  # the honest rows, then the Byzantine ones
        self.honest = torch.index_select(rows, 0, honest, out=self._distinct[:h])
        self._of_honest: Gram | None = None

    def gram(self, byzantine: Tensor) -> Gram:
        """The Gram of the cohort's rows with these Byzantine rows: [b, d], or [d] if all attackers send one row."""
        n, h = len(self._attackers), len(self.honest)
        added = 1 if byzantine.ndim == 1 else n - h
        distinct = self._distinct[: h + added]
        distinct[h:] = byzantine
        self._of_honest = self._of_honest or Gram(self.honest)
        places = torch.where(self._attackers, h, self._attackers.logical_not().cumsum(0) - 1)
        if added > 1:
            places += torch.where(self._attackers, self._attackers.cumsum(0) - 1, 0)
        return self._of_honest.extended(distinct).mixed(torch.eye(len(distinct), dtype=torch.double)[places])


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
        task: RunTask,
        shared: SharedState,
        root_slot: int | None,
        reduce: Reduce = keep_own,
    ) -> None:
        self._task, self._shared, self._root_slot, self._reduce = task, shared, root_slot, reduce
        cuts = column_blocks(
            len(shared.server.row), process.index, process.count, n=len(shared.cohort.rows), device=task.device
        )
        self._blocks = list(cuts)
        self._first = process.index == 0
        self._state: dict[str, Tensor] = {}  # of the rule
        self._attack_state: dict[str, Tensor] = {}
        self._number = 0  # of aggregations so far, the same in every process
        self.workers = 0  # whose rows the current aggregation uses
        self._sync: Sync = task.sync_in(1)  # of the current aggregation
        self._moment: tuple[int, ...] = (1,)  # of it
        self._sent = shared.server.row
        self._known_shares: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)  # weights, rows, their shares
        self.has_last = False
        self.result: list[tuple[slice, Tensor]] = []
        may_defer = task.device.type != "cpu" and process.count == 1 and task.experiment.nonfinite != "keep"
        # An attack's state would be that of the repeated steps.
        may_defer = may_defer and "state" not in task.experiment.attack.component.accepts
        self.deferred_check = DeferredCheck(shared) if may_defer and task.experiment.rule.columnwise else None

    def sent_row(self, round: int) -> Tensor:
        server = self._task.server_at(round)
        self._sent = server.broadcast(self._shared.server.row, self._shared.server.states["parameters"])
        return self._sent

    def begin(self, round: int, slots: Sequence[int]) -> None:
        self._number += 1
        for run in _runs(slots) if self._task.sync_in(round) == "parameters" else ():
            self._shared.cohort.rows[run.start : run.stop].sub_(self._sent)  # `-=` would copy the rows onto themselves
        self.rows_processed(slots)

    def rows_processed(self, slots: Sequence[int]) -> None:
        for run in _runs(slots) if self._checks_now else ():  # a sum may overflow, so this is a suspicion only
            sums = self._shared.cohort.rows[run.start : run.stop].sum(1)
            suspects = (~sums.cpu().isfinite()).nonzero().flatten() + run.start
            self._shared.cohort.unfit[suspects] = self._number

    @property
    def _checks_now(self) -> bool:
        """Whether each aggregation finds out which rows are not finite."""
        return self._task.experiment.nonfinite != "keep" and not self._defers

    @property
    def _defers(self) -> bool:
        return self.deferred_check is not None and self.deferred_check.active

    def attack(self, context: AggregationContext) -> None:
        task, shared = self._task, self._shared
        workers = task.byzantine.in_round(context.moment[0])
        attackers = [worker in workers for worker in context.workers]
        byzantine = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if attacks]
        honest = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if not attacks]
        if not self._first or not byzantine or (not honest and task.experiment.attack.component.needs_honest):
            return  # without honest rows, the Byzantine workers send what they have trained
        index = to_device(torch.tensor(byzantine), task.device)
        others = to_device(torch.tensor(honest, dtype=torch.int64), task.device)
        attacked = AttackedRows(shared.cohort.rows, others, attackers)

        def aggregate(rows: Tensor) -> Tensor:
            shared.cohort.rows[index] = rows
            inputs, bad = screened(self._inputs(context), "exclude")
            if not bad and task.experiment.rule.accepts("gram"):
                inputs.gram = attacked.gram(rows)
            return task.experiment.rule(inputs).update

        rows, self._attack_state = task.experiment.attack.component(
            attacked.honest,
            shared.cohort.rows[index],
            seed=task.experiment.seed,
            moment=context.moment,
            last=shared.server.last if self.has_last else None,
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
            finite = shared.cohort.rows[index].isfinite().all(1).cpu()
            shared.cohort.unfit[byzantine] = torch.where(finite, 0, self._number)

    def aggregate(self, context: AggregationContext, bad: list[int] | None = None) -> AggregationStats:
        """Apply the rule to the rows. The first process returns the stats.

        Args:
            bad: positions of the rows that are not finite, if the caller knows them.
        """
        rule = self._task.experiment.rule
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
                shared.server.last[block] = update
            self._correct(update, block)
            task.stepper_at(self._moment).step(shared.server.row[block], update, self._state_of(block))
        self.result = []
        self.has_last = task.keeps_last

    def _correct(self, update: Tensor, block: slice) -> None:
        """Let the client algorithm correct an update in place."""
        shared, algorithm = self._shared, self._task.solver_at(*self._moment)
        if self._sync == "parameters" and algorithm.has("correct"):
            d = len(shared.server.row)
            server = {name: kept[block] if len(kept) == d else kept for name, kept in shared.server.algorithm.items()}
            algorithm.correct(update, server, self.workers, len(shared.data.shards))

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        if self._first and combines_buffers(self._task, self._shared):
            buffers = self._shared.cohort.buffers[: len(context.slots)]
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
        return self._shared.cohort.train_loss

    def begin_with_parameters(self) -> None:
        self._state, self._attack_state, self.has_last, self._sync = {}, {}, False, "parameters"
        for block in self._blocks:
            start = self._task.experiment.server.component.start(self._shared.server.row[block])
            for name, tensor in self._state_of(block).items():
                tensor.copy_(start[name])
        synchronize(self._task.device)

    def _state_of(self, block: slice) -> dict[str, Tensor]:
        return {name: tensor[block] for name, tensor in self._shared.server.states[self._sync].items()}

    def _inputs(self, context: AggregationContext) -> AggregationInputs:
        task, shared = self._task, self._shared
        slots = list(context.slots)
        return AggregationInputs(
            updates=_rows_at(shared.cohort.rows, slots),
            weights=context.weights,
            root=None if self._root_slot is None else shared.cohort.rows[self._root_slot],
            losses=shared.cohort.losses[slots] if task.experiment.rule.accepts("losses") else None,
            workers=list(context.workers),
            seed=task.experiment.seed,
            moment=context.moment,
            state=self._state,
            last=shared.server.last if self.has_last else None,
            local_lr=task.local_lr_at(*context.moment),
            sync=task.sync_in(context.moment[0]),
            reduce=self._reduce,
            weight_total=1.0 if task.experiment.weights == "inverse_probability" else None,
        )

    def _shares(self, context: AggregationContext, inputs: AggregationInputs, bad: list[int]) -> Tensor | None:
        """The shares of a linear rule; those of the step before if only the weights determine them."""
        if bad or not self._task.experiment.rule.linear_by_weights:
            return self._task.experiment.rule.shares(inputs)
        weights, n, shares = self._known_shares
        if context.weights is not weights or len(context.slots) != n:
            shares = self._task.experiment.rule.shares(inputs)
            self._known_shares = context.weights, len(context.slots), shares
        return shares

    def _screened(self, context: AggregationContext, bad: list[int] | None) -> tuple[AggregationInputs, list[int]]:
        """The inputs without rows that are not finite, and the positions of these."""
        inputs = self._inputs(context)
        if self.deferred_check is not None and self.deferred_check.active:
            self.deferred_check.add(inputs.updates)
            return inputs, []
        if bad is None and not (self._shared.cohort.unfit[list(context.slots)] == self._number).any():
            return inputs, []
        try:
            return screened(inputs, self._task.experiment.nonfinite, bad)
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
