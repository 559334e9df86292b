"""An aggregation over ranks, each of which holds its own members' rows, and moves its own columns of the global row.

What travels, of n rows of d numbers on P ranks, goes by the rule (docs/scaling.md has the formulas):

    linear by weights alone     each rank's weighted sum of its rows is summed over the ranks
    by columns, or by products  every rank gets its columns of all rows [n, d / P]; products of pairs are summed
    by whole rows, and attacks  the first rank gets the rows, and does what the first process of other engines does
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.aggregation import AggregationInputs, screened
from fedsim.aggregation.numerics.columns import bad_rows, combine
from fedsim.core.rows import new_rows
from fedsim.engines.aggregator import Aggregator
from fedsim.engines.distributed.placement import Columns, RootAggregator, RowPlacement
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.errors import ExperimentError
from fedsim.system.devices import synchronize


class RankAggregator(Aggregator):
    """One rank's share of an aggregation over ranks: an `Aggregator` of its own columns.

    Args:
        memory: the rank's; rows and buffers are its own members', global rows are whole, states become of its columns.
        n_rows: how many rows there are in all ranks.
        root_slot: which of them is the server's own, if it has one.
    """

    def __init__(
        self, ranks: RankGroup, task: TaskSpec, shared: SharedState, n_rows: int, root_slot: int | None
    ) -> None:
        self.columns = Columns.of(len(shared.global_row), ranks.count, task.dtype)
        self._ranks, self._rank_memory, self._n_rows = ranks, shared, n_rows
        own = self.columns.part(ranks.index)
        self._room = self.columns.room(shared.global_row)
        shared.global_row = self._room[: self.columns.d]
        self._last_room = self.columns.room(shared.last) if task.keeps_last else None
        if self._last_room is not None:
            shared.last = self._last_room[: self.columns.d]
        self._whole = {"gradients"} if task.hook else set()  # every rank has the mean of those, and moves the whole row
        shared.states = {
            sync: task.stepper(sync).start(shared.global_row[slice(None) if sync in self._whole else own])
            for sync in task.syncs
        }
        self._linear = task.rule.linear_by_weights
        exchanges = not self._linear and task.rule.by_parts
        part = replace(
            shared,
            global_row=shared.global_row[own],
            rows=new_rows(n_rows if exchanges else 0, self.columns.size(ranks.index), task.dtype, task.device),
            last=shared.last[own] if task.keeps_last else shared.last,
            unfit=torch.zeros(n_rows, dtype=torch.int64),
            losses=torch.zeros(n_rows, dtype=torch.double),
        )
        super().__init__(ProcessContext.alone(), task, part, root_slot)
        self.may_check_later = False  # the ranks tell each other in each aggregation
        self.placement = RowPlacement([[]])
        self.losses = torch.zeros(n_rows, dtype=torch.double)  # of all, where the rule takes them
        self._bad: list[int] = []
        self._has_whole_update = False  # the result of the last aggregation, not this rank's columns alone
        self._collected = 0  # the aggregation for which the first rank has been given all rows
        self._sent = shared.global_row
        self._sent_room: Tensor | None = None
        self._root: RootAggregator | None = None

    def sent_row(self) -> Tensor:
        """What the workers are sent, [d], in a round in which parameters are aggregated."""
        part, task = self._shared, self._task
        start = task.server.broadcast(part.global_row, part.states["parameters"])
        if start is part.global_row:
            self._sent = self._rank_memory.global_row
        else:
            self._sent_room = self._room.clone() if self._sent_room is None else self._sent_room
            self._sent_room[self.columns.part(self._ranks.index)] = start
            self._ranks.all_gather(self._sent_room, "pull_down")
            self._sent = self._sent_room[: self.columns.d]
        return self._sent

    def begin(self, round: int, slots: Sequence[int]) -> None:
        self._number += 1
        self._sync = self._task.sync_in(round)
        if self._sync == "parameters":
            self._rank_memory.rows -= self._sent

    def rows_processed(self, slots: Sequence[int]) -> None:
        self._collected = 0  # the first rank may have the rows as they were before

    def attack(self, context: AggregationContext) -> None:
        if any(worker in self._task.byzantine for worker in context.workers):
            self._attack_at_first(context, self.placement.places(context.slots))

    def aggregate(self, context: AggregationContext) -> AggregationStats:
        """Apply the rule in the way that sends the least; afterwards each rank has the update, or its columns of it."""
        rule, places = self._task.rule, self.placement.places(context.slots)
        self._has_whole_update = self._linear and not self._shared.states[self._sync]
        if self._has_whole_update:
            return self._sum(context, places)
        self._bad = self._agree_on_facts(context, places)
        if self._linear:
            return self._sum_columns(context, places)
        return self._aggregate_parts(context, places) if rule.by_parts else self._aggregate_at_first(context)

    def server_step(self) -> None:
        """Move the global row: each rank all of it if it has the whole update, else its columns, which all then get."""
        if self._has_whole_update:
            ((_, update),) = self._result
            if self._task.keeps_last:
                self._rank_memory.last.copy_(update)
            self._task.stepper(self._sync).step(self._rank_memory.global_row, update, {})
            self._result, self._has_last = [], self._task.keeps_last
            return
        super().server_step()
        self._ranks.all_gather(self._room, "aggregate")
        if self._last_room is not None:
            self._ranks.all_gather(self._last_room, "aggregate")

    def lasting(self) -> dict[str, Tensor]:
        """What one round leaves to the next, in whole rows; copies of the states, whose columns ranks share."""
        shared = self._rank_memory
        whole = {name: kept for name, kept in shared.lasting.items() if name not in shared.state_names}
        for sync, state in shared.states.items():
            if sync in self._whole:
                whole |= {f"{sync}.{name}": tensor for name, tensor in state.items()}
                continue
            for name, part in state.items():
                room = self.columns.room(shared.global_row)
                room[self.columns.part(self._ranks.index)] = part
                self._ranks.all_gather(room, "checkpoint")
                whole[f"{sync}.{name}"] = room[: self.columns.d]
        return whole

    def take_back(self, lasting: dict[str, Tensor]) -> None:
        """Give the states, of this rank's columns, the values that they have there; the rest is in place already."""
        for sync, state in self._rank_memory.states.items():
            own = slice(None) if sync in self._whole else self.columns.part(self._ranks.index)
            for name, part in state.items():
                part.copy_(lasting[f"{sync}.{name}"][own])

    @property
    def of_gradients(self) -> bool:
        """Whether gradients have been aggregated last, or are to be first."""
        return self._sync == "gradients"

    def remembered(self) -> tuple[dict[str, Tensor], bool]:
        """The state of the rule: of rows that one rank sees whole, that rank's; else all have the same."""
        state = super().remembered()[0]
        if self._root is not None:
            state = self._root.remembered()[0]
        return state, self._has_last

    def remember(self, state: dict[str, Tensor], has_last: bool) -> None:
        super().remember(state, has_last)
        if self._root is None and not self._task.rule.by_parts and self._ranks.first:
            self._root = self._new_root()
        if self._root is not None:
            self._root.remember(state, has_last)

    def shares(self, context: AggregationContext) -> list[float]:
        """The share of each row in a linear rule's result, before there is one."""
        self._bad = []
        shares = self._shares(context, self._cohort(context), [])
        assert shares is not None
        return shares.tolist()

    def of_mine(self, context: AggregationContext, values: Sequence[float]) -> dict[int, float]:
        """The values of this rank's members, by their rows, from values for each place of an aggregation."""
        slots = {place: context.slots[place] for place in self.placement.places(context.slots)[self._ranks.index]}
        return {self.placement.rows[slot][1]: values[place] for place, slot in slots.items()}

    def move_along(self, mean: Tensor) -> None:
        """Move the whole global row by the solver's step along a mean gradient [d] that every rank has."""
        self._number += 1
        self._sync = "gradients"
        self._task.solver.step(self._rank_memory.global_row, mean, self._rank_memory.states["gradients"])
        synchronize(self._task.device)

    def refuse(self, context: AggregationContext, rows: Collection[int]) -> NoReturn:
        """Raise ExperimentError in all ranks: their mean gradient is not finite, nor are these rows of this one's."""
        bad = torch.zeros(len(context.slots), dtype=torch.double)
        for place, slot in enumerate(context.slots):
            rank, row = self.placement.rows[slot]
            bad[place] = rank == self._ranks.index and row in rows
        self._bad = self._ranks.all_reduce(bad, "facts").nonzero().flatten().tolist()
        self._screened(context)
        assert self._task.hook is not None
        raise ExperimentError(
            f"round {context.moment[0]}: the mean of the gradients is not finite, though each of them is "
            f'(distributed.hook = "{self._task.hook.name}")'
        )

    def begin_with_parameters(self) -> None:
        super().begin_with_parameters()
        if self._root is not None:
            self._root.forget()

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Update the buffers from those of the whole cohort, in every rank alike. Called by all ranks."""
        if not self._keeps_buffers:
            return
        shared, places = self._rank_memory, self.placement.places(context.slots)
        own = places[self._ranks.index]
        buffers = shared.buffers.new_zeros(len(context.slots), shared.buffers.shape[1])
        buffers[own] = shared.buffers[self._rows_of([context.slots[place] for place in own])]
        self._ranks.all_reduce(buffers, "buffers")
        self._take_buffers(context, excluded, buffers)

    def _rows_of(self, slots: Sequence[int]) -> list[int]:
        """Where this rank has its rows of these slots."""
        return [self.placement.rows[slot][1] for slot in slots]

    def _own_rows(self, context: AggregationContext, places: list[list[int]]) -> Tensor:
        """This rank's rows of an aggregation, in its order."""
        own = self._rows_of([context.slots[place] for place in places[self._ranks.index]])
        rows = self._rank_memory.rows
        return rows[: len(own)] if own == list(range(len(own))) else rows[own]

    def _agree_on_facts(self, context: AggregationContext, places: list[list[int]]) -> list[int]:
        """The places of rows that are not finite, for all ranks to know; and the losses, where the rule takes them."""
        task, mine = self._task, places[self._ranks.index]
        if task.nonfinite == "keep" and not task.rule.accepts("losses"):
            return []
        facts = torch.zeros(2 if task.rule.accepts("losses") else 1, len(context.slots), dtype=torch.double)
        if task.nonfinite != "keep":
            facts[0, [mine[row] for row in bad_rows(self._own_rows(context, places))]] = 1
        if task.rule.accepts("losses"):
            own = self._rows_of([context.slots[place] for place in mine])
            facts[1, mine] = self._rank_memory.losses[own]
        self._ranks.all_reduce(facts, "facts")
        if task.rule.accepts("losses"):
            self.losses[list(context.slots)] = facts[1]
        return facts[0].nonzero().flatten().tolist()

    def _sum(self, context: AggregationContext, places: list[list[int]]) -> AggregationStats:
        """A linear rule, and a server step that keeps no state: one sum over the ranks gives all of them the update.

        A rank that has a row which is not finite makes the sum so, and only then the ranks find out which those are.
        """
        task, ranks = self._task, self._ranks
        self._bad = []
        total, stats = self._weighted_sum(context, places)
        if task.nonfinite != "keep" and bad_rows(self._own_rows(context, places)):
            total.fill_(math.nan)
        ranks.all_reduce(total, "aggregate")
        if task.nonfinite != "keep" and not math.isfinite(total.sum()):
            self._bad = self._agree_on_facts(context, places)
            if self._bad:
                total, stats = self._weighted_sum(context, places)
                ranks.all_reduce(total, "aggregate")
        self._result = [(slice(None), total)]
        return stats

    def _sum_columns(self, context: AggregationContext, places: list[list[int]]) -> AggregationStats:
        """A linear rule, and a server step whose state each rank has of its own columns: these are summed there."""
        ranks, columns = self._ranks, self.columns
        total, stats = self._weighted_sum(context, places)
        parts = ranks.exchange(columns.parts(total), [columns.size(ranks.index)] * ranks.count, "aggregate")
        self._result = [(slice(None), torch.stack(parts).sum(0))]
        return stats

    def _weighted_sum(self, context: AggregationContext, places: list[list[int]]) -> tuple[Tensor, AggregationStats]:
        """This rank's part of a linear rule's result, [d], and the stats of the whole aggregation."""
        cohort, bad = self._screened(context)
        shares = self._shares(context, cohort, bad)
        stats = self._stats(context, bad, shares)
        assert stats.shares is not None
        own = torch.tensor([stats.shares[place] for place in places[self._ranks.index]], dtype=torch.double)
        return combine(own, self._own_rows(context, places)), stats

    def _aggregate_parts(self, context: AggregationContext, places: list[list[int]]) -> AggregationStats:
        """A rule that goes by columns, or by products of pairs: each rank applies it to its columns of all rows."""
        ranks, columns = self._ranks, self.columns
        width = columns.size(ranks.index)
        given = ranks.exchange(
            columns.parts(self._own_rows(context, places)), [len(theirs) * width for theirs in places], "aggregate"
        )
        room = self._shared.rows
        for theirs, rows in zip(places, given, strict=True):
            room[theirs] = rows.view(len(theirs), width)
        self._shared.losses[: len(context.slots)] = self.losses[list(context.slots)]
        context = replace(context, slots=range(len(context.slots)))
        return super().aggregate(context)

    def _aggregate_at_first(self, context: AggregationContext) -> AggregationStats:
        """A rule that looks at whole rows: the first rank applies it to them all."""
        ranks, columns = self._ranks, self.columns
        root = self.gather_rows(context)
        parts = [self._room[:0]] * ranks.count
        if root is not None:
            root.losses.copy_(self.losses)
            stats = self._at_first(root.aggregate_rows, context, self._bad, has_last=self._has_last)
            parts = columns.parts(root.update)
        else:
            stats = self._hear()
        sizes = [columns.size(ranks.index)] + [0] * (ranks.count - 1)
        self._result = [(slice(None), ranks.exchange(parts, sizes, "aggregate")[0])]
        return stats

    def _attack_at_first(self, context: AggregationContext, places: list[list[int]]) -> None:
        """The first rank makes the Byzantine rows from all rows, and sends them to the ranks that hold them."""
        ranks, byzantine = self._ranks, self._task.byzantine
        root = self.gather_rows(context)
        theirs = [[place for place in of_one if context.workers[place] in byzantine] for of_one in places]
        parts = [self._room[:0]] * ranks.count
        if root is not None:
            self._at_first(root.attack_rows, context, has_last=self._has_last)
            parts = [root.rows[[context.slots[place] for place in of_one]] for of_one in theirs]
        else:
            self._hear()
        mine, d = theirs[ranks.index], self.columns.d
        got = ranks.exchange(parts, [len(mine) * d] + [0] * (ranks.count - 1), "attack")[0]
        self._rank_memory.rows[self._rows_of([context.slots[place] for place in mine])] = got.view(len(mine), d)

    def gather_rows(self, context: AggregationContext) -> RootAggregator | None:
        """In the first rank, an aggregator with all rows of an aggregation and the server's own; else None."""
        ranks, d = self._ranks, self.columns.d
        if self._collected == self._number:
            return self._root
        self._collected = self._number
        wanted = {*context.slots, self._root_slot}
        slots = [[slot for slot in assignment if slot in wanted] for assignment in self.placement.assignments]
        rows = self._rank_memory.rows[self._rows_of(slots[ranks.index])]
        sizes = [len(theirs) * d if ranks.first else 0 for theirs in slots]
        given = ranks.exchange([rows] + [rows[:0]] * (ranks.count - 1), sizes, "gather")
        if not ranks.first:
            return None
        self._root = self._root or self._new_root()
        for theirs, part in zip(slots, given, strict=True):
            self._root.rows[theirs] = part.view(len(theirs), d)
        return self._root

    def _new_root(self) -> RootAggregator:
        whole = replace(
            self._rank_memory,
            rows=new_rows(self._n_rows, self.columns.d, self._task.dtype, self._task.device),
            unfit=torch.zeros(self._n_rows, dtype=torch.int64),
            losses=torch.zeros(self._n_rows, dtype=torch.double),
        )
        return RootAggregator(ProcessContext.alone(), self._task, whole, self._root_slot)

    def _at_first(self, work: Any, *arguments: Any, **options: Any) -> Any:
        """Do what the first rank alone does; the others hear of it where it refuses to."""
        try:
            result = work(*arguments, **options)
        except ExperimentError as error:
            self._ranks.hear_first((error.lines, None))
            raise
        self._ranks.hear_first((None, result))
        return result

    def _hear(self) -> Any:
        lines, result = self._ranks.hear_first(None)
        if lines is not None:
            raise ExperimentError(*lines)
        return result

    def _cohort(self, context: AggregationContext) -> AggregationInputs:
        return replace(super()._cohort(context), reduce=self._reduce)

    def _updates(self, slots: list[int]) -> Tensor:
        if self._linear:  # nobody looks at the rows
            return self._shared.global_row.new_empty(len(slots), 0)
        return super()._updates(slots)

    def _screened(self, context: AggregationContext) -> tuple[AggregationInputs, list[int]]:
        cohort = self._cohort(context)
        if not self._bad:
            return cohort, []
        try:
            return screened(cohort, self._task.nonfinite, self._bad)
        except ExperimentError as error:
            raise ExperimentError(f"round {context.moment[0]}: {error}") from None

    def _reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        return self._ranks.all_reduce(values, "products", {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
