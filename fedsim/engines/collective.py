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

from fedsim.aggregation import Cohort, screened
from fedsim.aggregation.columns import bad_rows, combine
from fedsim.engines.averaging import Account, Averaging, Meeting
from fedsim.engines.crew import Seat
from fedsim.engines.job import Memory, Task
from fedsim.engines.ranks import Ranks
from fedsim.engines.seating import Collector, Columns, Seating
from fedsim.errors import ExperimentError
from fedsim.rows import new_rows
from fedsim.system.devices import synchronize


class RankAveraging(Averaging):
    """One rank's share of an aggregation over ranks: an `Averaging` of its own columns, with what it takes to get them.

    Args:
        memory: the rank's; rows and buffers are its own members', global rows are whole, states become of its columns.
        seats: how many rows there are in all ranks.
        root_slot: which of them is the server's own, if it has one.
    """

    def __init__(self, ranks: Ranks, task: Task, memory: Memory, seats: int, root_slot: int | None) -> None:
        self.columns = Columns.of(len(memory.global_row), ranks.count, task.dtype)
        self._ranks, self._rank_memory, self._seats = ranks, memory, seats
        own = self.columns.part(ranks.index)
        self._room = self.columns.room(memory.global_row)
        memory.global_row = self._room[: self.columns.d]
        self._last_room = self.columns.room(memory.last) if task.keeps_last else None
        if self._last_room is not None:
            memory.last = self._last_room[: self.columns.d]
        self._whole = {"gradients"} if task.hook else set()  # every rank has the mean of those, and moves the whole row
        memory.states = {
            sync: task.stepper(sync).start(memory.global_row[slice(None) if sync in self._whole else own])
            for sync in task.syncs
        }
        self._linear = task.rule.linear_by_weights
        exchanges = not self._linear and task.rule.by_parts
        part = replace(
            memory,
            global_row=memory.global_row[own],
            rows=new_rows(seats if exchanges else 0, self.columns.size(ranks.index), task.dtype, task.device),
            last=memory.last[own] if task.keeps_last else memory.last,
            unfit=torch.zeros(seats, dtype=torch.int64),
            losses=torch.zeros(seats, dtype=torch.double),
        )
        super().__init__(Seat.alone(), task, part, root_slot)
        self.may_check_later = False  # the ranks tell each other in each aggregation
        self.seating = Seating([[]])
        self.losses = torch.zeros(seats, dtype=torch.double)  # of all, where the rule takes them
        self._bad: list[int] = []
        self._collected = 0  # the aggregation for which the first rank has been given all rows
        self._sent = memory.global_row
        self._sent_room: Tensor | None = None
        self._collector: Collector | None = None

    def sent_row(self) -> Tensor:
        """What the workers are sent, [d], in a round in which parameters are aggregated."""
        part, task = self._memory, self._task
        start = task.server.broadcast(part.global_row, part.states["parameters"])
        if start is part.global_row:
            self._sent = self._rank_memory.global_row
        else:
            self._sent_room = self._room.clone() if self._sent_room is None else self._sent_room
            self._sent_room[self.columns.part(self._ranks.index)] = start
            self._ranks.all_gather(self._sent_room, "pull_down")
            self._sent = self._sent_room[: self.columns.d]
        return self._sent

    def move_global_row(self, meeting: Meeting) -> Account:
        task, memory = self._task, self._rank_memory
        self._number += 1
        self._sync = task.sync_in(meeting.moment[0])
        if self._sync == "parameters":
            memory.rows -= self._sent
        places = self.seating.places(meeting.slots)
        if any(worker in task.byzantine for worker in meeting.workers):
            self._attack_at_first(meeting, places)
        account = self._move(meeting, places)
        self._has_last = task.keeps_last
        synchronize(task.device)
        return account

    def _move(self, meeting: Meeting, places: list[list[int]]) -> Account:
        """Aggregate rows that are ready, in the way that asks for the least."""
        rule = self._task.rule
        if self._linear and not self._memory.states[self._sync]:
            return self._move_by_one_sum(meeting, places)
        self._bad = self._agree_on_facts(meeting, places)
        if self._linear:
            return self._move_by_sums(meeting, places)
        return self._move_by_parts(meeting, places) if rule.by_parts else self._move_at_first(meeting, places)

    def lasting(self) -> dict[str, Tensor]:
        """What one round leaves to the next, in whole rows; copies of the states, whose columns ranks share."""
        memory = self._rank_memory
        whole = {name: kept for name, kept in memory.lasting.items() if name not in memory.state_names}
        for sync, state in memory.states.items():
            if sync in self._whole:
                whole |= {f"{sync}.{name}": tensor for name, tensor in state.items()}
                continue
            for name, part in state.items():
                room = self.columns.room(memory.global_row)
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
        if self._collector is not None:
            state = self._collector.remembered()[0]
        return state, self._has_last

    def remember(self, state: dict[str, Tensor], has_last: bool) -> None:
        super().remember(state, has_last)
        if self._collector is None and not self._task.rule.by_parts and self._ranks.first:
            self._collector = self._new_collector()
        if self._collector is not None:
            self._collector.remember(state, has_last)

    def shares(self, meeting: Meeting) -> list[float]:
        """With what share each row of a meeting goes into a linear rule's result, before anybody has one."""
        self._bad = []
        shares = self._shares(meeting, self._cohort(meeting), [])
        assert shares is not None
        return shares.tolist()

    def of_mine(self, meeting: Meeting, values: Sequence[float]) -> dict[int, float]:
        """Of values for each place of a meeting those of this rank's members, by their rows."""
        slots = {place: meeting.slots[place] for place in self.seating.places(meeting.slots)[self._ranks.index]}
        return {self.seating.rows[slot][1]: values[place] for place, slot in slots.items()}

    def move_along(self, mean: Tensor) -> None:
        """Move the whole global row by the solver's step along a mean gradient [d] that every rank has."""
        self._number += 1
        self._sync = "gradients"
        self._task.solver.step(self._rank_memory.global_row, mean, self._rank_memory.states["gradients"])
        synchronize(self._task.device)

    def refuse(self, meeting: Meeting, rows: Collection[int]) -> NoReturn:
        """Raise ExperimentError in all ranks: their mean gradient is not finite, nor are these rows of this one's."""
        bad = torch.zeros(len(meeting.slots), dtype=torch.double)
        for place, slot in enumerate(meeting.slots):
            rank, row = self.seating.rows[slot]
            bad[place] = rank == self._ranks.index and row in rows
        self._bad = self._ranks.all_reduce(bad, "facts").nonzero().flatten().tolist()
        self._screened(meeting)
        assert self._task.hook is not None
        raise ExperimentError(
            f"round {meeting.moment[0]}: the mean of the gradients is not finite, though each of them is "
            f'(distributed.hook = "{self._task.hook.name}")'
        )

    def begin_with_parameters(self) -> None:
        super().begin_with_parameters()
        if self._collector is not None:
            self._collector.forget()

    def combine_buffers(self, meeting: Meeting, excluded: Collection[int]) -> None:
        """Update the buffers from those of the whole cohort, in every rank alike. Called by all ranks."""
        if not self._keeps_buffers:
            return
        memory, places = self._rank_memory, self.seating.places(meeting.slots)
        own = places[self._ranks.index]
        buffers = memory.buffers.new_zeros(len(meeting.slots), memory.buffers.shape[1])
        buffers[own] = memory.buffers[self._rows_of([meeting.slots[place] for place in own])]
        self._ranks.all_reduce(buffers, "buffers")
        self._take_buffers(meeting, excluded, buffers)

    def _rows_of(self, slots: Sequence[int]) -> list[int]:
        """Where this rank has its rows of these slots."""
        return [self.seating.rows[slot][1] for slot in slots]

    def _own_rows(self, meeting: Meeting, places: list[list[int]]) -> Tensor:
        """This rank's rows of a meeting, in its order."""
        own = self._rows_of([meeting.slots[place] for place in places[self._ranks.index]])
        rows = self._rank_memory.rows
        return rows[: len(own)] if own == list(range(len(own))) else rows[own]

    def _agree_on_facts(self, meeting: Meeting, places: list[list[int]]) -> list[int]:
        """The places of rows that are not finite, for all ranks to know; and the losses, where the rule takes them."""
        task, mine = self._task, places[self._ranks.index]
        if task.nonfinite == "keep" and not task.rule.takes("losses"):
            return []
        facts = torch.zeros(2 if task.rule.takes("losses") else 1, len(meeting.slots), dtype=torch.double)
        if task.nonfinite != "keep":
            facts[0, [mine[row] for row in bad_rows(self._own_rows(meeting, places))]] = 1
        if task.rule.takes("losses"):
            own = self._rows_of([meeting.slots[place] for place in mine])
            facts[1, mine] = self._rank_memory.losses[own]
        self._ranks.all_reduce(facts, "facts")
        if task.rule.takes("losses"):
            self.losses[list(meeting.slots)] = facts[1]
        return facts[0].nonzero().flatten().tolist()

    def _move_by_one_sum(self, meeting: Meeting, places: list[list[int]]) -> Account:
        """A linear rule, and a step that keeps nothing: one sum over the ranks, and every rank moves the whole row.

        A rank that has a row which is not finite makes the sum so, and only then the ranks find out which those are.
        """
        task, ranks = self._task, self._ranks
        self._bad = []
        total, account = self._weighted_sum(meeting, places)
        if task.nonfinite != "keep" and bad_rows(self._own_rows(meeting, places)):
            total.fill_(math.nan)
        ranks.all_reduce(total, "aggregate")
        if task.nonfinite != "keep" and not math.isfinite(total.sum()):
            self._bad = self._agree_on_facts(meeting, places)
            if self._bad:
                total, account = self._weighted_sum(meeting, places)
                ranks.all_reduce(total, "aggregate")
        if task.keeps_last:
            self._rank_memory.last.copy_(total)
        task.stepper(self._sync).step(self._rank_memory.global_row, total, {})
        return account

    def _move_by_sums(self, meeting: Meeting, places: list[list[int]]) -> Account:
        """A linear rule, and a step whose state each rank has of its own columns: they are summed and moved there."""
        ranks, columns = self._ranks, self.columns
        total, account = self._weighted_sum(meeting, places)
        parts = ranks.exchange(columns.parts(total), [columns.size(ranks.index)] * ranks.count, "aggregate")
        self._step(slice(None), torch.stack(parts).sum(0))
        self._gather()
        return account

    def _weighted_sum(self, meeting: Meeting, places: list[list[int]]) -> tuple[Tensor, Account]:
        """This rank's part of a linear rule's result, [d], and the account of the whole."""
        cohort, bad = self._screened(meeting)
        shares = self._shares(meeting, cohort, bad)
        account = self._account(meeting, bad, shares)
        assert account.shares is not None
        own = torch.tensor([account.shares[place] for place in places[self._ranks.index]], dtype=torch.double)
        return combine(own, self._own_rows(meeting, places)), account

    def _move_by_parts(self, meeting: Meeting, places: list[list[int]]) -> Account:
        """A rule that goes by columns, or by products of pairs: each rank applies it to its columns of all rows."""
        ranks, columns = self._ranks, self.columns
        width = columns.size(ranks.index)
        given = ranks.exchange(
            columns.parts(self._own_rows(meeting, places)), [len(theirs) * width for theirs in places], "aggregate"
        )
        room = self._memory.rows
        for theirs, rows in zip(places, given, strict=True):
            room[theirs] = rows.view(len(theirs), width)
        self._memory.losses[: len(meeting.slots)] = self.losses[list(meeting.slots)]
        meeting = replace(meeting, slots=range(len(meeting.slots)))
        move = super()._move_by_columns if self._task.rule.columnwise else super()._move_by_rows
        account = move(meeting)
        self._gather()
        return account

    def _move_at_first(self, meeting: Meeting, places: list[list[int]]) -> Account:
        """A rule that looks at whole rows: the first rank applies it to them all."""
        ranks, columns = self._ranks, self.columns
        collector = self.gather_rows(meeting)
        parts = [self._room[:0]] * ranks.count
        if collector is not None:
            collector.losses.copy_(self.losses)
            account = self._at_first(collector.collect, meeting, self._bad, has_last=self._has_last)
            parts = columns.parts(collector.update)
        else:
            account = self._hear()
        sizes = [columns.size(ranks.index)] + [0] * (ranks.count - 1)
        self._step(slice(None), ranks.exchange(parts, sizes, "aggregate")[0])
        self._gather()
        return account

    def _attack_at_first(self, meeting: Meeting, places: list[list[int]]) -> None:
        """The first rank makes the Byzantine rows of all rows, and gives them to those who hold them."""
        ranks, byzantine = self._ranks, self._task.byzantine
        collector = self.gather_rows(meeting)
        theirs = [[place for place in of_one if meeting.workers[place] in byzantine] for of_one in places]
        parts = [self._room[:0]] * ranks.count
        if collector is not None:
            self._at_first(collector.attack, meeting, has_last=self._has_last)
            parts = [collector.rows[[meeting.slots[place] for place in of_one]] for of_one in theirs]
        else:
            self._hear()
        mine, d = theirs[ranks.index], self.columns.d
        got = ranks.exchange(parts, [len(mine) * d] + [0] * (ranks.count - 1), "attack")[0]
        self._rank_memory.rows[self._rows_of([meeting.slots[place] for place in mine])] = got.view(len(mine), d)

    def gather_rows(self, meeting: Meeting) -> Collector | None:
        """In the first rank, one who has all rows of a meeting, and the server's own; it is given them once."""
        ranks, d = self._ranks, self.columns.d
        if self._collected == self._number:
            return self._collector
        self._collected = self._number
        wanted = {*meeting.slots, self._root_slot}
        slots = [[slot for slot in hand if slot in wanted] for hand in self.seating.hands]
        rows = self._rank_memory.rows[self._rows_of(slots[ranks.index])]
        sizes = [len(theirs) * d if ranks.first else 0 for theirs in slots]
        given = ranks.exchange([rows] + [rows[:0]] * (ranks.count - 1), sizes, "gather")
        if not ranks.first:
            return None
        self._collector = self._collector or self._new_collector()
        for theirs, part in zip(slots, given, strict=True):
            self._collector.rows[theirs] = part.view(len(theirs), d)
        return self._collector

    def _new_collector(self) -> Collector:
        whole = replace(
            self._rank_memory,
            rows=new_rows(self._seats, self.columns.d, self._task.dtype, self._task.device),
            unfit=torch.zeros(self._seats, dtype=torch.int64),
            losses=torch.zeros(self._seats, dtype=torch.double),
        )
        return Collector(Seat.alone(), self._task, whole, self._root_slot)

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

    def _gather(self) -> None:
        """Give everybody the columns that each rank has moved."""
        self._ranks.all_gather(self._room, "aggregate")
        if self._last_room is not None:
            self._ranks.all_gather(self._last_room, "aggregate")

    def _cohort(self, meeting: Meeting) -> Cohort:
        return replace(super()._cohort(meeting), reduce=self._reduce)

    def _updates(self, slots: Sequence[int]) -> Tensor:
        if self._linear:  # nobody looks at the rows
            return self._memory.global_row.new_empty(len(slots), 0)
        return super()._updates(slots)

    def _screened(self, meeting: Meeting) -> tuple[Cohort, list[int]]:
        cohort = self._cohort(meeting)
        if not self._bad:
            return cohort, []
        try:
            return screened(cohort, self._task.nonfinite, self._bad)
        except ExperimentError as error:
            raise ExperimentError(f"round {meeting.moment[0]}: {error}") from None

    def _reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        return self._ranks.all_reduce(values, "products", {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])
