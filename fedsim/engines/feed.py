"""What each worker sees, batch by batch: the same draws whoever asks, so that engines cannot come to differ in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedsim.data import CustomSubset
from fedsim.data.tensors import in_order
from fedsim.engines.job import Memory, Task
from fedsim.randomness import numpy_generator, torch_generator

LOOKED_AT = 50  # workers at most, to learn what is usual

Batches = Iterator[tuple[Tensor, Tensor]]
Alteration = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Feed:
    """The workers' samples in the order in which they meet them in a round, altered as the experiment has it."""

    def __init__(self, task: Task, memory: Memory) -> None:
        self._task, self._memory = task, memory
        self.root = len(memory.shards) if task.rule.takes("root") else None  # the server, as a worker

    def size(self, worker: int) -> int:
        """How many samples a worker has."""
        return len(self._memory.root) if worker == self.root else self._memory.shards.size(worker)

    def steps(self, worker: int, round: int) -> int:
        """How many steps a worker takes in a round; the server, in synchronous SGD, as many as anybody else."""
        if worker == self.root and self._task.sync_in(round) == "gradients":
            return sys.maxsize
        return self._task.schedule.steps_for(self.size(worker))

    def whole_batch(self) -> int:
        """How many samples most batches have: fewer than the schedule says where shards are smaller than that."""
        shards = self._memory.shards
        looked_at = range(0, len(shards), -(-len(shards) // LOOKED_AT))
        return min(self._task.schedule.batch_size, max(shards.size(worker) for worker in looked_at))

    def shard(self, worker: int) -> CustomSubset:
        """A worker's samples as they lie in the data set."""
        return CustomSubset(self._memory.train, self._positions_of(worker))

    def batches(self, worker: int, round: int) -> Batches:
        """A worker's batches without end: its shard, in a new order for each epoch."""
        shard, alter = self.shard(worker), self.alteration(worker, round)
        for order in self.orders(worker, round):
            for inputs, targets in shard.batches(self._task.schedule.batch_size, order):
                yield alter(inputs, targets) if alter else (inputs, targets)

    def positions(self, worker: int, round: int) -> Iterator[np.ndarray]:
        """The same batches as positions in the data set, before any alteration."""
        shard, size = self._positions_of(worker).numpy(), self._task.schedule.batch_size
        for order in self.orders(worker, round):
            positions = shard[order.numpy()]
            yield from (positions[start : start + size] for start in range(0, len(positions), size))

    def orders(self, worker: int, round: int) -> Iterator[Tensor]:
        """For each epoch of a worker's round the order of its samples: a permutation of their places in the shard."""
        orders, size = numpy_generator(self._task.seed, "batches", round, worker), self.size(worker)
        while True:
            yield torch.from_numpy(orders.permutation(size))

    def _positions_of(self, worker: int) -> Tensor:
        return self._memory.root if worker == self.root else self._memory.shards.of(worker)

    def alteration(self, worker: int, round: int) -> Alteration | None:
        """What becomes of a worker's batches, one after another, before it trains on them; None where nothing does."""
        task, classes = self._task, self._memory.classes
        view = task.transforms[worker] if task.transforms is not None and worker != self.root else None
        poison = task.attack.poison if worker in task.byzantine else None
        if view is None and poison is None and not task.augment:
            return None
        augmentation = torch_generator(task.seed, "augment", round, worker)
        poisoning = numpy_generator(task.seed, "poison", round, worker)

        def alter(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            if view is not None:
                inputs = view(images=inputs, generator=augmentation)
            for augment in task.augment:
                inputs = augment(images=inputs, generator=augmentation)
            if poison is not None:
                inputs, targets = poison(inputs, targets, classes, poisoning)
            return in_order(inputs), targets

        return alter
