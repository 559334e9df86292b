"""What one process does in a round. Every engine runs this code; they differ in how many processes run it, and where.

A station works on its share of what a call names: of the cohort's members, which its trainer trains; of the columns;
of the test batches. What it reads and writes lies in the engine's Memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from fedsim.engines.averaging import Account, Averaging, Meeting, meet
from fedsim.engines.capture import can_capture
from fedsim.engines.crew import Seat
from fedsim.engines.evaluation import Evaluation
from fedsim.engines.feed import Feed, Member
from fedsim.engines.job import Memory, Task, test_batch_size
from fedsim.engines.module import RowModule
from fedsim.engines.shortage import shortage_told
from fedsim.engines.trainer import Trainer
from fedsim.randomness import seed_everything
from fedsim.rows import index_of, new_rows, pull_down
from fedsim.system.devices import synchronize
from fedsim.system.precision import full_precision
from fedsim.training import test

MakeTrainer = Callable[[Seat, Task, Memory, Feed], Trainer]


class RoundAccount:
    """What the aggregations of a round come to: mean shares over its steps, and whoever was left out of any."""

    def __init__(self, cohort: Sequence[int]) -> None:
        self._shares = [0.0] * len(cohort)
        self._excluded: set[int] = set()
        self._steps = self._told = 0

    def add(self, meeting: Meeting, account: Account) -> None:
        self._steps += 1
        self._excluded.update(account.excluded or [])
        if account.shares is not None:
            self._told += 1
            for slot, share in zip(meeting.slots, account.shares, strict=True):
                self._shares[slot] += share

    def total(self) -> Account:
        told = self._told == self._steps > 0
        return Account([s / self._steps for s in self._shares] if told else None, sorted(self._excluded))


class Station:
    """One process's share of the work of an engine."""

    def __init__(self, seat: Seat, task: Task, memory: Memory, make_trainer: MakeTrainer) -> None:
        self.seat, self.task, self.memory = seat, task, memory
        self.module = RowModule(task.new_module)
        self.gradient = new_rows(1, self.module.layout.d, task.dtype, task.device)[0]
        self.feed = Feed(task, memory)
        self.averaging = self._new_averaging()
        told = shortage_told(task, seat.count)
        with told, self.in_precision():  # since what is captured or compiled keeps the precision in which that was done
            self.trainer = make_trainer(seat, task, memory, self.feed)
        captured = self.trainer.replays is not None and task.cuda_graphs is not False and can_capture(task.device)
        self._evaluation = Evaluation(task, memory, self.module, self._test_batches(), captured=captured)

    def _new_averaging(self) -> Averaging:
        root_row = None if self.feed.root is None else len(self.memory.rows) - 1
        return Averaging(self.seat, self.task, self.memory, root_row)

    def do(self, method: str, *arguments: object) -> Any:
        """Call one of the methods below, in which nothing but training has a lower precision than the rows."""
        with shortage_told(self.task, self.seat.count, self.trainer.width), full_precision(self.task.device):
            return getattr(self, method)(*arguments)

    def pull_down(self, cohort: Sequence[int], round: int) -> None:
        """Give this process's members of the cohort the global model."""
        task, memory = self.task, self.memory
        members = self._mine(cohort)
        index = index_of([member.slot for member in members], task.device)
        if task.sync_in(round) == "parameters":
            pull_down(self.averaging.sent_row(), memory.rows, index)
        if task.buffers == "local":
            memory.buffers[index] = memory.own_buffers[index_of([member.worker for member in members], task.device)]
        else:
            pull_down(memory.global_buffers, memory.buffers, index)
        synchronize(task.device)

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train this process's members of the cohort, each on its own row and shard."""
        members = self._mine(cohort, round)
        if self.task.rule.takes("losses"):
            for member in members:
                with self.seat.working_on(member.worker, round):
                    self.memory.losses[member.slot] = self._loss_before_training(member)
        with self.in_precision():
            self.trainer.train(members)
        synchronize(self.task.device)

    def train_apart(self, members: Sequence[Member]) -> None:
        """Train this process's share of members whose rounds differ; their rows hold what they begin with."""
        self.train_mine(self._share_of(members))

    def train_mine(self, members: Sequence[Member]) -> None:
        """The same for members that are this process's alone."""
        with self.in_precision():
            self.trainer.train(members)
        synchronize(self.task.device)

    def remembered(self) -> tuple[dict[str, np.ndarray], bool]:
        """What rules keep from one aggregation to the next, beside the Memory: see `Averaging`.

        By value: tensors would travel as shared memory, which a process that is killed on the way leaves behind.
        """
        state, has_last = self.averaging.remembered()
        return {name: tensor.cpu().numpy() for name, tensor in state.items()}, has_last

    def remember(self, rule: dict[str, np.ndarray], has_last: bool) -> None:
        """Go on from there; what is in the Memory has been put back by then."""
        self.averaging.remember({name: torch.from_numpy(array) for name, array in rule.items()}, has_last)

    def begin_with_parameters(self) -> None:
        """After the last round of gradients: what rule, attack and server keep begins here."""
        self.averaging.begin_with_parameters()

    def compilation(self) -> str | None:
        """Why this process does not train by compiled code, where it should."""
        compiled = self.trainer.compiled
        return None if compiled is None else compiled.refusal

    def replay_refusal(self) -> str | None:
        """Why this process does not replay captured steps."""
        replays = self.trainer.replays
        return "only steps of stacks are" if replays is None else replays.refusal

    def aggregate(self, cohort: Sequence[int], round: int) -> Account:
        """Move the global row along the aggregate of the cohort's updates."""
        meeting = self._whole_cohort(cohort, round)
        account = self._average(meeting)
        self._combine_buffers(meeting, account)
        return account

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> Account:
        """Synchronous SGD: at every step the cohort's gradients are aggregated and ONE optimizer step is taken.

        The rows hold gradients here, all of them at the global row. A worker whose data is used up is left out of
        the steps that remain.
        """
        account = self._steps_checked_later(cohort, round) if self.averaging.may_check_later else None
        if account is None:
            account = self._steps_together(cohort, round)
        if round == self.task.gradient_rounds < self.task.rounds:
            self.averaging.begin_with_parameters()
        self._combine_buffers(self._whole_cohort(cohort, round), account)
        return account

    def _steps_together(self, cohort: Sequence[int], round: int) -> Account:
        """The steps of a round of synchronous SGD."""
        of_round = RoundAccount(cohort)
        self.trainer.meet_at_global_row(self._mine(cohort, round))
        for step, meeting in enumerate(self._meetings(cohort, round)):
            of_round.add(meeting, self._step_together(step, meeting))
        self.trainer.part()
        return of_round.total()

    def _steps_checked_later(self, cohort: Sequence[int], round: int) -> Account | None:
        """The steps of a round, after which all rows are checked together.

        None, and the global row and the buffers as before, if a row is not finite. Such a row may also make a model or
        a rule fail: after any error the round is to be done again with a check at each step, which repeats an error
        that has another reason.
        """
        self.averaging.check_later()
        try:
            account = self._steps_together(cohort, round)
        except Exception:
            account = None
        if not self.averaging.check(undo=account is None):
            self.pull_down(cohort, round)
            return None
        return account

    def test(self, round: int) -> None:
        """Test the global model on this process's share of the test batches."""
        self._evaluation(round, self.seat.beat)

    def _test_batches(self) -> range:
        return range(self.seat.index, len(self.memory.test_sums), self.seat.count)

    def _loss_before_training(self, member: Member) -> float:
        """Mean loss of a copy of a member's row on its worker's own samples, as the worker sees them."""
        task, memory = self.task, self.memory
        self.module.take(memory.rows[member.slot].clone(), self.gradient, memory.buffers[member.slot])
        seed_everything(task.device, task.seed, "losses", member.round, member.worker)
        batches = self.feed.samples_seen(member.worker, member.round, test_batch_size(task.device))
        return test(self.module.module, batches).loss

    def in_precision(self) -> AbstractContextManager[Any]:
        """The precision of training, until a block ends."""
        return self.task.precision.training(self.task.device)

    def _whole_cohort(self, cohort: Sequence[int], round: int) -> Meeting:
        weights = self.averaging.weights(cohort, self._shard_sizes(cohort))
        return Meeting(range(len(cohort)), list(cohort), weights, (round,))

    def _mine(self, cohort: Sequence[int], round: int = 0) -> list[Member]:
        """The members that this process trains: of the cohort, and the server where the rule compares with that."""
        everyone, steps = self._everyone(cohort)
        slots = [*range(len(cohort)), len(self.memory.rows) - 1]  # the server's is the last, however many there are
        hand = deal(steps, self.seat.count)[self.seat.index]
        return [Member(slots[place], everyone[place], round) for place in hand]

    def _everyone(self, cohort: Sequence[int]) -> tuple[list[int], list[int]]:
        """Whoever trains in a round, the server last, and how many steps each of them takes."""
        everyone = [*cohort] if self.feed.root is None else [*cohort, self.feed.root]
        return everyone, [self.task.schedule.steps_for(n) for n in self._shard_sizes(everyone)]

    def _share_of(self, members: Sequence[Member]) -> list[Member]:
        """Whoever goes step by step stays with one process, whose feed is where the last step ended."""
        index, count = self.seat.index, self.seat.count
        by_step = [member for member in members if member.step is not None]
        rounds = [member for member in members if member.step is None]
        hand = deal([self.feed.steps_of(member) for member in rounds], count)[index]
        return [rounds[place] for place in hand] + [member for member in by_step if member.slot % count == index]

    def _shard_sizes(self, cohort: Sequence[int]) -> list[int]:
        return [self.feed.size(worker) for worker in cohort]

    def _meetings(self, cohort: Sequence[int], round: int) -> Iterator[Meeting]:
        """The aggregations of a round of synchronous SGD: at each step those take part who still have data."""
        schedule, shard_sizes = self.task.schedule, self._shard_sizes(cohort)
        batch_sizes: list[int] = []
        for step in range(max(map(schedule.steps_for, shard_sizes))):
            if batch_sizes != (batch_sizes := [schedule.batch_size_at(step, n) for n in shard_sizes]):
                active = [slot for slot, size in enumerate(batch_sizes) if size]
                workers, samples = [cohort[slot] for slot in active], [batch_sizes[slot] for slot in active]
                weights = self.averaging.weights(workers, samples)
                if weights is not None and not weights.any():
                    return  # those who still have data count for nothing
            yield Meeting(active, workers, weights, (round, step))

    def _step_together(self, step: int, meeting: Meeting) -> Account:
        """A step of synchronous SGD."""
        with self.in_precision():
            self.trainer.gradients(step)
        return self._average(meeting)

    def _average(self, meeting: Meeting) -> Account:
        """Between two crossings of the barrier, each process moves its own columns of the global row."""
        self._meet()
        account = self.averaging.move_global_row(meeting)
        self._meet()
        return account

    def _combine_buffers(self, meeting: Meeting, account: Account) -> None:
        """The first process does that, whose account says who was left out, when all have given theirs."""
        self.seat.barrier.wait()
        if self.seat.index == 0:
            self.averaging.combine_buffers(meeting, account.excluded or ())
            synchronize(self.task.device)

    def _meet(self) -> None:
        meet(self.seat, self.task.device)


def deal(costs: Sequence[int], count: int, most: int | None = None) -> list[list[int]]:
    """Deal things to `count` hands, the costliest first and always to the least burdened; each hand ascending.

    No hand gets more than `most` things, if that is given. The same for every caller with the same costs.
    """
    hands: list[list[int]] = [[] for _ in range(count)]
    burden = [0] * count
    for thing in sorted(range(len(costs)), key=lambda thing: -costs[thing]):
        hand = min((hand for hand in range(count) if len(hands[hand]) != most), key=burden.__getitem__)
        hands[hand].append(thing)
        burden[hand] += costs[thing]
    return [sorted(hand) for hand in hands]
