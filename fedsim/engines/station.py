"""What one process does in a round. Every engine runs this code; they differ in how many processes run it, and where.

A station owns one module, which it binds to one row after another, and works on its share of what a call names: of
the cohort's members, of the columns, of the test batches. What it reads and writes lies in the engine's Memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedsim.data import CustomSubset
from fedsim.devices import synchronize, wide_dtype
from fedsim.engines.averaging import Account, Averaging, Meeting
from fedsim.engines.crew import Seat
from fedsim.engines.job import Memory, Task, test_batch_size
from fedsim.engines.module import RowModule
from fedsim.local import RowOptimizer
from fedsim.randomness import numpy_generator, seed_everything, torch_generator
from fedsim.rows import new_rows, pull_down
from fedsim.training import backward, test, train_epoch

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Member:
    """A member of the cohort that takes part in synchronous SGD, for one round."""

    slot: int
    worker: int
    module: RowModule
    batches: Batches
    loss_sum: Tensor
    samples: int = 0


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

    def __init__(self, seat: Seat, task: Task, memory: Memory) -> None:
        self.seat, self.task, self.memory = seat, task, memory
        self.module = RowModule(task.new_module)
        self.layout = self.module.layout
        self.rows = list(memory.rows)
        self.gradient = new_rows(1, self.layout.d, task.dtype, task.device)[0]
        self.shard_sizes = memory.shard_ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
        self.root = len(self.shard_sizes) - 1 if task.rule.takes("root") else None  # the server, as a worker
        self.averaging = Averaging(seat, task, memory, None if self.root is None else len(self.rows) - 1)
        self._modules: list[RowModule] = []  # with sync = "gradients", one for each member that this process trains

    def pull_down(self, cohort: Sequence[int]) -> None:
        """Give this process's members of the cohort the global model."""
        task, memory, everyone = self.task, self.memory, self._everyone(cohort)
        for slot in self._mine(everyone):
            if task.sync == "parameters":
                pull_down(task.server.broadcast(memory.global_row, memory.state), memory.rows[slot])
            own = task.buffers == "local"
            memory.buffers[slot] = memory.own_buffers[everyone[slot]] if own else memory.global_buffers
        synchronize(task.device)

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train this process's members of the cohort, each on its own row and shard."""
        task, memory = self.task, self.memory
        tallies, everyone = {}, self._everyone(cohort)
        for slot in self._mine(everyone):
            worker, row = everyone[slot], self.rows[slot]
            with self.seat.working_on(worker, round):
                self.module.take(row, self.gradient, memory.buffers[slot])
                if task.rule.takes("losses"):
                    memory.losses[slot] = self._loss_on_shard(worker)
                seed_everything(task.device, task.seed, "layers", round, worker)
                optimizer = RowOptimizer(task.solver, row, self.gradient)
                tallies[slot] = train_epoch(self.module.module, self._batches(worker, round), optimizer)
                self.module.give(memory.buffers[slot])
        for slot, tally in tallies.items():  # only now, because reading a number waits for the device
            memory.train_loss[slot] = tally.loss
        synchronize(task.device)

    def aggregate(self, cohort: Sequence[int], round: int) -> Account:
        """Move the global row along the aggregate of the cohort's updates."""
        meeting = self._whole_cohort(cohort, round)
        account = self._average(meeting)
        self._combine_buffers(meeting)
        return account

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> Account:
        """Synchronous SGD: at every step the cohort's gradients are aggregated and ONE optimizer step is taken.

        The rows hold gradients here, all of them at the global row. A worker whose data is used up is left out of
        the steps that remain.
        """
        members = self._members_at_the_global_row(cohort, round)
        account = RoundAccount(cohort)
        for step, meeting in enumerate(self._meetings(cohort, round)):
            for member in members:
                if member.slot in meeting.slots or member.worker == self.root:
                    with self.seat.working_on(member.worker, round):
                        self._gradient(member, round, step)
            account.add(meeting, self._average(meeting))
        for member in members:
            with self.seat.working_on(member.worker, round):
                member.module.give(self.memory.buffers[member.slot])
            self.memory.train_loss[member.slot] = member.loss_sum.item() / member.samples
        self._combine_buffers(self._whole_cohort(cohort, round))
        return account.total()

    def test(self) -> None:
        """Test the global model on this process's share of the test batches."""
        task, memory = self.task, self.memory
        self.module.take(memory.global_row, self.gradient, memory.global_buffers)
        size = test_batch_size(task.device)
        batches = range(self.seat.index, len(memory.test_sums), self.seat.count)
        sums = []
        for batch in batches:
            self.seat.beat()
            positions = torch.arange(batch * size, min((batch + 1) * size, len(memory.test)))
            inputs, targets = memory.test.gather(positions)
            tally = test(self.module.module, [(inputs, targets)])
            sums.append(torch.stack([tally.loss_sum, tally.correct, *self._towards_goal(inputs, targets)]))
        if sums:
            memory.test_sums[list(batches)] = torch.stack(sums).cpu()

    def _towards_goal(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of a test batch: how many answers are as the attacker wants them, and how many he wants."""
        task, none = self.task, torch.zeros((), dtype=wide_dtype(self.task.device), device=self.task.device)
        if task.attack.goal is None or not task.byzantine:
            return none, none
        inputs, targets = task.attack.goal(inputs, targets, self.memory.classes)
        if not len(targets):
            return none, none
        return test(self.module.module, [(inputs, targets)]).correct, none + len(targets)

    def _loss_on_shard(self, worker: int) -> float:
        """Mean loss of the row that the module is bound to, on a worker's own samples."""
        shard = CustomSubset(self.memory.train, self.memory.shard_of(worker))
        return test(self.module.module, shard.batches(test_batch_size(self.task.device))).loss

    def _everyone(self, cohort: Sequence[int]) -> list[int]:
        """Who trains: the cohort, and the server on its own data where the rule compares with that."""
        return [*cohort] if self.root is None else [*cohort, self.root]

    def _whole_cohort(self, cohort: Sequence[int], round: int) -> Meeting:
        weights = self.averaging.weights(cohort, self._shard_sizes(cohort))
        return Meeting(range(len(cohort)), list(cohort), weights, (round,))

    def _mine(self, cohort: Sequence[int]) -> list[int]:
        """The slots of the cohort that this process trains."""
        steps = [self.task.schedule.steps_for(n) for n in self._shard_sizes(cohort)]
        return deal(steps, self.seat.count)[self.seat.index]

    def _shard_sizes(self, cohort: Sequence[int]) -> list[int]:
        return [self.shard_sizes[worker] for worker in cohort]

    def _members_at_the_global_row(self, cohort: Sequence[int], round: int) -> list[Member]:
        """This process's members of the cohort, each with a module at the global row and a row for its gradient."""
        everyone = self._everyone(cohort)
        slots, memory, device = self._mine(everyone), self.memory, self.task.device
        while len(self._modules) < len(slots):
            self._modules.append(RowModule(self.task.new_module))
        members = []
        for slot, module in zip(slots, self._modules, strict=False):
            module.take(memory.global_row, self.rows[slot], memory.buffers[slot])
            module.module.train()
            loss_sum = torch.zeros((), dtype=wide_dtype(device), device=device)
            members.append(Member(slot, everyone[slot], module, self._batches(everyone[slot], round), loss_sum))
        return members

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

    def _gradient(self, member: Member, round: int, step: int) -> None:
        """The gradient of a member's next batch, into its row."""
        inputs, targets = next(member.batches)
        seed_everything(self.task.device, self.task.seed, "layers", round, member.worker, step)
        self.rows[member.slot].zero_()
        loss = backward(member.module.module, inputs, targets)
        if self.task.rule.takes("losses"):
            self.memory.losses[member.slot] = loss.item()
        member.loss_sum.add_(loss, alpha=len(targets))
        member.samples += len(targets)

    def _average(self, meeting: Meeting) -> Account:
        """Between two crossings of the barrier, each process moves its own columns of the global row."""
        self._meet()
        account = self.averaging.move_global_row(meeting)
        self._meet()
        return account

    def _combine_buffers(self, meeting: Meeting) -> None:
        """One process does that, when all have given theirs."""
        self.seat.barrier.wait()
        if self.seat.index == 0:
            self.averaging.combine_buffers(meeting)
            synchronize(self.task.device)

    def _meet(self) -> None:
        synchronize(self.task.device)
        self.seat.barrier.wait()

    def _batches(self, worker: int, round: int) -> Batches:
        """The batches of one worker's round: its shard in a new order for each epoch it lasts."""
        task, memory = self.task, self.memory
        shard = CustomSubset(memory.train, memory.shard_of(worker))
        batches = self._endless_batches(shard, worker, round)
        if task.sync == "gradients" and worker == self.root:
            return batches  # the server goes on as long as anybody does
        return islice(batches, task.schedule.steps_for(len(shard)))

    def _endless_batches(self, shard: CustomSubset, worker: int, round: int) -> Batches:
        task, memory = self.task, self.memory
        orders = numpy_generator(task.seed, "batches", round, worker)
        augmentation = torch_generator(task.seed, "augment", round, worker)
        view = task.transforms[worker] if worker != self.root else None
        poison = task.attack.poison if worker in task.byzantine else None
        poisoning = numpy_generator(task.seed, "poison", round, worker)
        while True:
            for inputs, targets in shard.batches(task.schedule.batch_size, orders.permutation(len(shard))):
                self.seat.beat()
                if view is not None:
                    inputs = view(images=inputs, generator=augmentation)
                for augment in task.augment:
                    inputs = augment(images=inputs, generator=augmentation)
                if poison is not None:
                    inputs, targets = poison(inputs, targets, memory.classes, poisoning)
                yield inputs, targets


def deal(costs: Sequence[int], count: int) -> list[list[int]]:
    """Deal things to `count` hands, the costliest first and always to the least burdened; each hand ascending.

    The same for every caller with the same costs.
    """
    hands: list[list[int]] = [[] for _ in range(count)]
    burden = [0] * count
    for thing in sorted(range(len(costs)), key=lambda thing: -costs[thing]):
        hand = burden.index(min(burden))
        hands[hand].append(thing)
        burden[hand] += costs[thing]
    return [sorted(hand) for hand in hands]
