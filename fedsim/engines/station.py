"""What one process does in a round. Every engine runs this code; they differ in how many processes run it, and where.

A station owns one module, which it binds to one row after another, and works on its share of what a call names: of
the cohort's members, of the columns, of the test batches. What it reads and writes lies in the engine's Memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.data import CustomSubset
from fedsim.devices import synchronize
from fedsim.engines.crew import Seat
from fedsim.engines.job import Memory, Task, test_batch_size
from fedsim.local import RowOptimizer
from fedsim.randomness import numpy_generator, seed_layers, torch_generator
from fedsim.rows import Layout, new_rows, pull_down
from fedsim.training import backward, test, train_epoch

Batches = Iterator[tuple[Tensor, Tensor]]


class Station:
    """One process's share of the work of an engine."""

    def __init__(self, seat: Seat, task: Task, memory: Memory) -> None:
        self.seat, self.task, self.memory = seat, task, memory
        self.module = task.new_module()
        self.layout = Layout.of(self.module)
        self.gradient = new_rows(1, self.layout.d, task.dtype, task.device)[0]
        self.shard_sizes = memory.shard_ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
        self._bound: tuple[int, int] | None = None

    def pull_down(self, cohort: Sequence[int]) -> None:
        """Give this process's members of the cohort the global model."""
        memory = self.memory
        for slot in self._mine(cohort):
            if self.task.sync == "parameters":
                pull_down(memory.global_row, memory.rows[slot])
            own = self.task.buffers == "local"
            memory.buffers[slot] = memory.own_buffers[cohort[slot]] if own else memory.global_buffers
        synchronize(self.task.device)

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train this process's members of the cohort, each on its own row and shard."""
        task, memory = self.task, self.memory
        tallies = {}
        for slot in self._mine(cohort):
            worker = cohort[slot]
            with self.seat.working_on(worker, round):
                self._bind(memory.rows[slot], self.gradient)
                self.layout.write_buffers(memory.buffers[slot], self.module)
                seed_layers(task.device, task.seed, round, worker)
                optimizer = RowOptimizer(task.solver, memory.rows[slot], self.gradient)
                tallies[slot] = train_epoch(self.module, self._batches(worker, round), optimizer, memory.loss)
                self.layout.read_buffers(self.module, out=memory.buffers[slot])
        for slot, tally in tallies.items():  # only now, because reading a number waits for the device
            memory.train_loss[slot] = tally.loss
        synchronize(task.device)

    def aggregate(self, cohort: Sequence[int]) -> None:
        """Average: turn the rows into updates and move the global row along their aggregate.

        Between two crossings of the barrier each process does its own columns.
        """
        self.seat.barrier.wait()
        self._move_global_row(list(range(len(cohort))), self._weights(cohort, self._shard_sizes(cohort)))
        if self.seat.index == 0:
            self._combine_buffers(cohort)
        synchronize(self.task.device)
        self.seat.barrier.wait()

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> None:
        """Synchronous SGD: at every step the cohort's gradients are aggregated and ONE optimizer step is taken.

        The rows hold gradients here, all of them at the global row. A worker whose data is used up is left out of
        the steps that remain.
        """
        task, memory = self.task, self.memory
        shard_sizes = self._shard_sizes(cohort)
        mine = self._mine(cohort)
        streams = {slot: self._batches(cohort[slot], round) for slot in mine}
        loss_sums = torch.zeros(len(cohort), dtype=torch.double, device=task.device)
        sizes: list[int] = []
        for step in range(max(map(task.schedule.steps_for, shard_sizes))):
            if sizes != (sizes := [task.schedule.batch_size_at(step, n) for n in shard_sizes]):
                active = [slot for slot, size in enumerate(sizes) if size]
                weights = self._weights([cohort[slot] for slot in active], [sizes[slot] for slot in active])
            for slot in mine:
                if sizes[slot]:
                    with self.seat.working_on(cohort[slot], round):
                        loss = self._gradient(slot, cohort[slot], round, step, next(streams[slot]))
                        loss_sums[slot].add_(loss, alpha=sizes[slot])
            synchronize(task.device)
            self.seat.barrier.wait()
            self._move_global_row(active, weights)
            synchronize(task.device)
            self.seat.barrier.wait()
        for slot in mine:
            memory.train_loss[slot] = loss_sums[slot].item() / task.schedule.samples_for(shard_sizes[slot])
        if self.seat.index == 0:
            self._combine_buffers(cohort)
        synchronize(task.device)

    def test(self) -> None:
        """Test the global model on this process's share of the test batches."""
        task, memory = self.task, self.memory
        self._bind(memory.global_row, self.gradient)
        self.layout.write_buffers(memory.global_buffers, self.module)
        size = test_batch_size(task.device)
        batches = range(self.seat.index, len(memory.test_sums), self.seat.count)
        sums = []
        for batch in batches:
            self.seat.beat()
            positions = torch.arange(batch * size, min((batch + 1) * size, len(memory.test)))
            tally = test(self.module, [memory.test.gather(positions)], memory.loss)
            sums.append(torch.stack([tally.loss_sum, tally.correct.double()]))
        if sums:
            memory.test_sums[list(batches)] = torch.stack(sums).cpu()

    def _mine(self, cohort: Sequence[int]) -> list[int]:
        """The slots of the cohort that this process trains."""
        steps = [self.task.schedule.steps_for(n) for n in self._shard_sizes(cohort)]
        return deal(steps, self.seat.count)[self.seat.index]

    def _shard_sizes(self, cohort: Sequence[int]) -> list[int]:
        return [self.shard_sizes[worker] for worker in cohort]

    def _bind(self, row: Tensor, gradient: Tensor) -> None:
        """Bind the module to these rows, unless it is: with one member to a process that is every step but one."""
        rows = row.data_ptr(), gradient.data_ptr()
        if self._bound != rows:
            self.layout.bind(self.module, row, gradient)
            self._bound = rows

    def _batches(self, worker: int, round: int) -> Batches:
        """The batches of one worker's round: its shard in a new order for each epoch it lasts."""
        task, memory = self.task, self.memory
        shard = CustomSubset(memory.train, memory.shard_of(worker))
        steps = task.schedule.steps_for(len(shard))
        return islice(self._endless_batches(shard, worker, round), steps)

    def _endless_batches(self, shard: CustomSubset, worker: int, round: int) -> Batches:
        task = self.task
        orders = numpy_generator(task.seed, "batches", round, worker)
        augmentation = torch_generator(task.seed, "augment", round, worker)
        while True:
            for inputs, targets in shard.batches(task.schedule.batch_size, orders.permutation(len(shard))):
                self.seat.beat()
                for augment in task.augment:
                    inputs = augment(inputs, augmentation)
                yield inputs, targets

    def _gradient(self, slot: int, worker: int, round: int, step: int, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The gradient of one batch at the global row, into the slot's row; returns the loss."""
        memory, row = self.memory, self.memory.rows[slot]
        self._bind(memory.global_row, row)
        self.layout.write_buffers(memory.buffers[slot], self.module)
        seed_layers(self.task.device, self.task.seed, round, worker, step)
        self.module.train()
        row.zero_()
        loss = backward(self.module, *batch, memory.loss)
        self.layout.read_buffers(self.module, out=memory.buffers[slot])
        return loss

    def _move_global_row(self, slots: list[int], weights: Tensor | None) -> None:
        """Aggregate this process's columns of the rows in `slots` and move the global row there."""
        task, memory = self.task, self.memory
        if task.rule.columnwise:
            blocks = list(column_blocks(self.layout.d, self.seat.index, self.seat.count))
        else:  # a rule that looks at whole rows is one process's work
            blocks = [slice(0, self.layout.d)] if self.seat.index == 0 else []
        for block in blocks:
            rows = memory.rows[:, block] if len(slots) == len(memory.rows) else memory.rows[slots, block]
            global_part = memory.global_row[block]
            if task.sync == "parameters":
                rows -= global_part
            state = {name: tensor[block] for name, tensor in memory.state.items()}
            task.stepper.step(global_part, task.rule(rows, weights), state)

    def _weights(self, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
        """The weights that the rule is given for these workers, or None for equal ones."""
        task = self.task
        if not task.rule.takes_weights:
            return None
        if task.weights == "uniform":
            return torch.ones(len(workers), dtype=torch.double, device=task.device) if task.rule.needs_weights else None
        values = samples if task.weights == "samples" else [task.weights[worker] for worker in workers]
        return torch.tensor(values, dtype=torch.double, device=task.device)

    def _combine_buffers(self, cohort: Sequence[int]) -> None:
        """What becomes of the cohort's buffers, by policy; the mean is weighted as the rows are."""
        memory, policy = self.memory, self.task.buffers
        if not self.layout.buffers or policy == "server":
            return
        if policy == "local":
            memory.own_buffers[list(cohort)] = memory.buffers
        weights = self._weights(cohort, self._shard_sizes(cohort))
        if weights is None:
            weights = torch.ones(len(cohort), dtype=torch.double, device=self.task.device)
        memory.global_buffers.copy_(weights / weights.sum() @ memory.buffers)


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
