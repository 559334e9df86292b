"""How the cohort's rows move the global row: the attack, the screening, the rule, the server's step, the buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.aggregation import Cohort, column_blocks, screened
from fedsim.aggregation.averaging import mean
from fedsim.engines.crew import Seat
from fedsim.engines.job import Memory, Sync, Task
from fedsim.errors import ExperimentError
from fedsim.system.devices import synchronize, to_device


@dataclass
class Account:
    """What an aggregation, or a round of them, has to say: how much each slot's row counted, and who was left out."""

    shares: list[float] | None = None
    excluded: list[int] | None = None


@dataclass(frozen=True)
class Meeting:
    """One aggregation: whose rows, with what weights, when.

    Attributes:
        slots: the rows that take part.
        workers: whose they are.
        weights: [n], float64 on the CPU, or None.
        moment: (round,), or (round, step) where every step is a synchronisation; coordinates of random draws.
    """

    slots: Sequence[int]
    workers: list[int]
    weights: Tensor | None
    moment: tuple[int, ...]


class Averaging:
    """One process's share of an aggregation. Rules that look at whole rows, and attacks, are the first process's work.

    Args:
        root_slot: where the server's own row lies, if it has one.
    """

    def __init__(self, seat: Seat, task: Task, memory: Memory, root_slot: int | None) -> None:
        self._seat, self._task, self._memory, self._root_slot = seat, task, memory, root_slot
        d = len(memory.global_row)
        cuts = column_blocks(d, seat.index, seat.count, n=len(memory.rows), device=task.device)
        self._blocks = list(cuts)
        self._first = seat.index == 0
        self._state: dict[str, Tensor] = {}  # of the rule
        self._number = 0  # of aggregations so far, the same in every process
        self._sync: Sync = task.sync_in(1)  # what the rows of the aggregation in hand hold
        self._has_last = False
        self._shared: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)  # weights, rows, their shares
        # A look at each step's rows waits for the device. In one process, rows can be checked at the end of a round
        # instead, if a row that is not finite does the rule no harm.
        self.may_check_later = (
            task.device.type != "cpu" and seat.count == 1 and task.nonfinite != "keep" and task.rule.columnwise
        )
        self._sums: list[Tensor] | None = None  # of the rows of each aggregation since `check_later`, on the device
        self._before: list[tuple[Tensor, Tensor]] = []  # what aggregations change, and its values at `check_later`
        self._had_last = False  # at `check_later`

    def weights(self, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
        """The weights [n] that the rule is given for these workers, on the CPU, or None for equal ones.

        `samples` are what each of them went through, for weights by samples.
        """
        task = self._task
        if not task.rule.takes_weights or (task.weights == "uniform" and not task.rule.needs_weights):
            return None
        if task.weights == "samples":
            values: Sequence[float] = samples
        else:
            values = [1.0 if task.weights == "uniform" else task.weights[worker] for worker in workers]
        return torch.tensor(values, dtype=torch.double)

    def sent_row(self) -> Tensor:
        """What the workers are sent, [d], in a round in which parameters are aggregated; only to be read."""
        return self._task.server.broadcast(self._memory.global_row, self._memory.states["parameters"])

    def move_global_row(self, meeting: Meeting) -> Account:
        """Aggregate rows that are ready in all processes, and move the global row; all processes call it.

        Rows of parameters become updates, in place. What it says counts in the first process.
        """
        self._number += 1
        self._sync = self._task.sync_in(meeting.moment[0])
        self._take_differences()
        if any(worker in self._task.byzantine for worker in meeting.workers):
            self._meet()
            if self._first:
                self._attack(meeting)
        self._meet()
        account = self._move_by_columns(meeting) if self._task.rule.columnwise else self._move_by_rows(meeting)
        self._has_last = self._task.keeps_last
        return account

    def remembered(self) -> tuple[dict[str, Tensor], bool]:
        """The state of the rule, where it was applied to rows here; and whether there is a last update."""
        return {name: tensor.clone() for name, tensor in self._state.items()}, self._has_last

    def remember(self, state: dict[str, Tensor], has_last: bool) -> None:
        """Go on from there."""
        here = self._task.device
        self._state = {name: tensor.to(here, copy=True) for name, tensor in state.items()} if self._first else {}
        self._has_last = has_last

    def begin_with_parameters(self) -> None:
        """Forget the gradients, after the last round of them: what rule, attack and server keep belongs to updates.

        The server optimizer starts at the global row as it has become, each process's columns of it.
        """
        self._state, self._has_last, self._sync = {}, False, "parameters"
        for block in self._blocks:
            start = self._task.server.start(self._memory.global_row[block])
            for name, tensor in self._state_of(block).items():
                tensor.copy_(start[name])
        synchronize(self._task.device)

    def check_later(self) -> None:
        """From now on, do not look at which rows are finite, until `check` is called."""
        memory = self._memory
        changed = [memory.global_row, memory.last, *memory.states["gradients"].values()]
        self._sums, self._before = [], [(tensor, tensor.clone()) for tensor in changed]
        self._had_last = self._has_last

    def check(self, *, undo: bool) -> bool:
        """Whether all rows since `check_later` were finite, as far as their sums tell, which may overflow.

        If not, or with `undo`, undo these aggregations, and check each of them from now on; the result is False.
        """
        finite = not undo and (not self._sums or bool(torch.cat(self._sums).isfinite().all()))
        if not finite:
            for tensor, before in self._before:
                tensor.copy_(before)
            self._has_last, self.may_check_later = self._had_last, False
        self._sums, self._before = None, []
        return finite

    def _meet(self) -> None:
        meet(self._seat, self._task.device)

    @property
    def _checks_now(self) -> bool:
        """Whether to find out, in each aggregation, which rows are not finite."""
        return self._task.nonfinite != "keep" and self._sums is None

    def _take_differences(self) -> None:
        """Updates in place of parameters, in this process's columns; and which rows hold what is not finite there."""
        task, memory = self._task, self._memory
        for block in self._blocks:
            rows = memory.rows[:, block]
            if self._sync == "parameters":
                rows -= task.server.broadcast(memory.global_row[block], self._state_of(block))
            if self._checks_now:  # a sum may overflow, so this is a suspicion only
                suspects = (~rows.sum(1).cpu().isfinite()).nonzero().flatten()
                memory.unfit[suspects] = self._number

    def _attack(self, meeting: Meeting) -> None:
        """Put the Byzantine rows in place of what those workers computed."""
        task, memory = self._task, self._memory
        attackers = [worker in task.byzantine for worker in meeting.workers]
        byzantine = [slot for slot, attacks in zip(meeting.slots, attackers, strict=True) if attacks]
        honest = [slot for slot, attacks in zip(meeting.slots, attackers, strict=True) if not attacks]
        if not honest and task.attack.needs_honest:
            return  # the Byzantine workers send what they have trained
        theirs = to_device(torch.tensor(byzantine), task.device)

        def aggregate(rows: Tensor) -> Tensor:
            memory.rows[theirs] = rows
            kept, _ = screened(self._cohort(meeting), "exclude")
            return task.rule(kept).update

        rows = task.attack(
            _copies_of(memory.rows, honest),
            memory.rows[theirs],
            seed=task.seed,
            moment=meeting.moment,
            last=memory.last if self._has_last else None,
            aggregate=aggregate,
        )
        memory.rows[theirs] = rows
        if self._checks_now:
            memory.unfit[byzantine] = torch.where(rows.isfinite().all(1).cpu(), 0, self._number)

    def _cohort(self, meeting: Meeting) -> Cohort:
        task, memory = self._task, self._memory
        slots = list(meeting.slots)
        return Cohort(
            updates=self._updates(slots),
            weights=meeting.weights,
            root=None if self._root_slot is None else memory.rows[self._root_slot],
            losses=memory.losses[slots] if task.rule.takes("losses") else None,
            workers=list(meeting.workers),
            seed=task.seed,
            moment=meeting.moment,
            state=self._state,
            last=memory.last if self._has_last else None,
            local_lr=task.local_lr,
            sync=task.sync_in(meeting.moment[0]),
        )

    def _updates(self, slots: list[int]) -> Tensor:
        """The rows at these slots."""
        rows = self._memory.rows
        return rows if slots == list(range(len(rows))) else _rows_at(rows, slots)

    def _move_by_rows(self, meeting: Meeting) -> Account:
        """A rule that looks at whole rows: the first process applies it and moves the whole global row."""
        if not self._first:
            return Account()
        cohort, bad = self._screened(meeting)
        outcome = self._task.rule(cohort)
        self._state = outcome.state
        self._step(slice(None), outcome.update)
        return self._account(meeting, bad, outcome.shares)

    @staticmethod
    def _account(meeting: Meeting, bad: list[int], shares: Tensor | None) -> Account:
        """Of rows of which those at the places `bad` were left out, and the others had these shares."""
        excluded = [meeting.workers[place] for place in bad]
        if shares is None:
            return Account(None, excluded)
        values = iter(shares.tolist())
        return Account([0.0 if place in bad else next(values) for place in range(len(meeting.slots))], excluded)

    def _move_by_columns(self, meeting: Meeting) -> Account:
        """A rule that looks at columns: each process applies it to its own, and moves the global row there."""
        cohort, bad = self._screened(meeting)
        rule, rows, shares = self._task.rule, cohort.rows(), self._shares(meeting, cohort, bad)
        for block in self._blocks:
            self._step(block, rule.of_columns(cohort.updates[:, block], rows, cohort, shares))
        return self._account(meeting, bad, shares)

    def _shares(self, meeting: Meeting, cohort: Cohort, bad: list[int]) -> Tensor | None:
        """The shares of a linear rule. Those of the step before are used again if only the weights decide on them."""
        if bad or not self._task.rule.linear_by_weights:
            return self._task.rule.shares(cohort)
        weights, n, shares = self._shared
        if meeting.weights is not weights or len(meeting.slots) != n:
            shares = self._task.rule.shares(cohort)
            self._shared = meeting.weights, len(meeting.slots), shares
        return shares

    def _screened(self, meeting: Meeting) -> tuple[Cohort, list[int]]:
        """The cohort without rows that are not finite, and their places in it."""
        cohort = self._cohort(meeting)
        if self._sums is not None:
            self._sums.append(cohort.updates.sum(1))
            return cohort, []
        if self._task.nonfinite == "keep" or not (self._memory.unfit[list(meeting.slots)] == self._number).any():
            return cohort, []
        try:
            return screened(cohort, self._task.nonfinite)
        except ExperimentError as error:
            raise ExperimentError(f"round {meeting.moment[0]}: {error}") from None

    def _step(self, block: slice, update: Tensor) -> None:
        """Move the global row, in these columns, by the aggregated update."""
        task, memory = self._task, self._memory
        if task.keeps_last:
            memory.last[block] = update
        task.stepper(self._sync).step(memory.global_row[block], update, self._state_of(block))

    def _state_of(self, block: slice) -> dict[str, Tensor]:
        return {name: tensor[block] for name, tensor in self._memory.states[self._sync].items()}

    def combine_buffers(self, meeting: Meeting, excluded: Collection[int]) -> None:
        """Update the buffers from those of the whole cohort, by policy. Called in one process.

        Args:
            excluded: workers whose rows were left out; their buffers are left out too.
        """
        if self._keeps_buffers:
            self._take_buffers(meeting, excluded, self._memory.buffers[: len(meeting.slots)])

    @property
    def _keeps_buffers(self) -> bool:
        """Whether anything becomes of the workers' buffers."""
        return self._memory.global_buffers.numel() > 0 and self._task.buffers != "server"

    def _take_buffers(self, meeting: Meeting, excluded: Collection[int], buffers: Tensor) -> None:
        """The global buffers become the mean of `buffers` [n, b], weighted as rows are; workers may keep their own.

        Where no worker is left that counts, they stay as they are.
        """
        memory, workers, weights = self._memory, meeting.workers, meeting.weights
        if excluded := set(excluded):
            kept = [place for place, worker in enumerate(workers) if worker not in excluded]
            workers, buffers = [workers[place] for place in kept], buffers[kept]
            weights = None if weights is None else weights[kept]
        if self._task.buffers == "local":
            memory.own_buffers[workers] = buffers
        if workers and (weights is None or weights.any()):
            memory.global_buffers.copy_(mean(buffers, weights))


def _rows_at(rows: Tensor, slots: list[int]) -> Tensor:
    """The rows at these slots; a view where they lie side by side."""
    if slots == list(range(slots[0], slots[-1] + 1)):
        return rows[slots[0] : slots[-1] + 1]
    return _copies_of(rows, slots)


def _copies_of(rows: Tensor, slots: list[int]) -> Tensor:
    return rows[to_device(torch.tensor(slots, dtype=torch.int64), rows.device)]


def meet(seat: Seat, device: torch.device) -> None:
    """Wait until all processes have come, and the device has finished the work that the others are to see."""
    if seat.count > 1:
        synchronize(device)
    seat.barrier.wait()
