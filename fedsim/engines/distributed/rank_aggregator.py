"""An aggregation over ranks, each of which holds its own members' rows, and moves its own columns of the global row.

What the ranks send, of n rows of d numbers on P ranks, depends on the rule (formulas are in
docs/explanation/scaling.md):

    linear by weights alone     each rank's weighted sum of its rows is summed over the ranks
    by columns, or by products  every rank gets its columns of all rows [n, d / P]; products of pairs are summed
    by whole rows, and attacks  the first rank gets all rows, and computes what the first process of other engines does
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.aggregation.numerics.columns import Reduce, bad_rows, combine, keep_own
from fedsim.clients import State
from fedsim.core.rows import ALIGNMENT, new_rows
from fedsim.engines.aggregator import DeferredCheck, RowAggregator, combine_buffers, combines_buffers, write_attacked
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.shared_state import GlobalModel, SharedState
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.worker_states import WorkerStates
from fedsim.errors import DivergedError, ExperimentError, FedsimWarning, show
from fedsim.system.devices import synchronize


@dataclass(frozen=True)
class Columns:
    """Parts of the columns of the global row, one for each rank; the last ones may have fewer columns, or none.

    Attributes:
        d: number of columns.
        width: of a part, a multiple of a cache line.
        count: number of parts.
    """

    d: int
    width: int
    count: int

    @classmethod
    def of(cls, d: int, count: int, dtype: torch.dtype) -> Columns:
        line = ALIGNMENT // dtype.itemsize
        return cls(d, line * math.ceil(d / count / line), count)

    def part(self, rank: int) -> slice:
        """The columns of a rank."""
        return slice(min(self.d, rank * self.width), min(self.d, (rank + 1) * self.width))

    def parts(self, rows: Tensor) -> list[Tensor]:
        """The columns [..., width] of each rank, of rows [..., d]."""
        return [rows[..., self.part(rank)] for rank in range(self.count)]

    def size(self, rank: int) -> int:
        return self.part(rank).stop - self.part(rank).start

    def complete(self, group: RankGroup, row: Tensor) -> None:
        """Set the columns of the other ranks in a row [d] in which each rank has set its own."""
        parts = group.exchange(
            [row[self.part(group.index)]] * self.count, [self.size(rank) for rank in range(self.count)]
        )
        for rank, part in enumerate(parts):
            row[self.part(rank)] = part


@dataclass(frozen=True)
class RowPlacement:
    """Which rank has which slots of a cohort: `assignments[rank]`, ascending, in the order of the rank's own rows."""

    assignments: list[list[int]]

    @cached_property
    def rows(self) -> dict[int, tuple[int, int]]:
        """Map each slot to (rank, row): the rank that holds it and its row number on that rank."""
        return {
            slot: (rank, row) for rank, assignment in enumerate(self.assignments) for row, slot in enumerate(assignment)
        }

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The numbers of the rows of these slots, each in its own rank."""
        return [self.rows[slot][1] for slot in slots]

    def places(self, slots: Sequence[int]) -> list[list[int]]:
        """For each rank, the positions in `slots` of the slots that it has."""
        found: list[list[int]] = [[] for _ in self.assignments]
        for place, slot in enumerate(slots):
            found[self.rows[slot][0]].append(place)
        return found


class RankAggregator:
    """One rank's share of an aggregation; see `Aggregator` for the methods of a round. All ranks call them together.

    Args:
        group: the ranks.
        shared: of this rank: rows and buffers are of its own members, global rows are whole. The optimizer states are
            allocated here, for this rank's columns.
        n_rows: number of rows in all ranks.
        root_slot: the slot of the server's own row, if it has one.

    Attributes:
        placement: where the rows of the current cohort are; set by the caller.
    """

    deferred_check: DeferredCheck | None = None  # the ranks tell each other in each aggregation

    def __init__(
        self, group: RankGroup, task: RunTask, shared: SharedState, n_rows: int, root_slot: int | None
    ) -> None:
        self._group, self._task, self._shared, self._n_rows, self._root_slot = group, task, shared, n_rows, root_slot
        self._columns = columns = Columns.of(len(shared.server.row), group.count, task.dtype)
        own = columns.part(group.index)
        self._sent = shared.server.row  # what the members of the round have started from
        # With a hook every rank has the mean gradient, and moves the whole row.
        self._whole_states = {"gradients"} if task.experiment.gradient_hook else set()
        shared.server.states = {
            sync: task.stepper(sync).start(shared.server.row[slice(None) if sync in self._whole_states else own])
            for sync in task.syncs
        }
        self._linear = task.experiment.rule.linear_by_weights
        exchanges_columns = not self._linear and task.experiment.rule.by_parts
        self._slot_losses = torch.zeros(n_rows, dtype=torch.double)
        self._own_columns = shared.server.row[own]
        width = columns.size(group.index) if exchanges_columns else 0
        self._column_rows = new_rows(n_rows, width, task.dtype, task.device)
        last = shared.server.last[own] if task.keeps_last else shared.server.last
        server = {name: kept[own] if len(kept) == columns.d else kept for name, kept in shared.server.algorithm.items()}
        of_columns = replace(shared.server, row=self._own_columns, last=last, algorithm=server)
        self._part = self._aggregator_of(self._reduce, of_columns, rows=self._column_rows)
        self._root: RowAggregator | None = None  # of all rows, in the first rank once it is needed
        self._all_rows = shared.cohort.rows[:0]  # [n, d] by slot, in the first rank after `_gather`
        self._gathered = 0  # the number of the aggregation whose rows the first rank has
        self._number = 0  # of aggregations so far
        self._whole_update: tuple[tuple[int, ...], Tensor] | None = None  # its moment and the result, if all have it
        self.placement = RowPlacement([[]])

    def _aggregator_of(
        self, reduce: Reduce = keep_own, server: GlobalModel | None = None, **tensors: Any
    ) -> RowAggregator:
        """An aggregator of some tensors in place of this rank's own."""
        cohort = replace(self._shared.cohort, losses=self._slot_losses, messages={}, **tensors)
        shared = replace(self._shared, server=server or self._shared.server, cohort=cohort)
        return RowAggregator(ProcessContext.alone(), self._task, shared, self._root_slot, reduce)

    @property
    def has_last(self) -> bool:
        return self._part.has_last

    @has_last.setter
    def has_last(self, value: bool) -> None:
        self._part.has_last = value

    def sent_row(self, round: int) -> Tensor:
        start = self._part.sent_row(round)
        self._sent = self._shared.server.row
        if start is not self._own_columns:
            self._sent = torch.empty_like(self._sent)
            self._sent[self._columns.part(self._group.index)] = start
            self._columns.complete(self._group, self._sent)
        return self._sent

    def begin(self, round: int, slots: Sequence[int]) -> None:
        self._number += 1
        if self._task.sync_in(round) == "parameters":
            self._shared.cohort.rows -= self._sent

    def rows_processed(self, slots: Sequence[int]) -> None:
        self._gathered = 0  # the first rank may have the rows as they were before

    def attack(self, context: AggregationContext) -> None:
        """The first rank computes the Byzantine rows from all rows, and sends them to the ranks that hold them."""
        group, d, byzantine = self._group, self._columns.d, self._task.byzantine.in_round(context.moment[0])
        if not any(worker in byzantine for worker in context.workers):
            return
        self._gather(context)
        slots = [
            [context.slots[place] for place in places if context.workers[place] in byzantine]
            for places in self.placement.places(context.slots)
        ]
        self._run_at_first(lambda root: root.attack(context))
        rows, mine = self._all_rows, slots[group.index]
        parts = [rows[theirs if group.first else []] for theirs in slots]
        received = group.exchange(parts, [len(mine) * d] + [0] * (group.count - 1))[0]
        write_attacked(self._task, self._shared, self.placement.rows_of(mine), received.view(len(mine), d))

    def aggregate(self, context: AggregationContext) -> AggregationStats:
        """Apply the rule in the way that sends the least; then each rank has the update, or its columns of it."""
        places = self.placement.places(context.slots)
        if self._linear and not self._shared.server.states[self._task.sync_in(context.moment[0])]:
            return self._sum(context, places)
        bad = self._exchange_facts(context, places)
        if self._linear:
            return self._sum_columns(context, places, bad)
        if self._task.experiment.rule.by_parts:
            return self._aggregate_columns(context, places, bad)
        return self._aggregate_at_first(context, bad)

    def server_step(self) -> None:
        """Move the global row: each rank all of it if it has the whole update, else its columns, which all then get."""
        if self._whole_update is not None:
            moment, update = self._whole_update
            if self._task.keeps_last:
                self._shared.server.last.copy_(update)
            if self._task.sync_in(moment[0]) == "parameters":
                workers, population = self._part.workers, len(self._shared.data.shards)
                solver = self._task.solver_at(moment[0])
                solver.correct(update, self._shared.server.algorithm, workers, population)
            self._task.stepper_at(moment).step(self._shared.server.row, update, {})
            self._whole_update, self.has_last = None, self._task.keeps_last
            return
        self._part.server_step()
        columns, shared = self._columns, self._shared
        columns.complete(self._group, shared.server.row)
        if self._task.solver.has("correct"):  # it may have changed the server's state, here of own columns only
            for kept in shared.server.algorithm.values():
                if len(kept) == columns.d:
                    columns.complete(self._group, kept)
        if self._task.keeps_last:
            columns.complete(self._group, shared.server.last)

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Update the buffers from those of the whole cohort, in every rank alike."""
        shared = self._shared
        if not combines_buffers(self._task, shared):
            return
        own = self.placement.places(context.slots)[self._group.index]
        buffers = shared.cohort.buffers.new_zeros(len(context.slots), shared.cohort.buffers.shape[1])
        buffers[own] = shared.cohort.buffers[self._own_row_numbers(context, own)]
        self._group.all_reduce(buffers)
        combine_buffers(self._task, shared, context, excluded, buffers)

    def begin_with_parameters(self) -> None:
        self._part.begin_with_parameters()
        if self._root is not None:
            self._root.restore_rule({})

    def rule_state(self) -> dict[str, Tensor]:
        """The states of the rule and of the attack. Those that see whole rows have a state in the first rank only."""
        return self._part.rule_state() | (self._root.rule_state() if self._root else {})

    def restore_rule(self, state: dict[str, Tensor]) -> None:
        self._part.restore_rule(state)
        if not self._task.experiment.rule.by_parts or self._task.byzantine:
            self._allocate_root()
        if self._root is not None:
            self._root.restore_rule(state)

    def states_by_columns(self) -> dict[str, Tensor]:
        shared, columns, tensors = self._shared, self._columns, {}
        for sync, state in shared.server.states.items():
            for name, part in state.items() if sync not in self._whole_states else ():
                row = torch.empty_like(shared.server.row)
                row[columns.part(self._group.index)] = part
                columns.complete(self._group, row)
                tensors[f"{sync}.{name}"] = row
        return tensors

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        hook = self._task.experiment.gradient_hook
        if hook is not None and hook.keeps:
            line = f"distributed.hook = {show(hook.name)}: its state is in no checkpoint and starts again"
            warnings.warn(line, FedsimWarning, stacklevel=2)
        for sync, state in self._shared.server.states.items():
            for name, part in state.items() if sync not in self._whole_states else ():
                part.copy_(tensors[f"{sync}.{name}"][self._columns.part(self._group.index)])

    def train_losses(self) -> Tensor:
        """The training losses of all ranks' members [cohort], by slot."""
        losses = torch.zeros(self._n_rows, dtype=torch.double)
        own = self.placement.assignments[self._group.index]
        losses[own] = self._shared.cohort.train_loss[: len(own)]
        return self._group.all_reduce(losses)

    def round_rows(self, context: AggregationContext) -> tuple[Tensor, Tensor] | None:
        """In the first rank all rows of an aggregation and their losses, by slot; else None."""
        self._gather(context)
        return (self._all_rows, self._slot_losses) if self._group.first else None

    def linear_shares(self, context: AggregationContext) -> list[float]:
        """The share of each row in a linear rule's result, before there is one."""
        shares = self._part.linear_stats(context, []).shares
        assert shares is not None
        return shares

    def own_values(self, context: AggregationContext, values: Sequence[float]) -> dict[int, float]:
        """The values of this rank's members, by their rows, from values for each slot of an aggregation."""
        own = self.placement.places(context.slots)[self._group.index]
        return dict(zip(self._own_row_numbers(context, own), (values[place] for place in own), strict=True))

    def move_along(self, moment: tuple[int, ...], mean: Tensor) -> None:
        """Move the whole global row by the solver's step along a mean gradient [d] that every rank has."""
        self._number += 1
        self._task.solver_at(*moment).step(self._shared.server.row, mean, self._shared.server.states["gradients"])
        synchronize(self._task.device)

    def refuse(self, context: AggregationContext, rows: Collection[int]) -> NoReturn:
        """Raise DivergedError in all ranks, because the mean gradient is not finite.

        Args:
            rows: this rank's rows whose gradients are not finite.
        """
        bad = torch.zeros(len(context.slots), dtype=torch.double)
        for place, slot in enumerate(context.slots):
            rank, row = self.placement.rows[slot]
            bad[place] = rank == self._group.index and row in rows
        self._part.linear_stats(context, self._group.all_reduce(bad).nonzero().flatten().tolist())
        assert self._task.experiment.gradient_hook is not None
        hook = f'distributed.hook = "{self._task.experiment.gradient_hook.name}"'
        what = f"the mean of the gradients is not finite, though each of them is ({hook})"
        raise DivergedError(what, "", context.moment[0])

    def _own_row_numbers(self, context: AggregationContext, places: list[int]) -> list[int]:
        return self.placement.rows_of([context.slots[place] for place in places])

    def _own_rows(self, context: AggregationContext, places: list[list[int]]) -> Tensor:
        """This rank's rows of an aggregation, in its order."""
        own, rows = self._own_row_numbers(context, places[self._group.index]), self._shared.cohort.rows
        return rows[: len(own)] if own == list(range(len(own))) else rows[own]

    def _exchange_facts(self, context: AggregationContext, places: list[list[int]]) -> list[int]:
        """The positions of all rows that are not finite. All ranks get the losses too if the rule takes them."""
        task, mine = self._task, places[self._group.index]
        with_losses = task.experiment.rule.accepts("losses")
        if task.experiment.nonfinite == "keep" and not with_losses:
            return []
        facts = torch.zeros(2 if with_losses else 1, len(context.slots), dtype=torch.double)
        if task.experiment.nonfinite != "keep":
            facts[0, [mine[row] for row in bad_rows(self._own_rows(context, places))]] = 1
        if with_losses:
            facts[1, mine] = self._shared.cohort.losses[self._own_row_numbers(context, mine)]
        self._group.all_reduce(facts)
        if with_losses:
            self._slot_losses[list(context.slots)] = facts[1]
        return facts[0].nonzero().flatten().tolist()

    def _sum(self, context: AggregationContext, places: list[list[int]]) -> AggregationStats:
        """A linear rule, and a server step without a state: a sum over the ranks gives each of them the whole update.

        A rank with a row that is not finite makes the sum NaN, and only then the ranks find out which rows those are.
        """
        checks = self._task.experiment.nonfinite != "keep"
        stats = self._part.linear_stats(context, [])
        total = self._weighted_sum(context, places, stats)
        if checks and bad_rows(self._own_rows(context, places)):
            total.fill_(math.nan)
        self._group.all_reduce(total)
        if checks and not math.isfinite(total.sum()) and (bad := self._exchange_facts(context, places)):
            stats = self._part.linear_stats(context, bad)
            total = self._group.all_reduce(self._weighted_sum(context, places, stats))
        self._whole_update = context.moment, total
        return stats

    def _sum_columns(self, context: AggregationContext, places: list[list[int]], bad: list[int]) -> AggregationStats:
        """A linear rule, and a server step with a state: each rank sums its own columns, of which it has the state."""
        group, columns = self._group, self._columns
        stats = self._part.linear_stats(context, bad)
        parts = columns.parts(self._weighted_sum(context, places, stats))
        received = group.exchange(parts, [columns.size(group.index)] * group.count)
        self._part.set_result(context, torch.stack(received).sum(0), bad)
        return stats

    def _weighted_sum(self, context: AggregationContext, places: list[list[int]], stats: AggregationStats) -> Tensor:
        """This rank's part of a linear rule's result, [d]."""
        assert stats.shares is not None
        own = torch.tensor([stats.shares[place] for place in places[self._group.index]], dtype=torch.double)
        return combine(own, self._own_rows(context, places))

    def _aggregate_columns(
        self, context: AggregationContext, places: list[list[int]], bad: list[int]
    ) -> AggregationStats:
        """A columnwise rule, or a rule of inner products: each rank applies it to its columns of all rows."""
        width = self._columns.size(self._group.index)
        parts = self._columns.parts(self._own_rows(context, places))
        received = self._group.exchange(parts, [len(theirs) * width for theirs in places])
        for theirs, rows in zip(places, received, strict=True):
            self._column_rows[[context.slots[place] for place in theirs]] = rows.view(len(theirs), width)
        return self._part.aggregate(context, bad)

    def _aggregate_at_first(self, context: AggregationContext, bad: list[int]) -> AggregationStats:
        """A rule that looks at whole rows: the first rank applies it to all of them."""
        group, columns = self._group, self._columns
        self._gather(context)
        stats = self._run_at_first(lambda root: root.aggregate(context, bad).on_host())
        parts = [self._shared.server.row[:0]] * group.count
        if self._root is not None:
            ((_, update),) = self._root.result
            parts = columns.parts(update)
        sizes = [columns.size(group.index)] + [0] * (group.count - 1)
        self._part.set_result(context, group.exchange(parts, sizes)[0], bad)
        return stats

    def _gather(self, context: AggregationContext) -> None:
        """Gather the rows of an aggregation in the first rank, once."""
        if self._gathered != self._number:
            self._gathered = self._number
            self._allocate_root()
            group, d, wanted = self._group, self._columns.d, {*context.slots, self._root_slot}
            slots = [[slot for slot in assignment if slot in wanted] for assignment in self.placement.assignments]
            own = self._shared.cohort.rows[self.placement.rows_of(slots[group.index])]
            sizes = [len(theirs) * d if group.first else 0 for theirs in slots]
            received = group.exchange([own] + [own[:0]] * (group.count - 1), sizes)
            for theirs, part in zip(slots, received, strict=True):
                if group.first:
                    self._all_rows[theirs] = part.view(len(theirs), d)
        if self._root is not None:
            self._root.has_last = self.has_last

    def _allocate_root(self) -> None:
        """Allocate the rows of all ranks, in the first rank."""
        if self._group.first and self._root is None:
            self._all_rows = new_rows(self._n_rows, self._columns.d, self._task.dtype, self._task.device)
            unfit = torch.zeros(self._n_rows, dtype=torch.int64)
            self._root = self._aggregator_of(rows=self._all_rows, unfit=unfit)

    def _run_at_first(self, work: Callable[[RowAggregator], Any]) -> Any:
        """Do work in the first rank. All ranks get its result, or the ExperimentError that it raises."""
        error = result = None
        if self._root is not None:
            try:
                result = work(self._root)
            except ExperimentError as refusal:
                error = refusal
        error, result = self._group.broadcast_object((error, result))
        if error is not None:
            raise error
        return result

    def _reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        return self._group.all_reduce(values, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])


class RankWorkerStates(WorkerStates):
    """The worker states that one rank owns. All ranks call each method at the same time.

    Args:
        placement: gives the placement of the current cohort.
        limit, folder: as for `WorkerStates`, of this rank alone.
    """

    def __init__(
        self,
        initial: State,
        ranks: RankGroup,
        placement: Callable[[], RowPlacement],
        limit: int | None = None,
        folder: str | None = None,
    ) -> None:
        super().__init__(initial, limit, folder)
        self._ranks, self._placement = ranks, placement

    def load_cohort(self, cohort: Sequence[int], mine: Sequence[WorkItem], rows: State) -> None:
        places, sent, received = self._places_of(cohort, range(len(cohort)))
        parts = [
            {name: row.new_empty(len(of_rank), len(row)) for name, row in self.initial.items()} for of_rank in sent
        ]
        for part, of_rank in zip(parts, sent, strict=True):
            self.load([cohort[slot] for slot in of_rank], part, range(len(of_rank)))
        for name, initial in self.initial.items():
            got = self._ranks.exchange(
                [part[name] for part in parts], [len(slots) * len(initial) for slots in received]
            )
            rows[name][:] = initial
            for slots, their in zip(received, got, strict=True):
                rows[name][[places[slot] for slot in slots]] = their.view(-1, len(initial))

    def save_cohort(
        self, cohort: Sequence[int], mine: Sequence[WorkItem], excluded: Collection[int], rows: State
    ) -> None:
        slots = [slot for slot, worker in enumerate(cohort) if worker not in excluded]
        places, received, sent = self._places_of(cohort, slots)
        self.add([cohort[slot] for of_rank in received for slot in of_rank])
        for name, initial in self.initial.items():
            parts = [rows[name][[places[slot] for slot in of_rank]] for of_rank in sent]
            got = self._ranks.exchange(parts, [len(slots) * len(initial) for slots in received])
            for of_rank, part in zip(received, got, strict=True):
                kept = self.rows[name]
                kept[self._indices(cohort, of_rank)] = part.view(-1, len(initial)).to(kept.device)

    def sums(self, messages: State, slots: Sequence[int]) -> State:
        placed = self._placement().rows
        mine = [row for rank, row in (placed[slot] for slot in slots) if rank == self._ranks.index]
        return {name: self._ranks.all_reduce(rows[mine].sum(0)) for name, rows in messages.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The state of all ranks in the first one; in the others, what they own."""
        own = super().tensors()
        if not own:
            return own
        counts = self._ranks.gather_objects(len(self))
        whole = {}
        for name, tensor in own.items():
            if name != "workers":
                tensor = tensor.to(self.initial[name.removeprefix("rows.")].device)
            sizes = [count * tensor[:1].numel() if self._ranks.first else 0 for count in counts]
            parts = [tensor] + [tensor[:0]] * (self._ranks.count - 1)
            whole[name] = torch.cat(self._ranks.exchange(parts, sizes)).view(-1, *tensor.shape[1:])
        if not self._ranks.first:
            return own
        ascending = whole["workers"].argsort()
        return {name: tensor[ascending.to(tensor.device)] for name, tensor in whole.items()}

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        workers = saved.get("workers")
        if workers is not None and workers.ndim == 1 and all(len(kept) == len(workers) for kept in saved.values()):
            own = workers % self._ranks.count == self._ranks.index
            saved = {name: kept[own] for name, kept in saved.items()}
        super().resume(saved)

    def _places_of(
        self, workers: Sequence[int], slots: Sequence[int]
    ) -> tuple[dict[int, int], list[list[int]], list[list[int]]]:
        """This rank's row by slot; by rank, the slots trained there and owned here; by rank, the reverse."""
        here, count, placed = self._ranks.index, self._ranks.count, self._placement().rows
        owned: list[list[int]] = [[] for _ in range(count)]
        trained: list[list[int]] = [[] for _ in range(count)]
        for slot in slots:
            owner, (trainer, _) = workers[slot] % count, placed[slot]
            if owner == here:
                owned[trainer].append(slot)
            if trainer == here:
                trained[owner].append(slot)
        return {slot: row for slot, (rank, row) in placed.items() if rank == here}, owned, trained

    def _indices(self, workers: Sequence[int], slots: Sequence[int]) -> list[int]:
        return [self._places[workers[slot]] for slot in slots]
