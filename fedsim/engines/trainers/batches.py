"""Training and test batches of each worker. Their order and augmentation do not depend on the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsim.core.philox import Stream, shuffles
from fedsim.core.randomness import Draws, draw_key, numpy_generator, torch_generator
from fedsim.data import CustomSubset
from fedsim.data.augmentation import ImageTransform
from fedsim.data.tensors import in_order
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask

SAMPLES_AT_ONCE = 2**17  # maximum number of samples that are shuffled at once, over workers and epochs
EPOCHS_AT_ONCE = 64  # maximum number of epochs per worker that are shuffled at once

Epoch = tuple[int, int, int]  # (worker, round, epoch number within the round)

Batches = Iterator[tuple[Tensor, Tensor]]
Alteration = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # (inputs, targets, step) -> (inputs, targets)


class WorkItem(NamedTuple):
    """A worker, and the steps of its round that a trainer must train.

    Attributes:
        slot: index of the row that contains the worker's parameters.
        worker: worker ID.
        round: number of the worker's round.
        steps: number of steps to train, from the first step of the round; None for all steps of the round.
        step: number of the only step to train, from 0, if single steps are trained; otherwise None.
        ends: whether the worker's round ends after these steps. The client algorithm's `finish` is then called.
        stack: number of the stack of workers that are trained at once, if workers are trained in stacks.
    """

    slot: int
    worker: int
    round: int
    steps: int | None = None
    step: int | None = None
    ends: bool = True
    stack: int = 0

    @property
    def moment(self) -> tuple[int, ...]:
        """Key for random numbers: (round,), or (round, step) if only one step is trained."""
        return (self.round,) if self.step is None else (self.round, self.step)


class RoundIterator:
    """Iterator over the batches of a worker's round. Each batch is a tensor of indices into the dataset.

    Attributes:
        round: number of the round.
        steps_done: number of batches that the iterator has returned so far.
        alter: function that augments or poisons the samples of a batch; None to leave them unchanged.
    """

    def __init__(self, round: int, positions: Iterator[Tensor], alter: Alteration | None) -> None:
        self.round, self.steps_done, self.alter = round, 0, alter
        self._positions = positions

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        self.steps_done += 1
        return next(self._positions)


class BatchSource:
    """Source of all workers' batches. The samples are shuffled in each epoch, and augmented or poisoned.

    Attributes:
        root: worker ID that stands for the server's own samples; None if the rule does not use such samples.
    """

    def __init__(self, task: RunTask, shared: SharedState) -> None:
        self._task, self._shared = task, shared
        self._iterators: dict[int, RoundIterator] = {}  # by worker, for workers that train step by step
        self._coming: list[tuple[int, int]] = []  # announced (worker, round) pairs that are not shuffled yet
        self._drawn: dict[Epoch, Tensor] = {}  # shuffled positions of coming epochs
        self._shards = self._shards_on_host = torch.zeros(0, dtype=torch.int64)
        self.root = (
            len(shared.data.shards) if task.experiment.rule.accepts("root") else None
        )  # worker ID of the server's own data set

    def size(self, worker: int) -> int:
        """Return the number of samples of a worker."""
        return len(self._shared.data.root) if worker == self.root else self._shared.data.shards.size(worker)

    def steps(self, worker: int, round: int) -> int:
        """Return the number of steps of a worker in `round`.

        For the server's own samples in synchronous SGD, the number is `sys.maxsize`: the server trains until the last
        worker has finished.
        """
        if worker == self.root and self._task.sync_in(round) == "gradients":
            return sys.maxsize
        return self._task.schedule.of(worker, round).steps_for(self.size(worker))

    def steps_of_epoch(self, worker: int) -> int:
        """Return the number of steps in one pass over a worker's samples."""
        return self._task.schedule.batches_per_epoch(self.size(worker))

    def steps_of(self, member: WorkItem) -> int:
        """Return the number of steps that `member` trains."""
        if member.step is not None:
            return 1
        return self.steps(member.worker, member.round) if member.steps is None else member.steps

    def shard(self, worker: int) -> CustomSubset:
        """Return the training samples of a worker, in the order of the dataset."""
        positions = self._shared.data.root if worker == self.root else self._shared.data.shards.of(worker)
        return CustomSubset(self._shared.data.train, positions)

    def batches(self, worker: int, round: int) -> Batches:
        """Yield training batches (inputs, targets) of a worker, shuffled in each epoch. The sequence does not end."""
        train, size = self._shared.data.train, self._task.schedule.batch_size
        epochs = (CustomSubset(train, positions).batches(size) for positions in self.epochs(worker, round))
        return _altered(chain.from_iterable(epochs), self.alteration(worker, round))

    def batches_of(self, member: WorkItem) -> Batches:
        """Yield the training batches (inputs, targets) of `member`."""
        if member.step is None:
            yield from islice(self.batches(member.worker, member.round), self.steps_of(member))
        else:  # gather only this batch; the next one may never be needed
            iterator = self.iterator_of(member)
            yield from _altered([self._shared.data.train.gather(next(iterator))], iterator.alter, member.step)

    def iterator_of(self, member: WorkItem) -> RoundIterator:
        """Return an iterator over the batches of `member`, beginning at its first step."""
        worker, round = member.worker, member.round
        iterator = self._iterators.get(worker) if member.step is not None else None
        if iterator is None or iterator.round != round or iterator.steps_done != member.step:
            iterator = RoundIterator(round, self.positions(worker, round), self.alteration(worker, round))
        if member.step is not None:
            while iterator.steps_done < member.step:
                next(iterator)
            self._iterators[worker] = iterator
        return iterator

    def positions(self, worker: int, round: int) -> Iterator[Tensor]:
        """Yield a worker's batches as tensors of indices into the dataset, int64 [batch]. The sequence does not end."""
        for positions in self.epochs(worker, round):
            yield from positions.split(self._task.schedule.batch_size)

    def epochs(self, worker: int, round: int) -> Iterator[Tensor]:
        """Yield a worker's shuffled sample indices, int64 [samples], for one epoch after another, without end.

        With `drop_last`, an incomplete last batch is left out.
        """
        epoch = 0
        while True:
            end = min(2 * epoch, epoch + EPOCHS_AT_ONCE, self._epochs_of(worker, round))
            orders = self.orders([(worker, round, number) for number in range(epoch, max(end, epoch + 1))])
            yield from orders
            epoch += len(orders)

    def announce(self, members: Sequence[WorkItem]) -> None:
        """Announce which workers are trained next, so that the samples of all of them can be shuffled at once."""
        self._coming = [(member.worker, member.round) for member in members if not member.step]
        self._drawn = {}

    def orders(self, wanted: Sequence[Epoch]) -> list[Tensor]:
        """Return the shuffled sample indices of each epoch in `wanted`, a list of (worker, round, epoch)."""
        if not all(epoch in self._drawn for epoch in wanted):
            self._drawn |= self._draw([*dict.fromkeys([*wanted, *self._take_coming()])])
        return [self._drawn.pop(epoch) for epoch in wanted]

    def _take_coming(self) -> Iterator[Epoch]:
        """Remove the next epochs to be shuffled from the announced ones, and yield each as (worker, round, epoch)."""
        room = SAMPLES_AT_ONCE
        while self._coming:
            worker, round = self._coming[0]
            epochs = min(EPOCHS_AT_ONCE, self._epochs_of(worker, round))
            room -= epochs * self.size(worker)
            if room < 0:
                return
            del self._coming[0]
            yield from ((worker, round, epoch) for epoch in range(epochs))

    def _epochs_of(self, worker: int, round: int) -> int:
        """Return the number of epochs that a worker begins in a round, including an unfinished last epoch."""
        return -(-self.steps(worker, round) // self._task.schedule.batches_per_epoch(self.size(worker)))

    def _draw(self, wanted: Sequence[Epoch]) -> dict[Epoch, Tensor]:
        """Shuffle the `wanted` epochs, given as (worker, round, epoch), and return their sample indices by epoch."""
        task = self._task
        workers = [worker for worker, *_ in wanted]
        keys = [draw_key(task.experiment.seed, "batches", round, worker) for worker, round, _ in wanted]
        sizes = [self.size(worker) for worker in workers]
        shards, starts = self.shards_of(workers)
        lengths = [size + size % 2 for size in sizes]
        blocks = [0, *accumulate(length // 2 for length in lengths)]
        table = torch.tensor([keys, [epoch for *_, epoch in wanted], sizes, blocks[:-1], starts]).to(task.device)
        places, of_entry = shuffles(Stream(table[0], table[1]), table[2], table[3], blocks[-1])
        positions = shards[(table[4][of_entry] + places).clamp_(max=len(shards) - 1)].split(lengths)
        counts = map(task.schedule.samples_per_epoch, sizes)
        return {epoch: order[:count] for epoch, order, count in zip(wanted, positions, counts, strict=True)}

    def shards_of(self, workers: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return one tensor of sample indices, and the position in this tensor where each worker's indices begin."""
        of_workers = [worker for worker in workers if worker != self.root]
        root = self._shared.data.root.to(self._task.device)
        if not of_workers:
            return root, [0] * len(workers)
        positions, starts = self._shared.data.shards.together(of_workers)
        if positions is not self._shards_on_host:
            self._shards_on_host, self._shards = positions, positions.to(self._task.device)
        if len(starts) == len(workers):
            return self._shards, starts
        of_worker = dict(zip(of_workers, starts, strict=True))
        return torch.cat([self._shards, root]), [of_worker.get(worker, len(self._shards)) for worker in workers]

    def samples_seen(self, worker: int, round: int, batch_size: int, purpose: str = "losses") -> Batches:
        """Yield batches that contain each training sample of a worker once, without augmentation.

        Different names `purpose` give different random numbers.
        """
        return _altered(self.shard(worker).batches(batch_size), self.alteration_of_view(worker, round, purpose))

    def test_samples(self, worker: int, round: int, batch_size: int) -> Batches:
        """Yield batches of a worker's local test samples."""
        samples = CustomSubset(self._shared.data.train, self._shared.data.worker_tests.of(worker))
        return _altered(samples.batches(batch_size), self.alteration_of_view(worker, round, "local_test_fraction"))

    def alteration(self, worker: int, round: int) -> Alteration | None:
        """Return the function that augments and poisons a worker's training batches; None if they do not change."""
        return self._alteration(worker, round, self._task.experiment.data.transforms, ("augment", "poison"))

    def alteration_of_view(self, worker: int, round: int, purpose: str) -> Alteration | None:
        """Return the function that transforms and poisons a worker's batches, without augmentation.

        Returns None if the batches do not change. Different names `purpose` give different random numbers.
        """
        return self._alteration(worker, round, (), (f"{purpose}_view", f"{purpose}_poison"))

    def _alteration(
        self, worker: int, round: int, augment: Sequence[ImageTransform], purposes: tuple[str, str]
    ) -> Alteration | None:
        """Return the function that transforms, augments and poisons a worker's batches; None if there is nothing to do.

        Args:
            worker: worker ID.
            round: number of the round.
            augment: augmentations to apply.
            purposes: two names that select the random numbers of the transforms and of the poisoning.
        """
        task, attack, classes = self._task, self._task.experiment.attack.component, self._shared.data.classes
        view = task.transforms[worker] if task.transforms is not None and worker != self.root else None
        poison = attack.poison if worker in task.byzantine.in_round(round) else None
        transforms = [*augment] if view is None else [ImageTransform.of(view), *augment]
        if poison is None and not transforms:
            return None
        taken = {name for transform in transforms for name in transform.takes}
        for_transforms = self._random(taken, purposes[0], round, worker)
        normalisation = self._shared.data.train.normalisation if "normalisation" in taken else None
        for_poison = self._random(attack.poison_accepts if poison else (), purposes[1], round, worker)

        def alter(inputs: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
            arguments: dict[str, Any] = {name: at(step) for name, at in for_transforms.items()}
            arguments["normalisation"] = normalisation
            for transform in transforms:
                inputs = transform(inputs, arguments)
            if poison is not None:
                arguments = {name: at(step) for name, at in for_poison.items()}
                arguments |= {"inputs": inputs, "targets": targets, "classes": classes}
                inputs, targets = poison(**{name: arguments[name] for name in attack.poison_accepts})
            return in_order(inputs), targets

        return alter

    def _random(self, taken: Collection[str], purpose: str, round: int, worker: int) -> dict[str, Callable[[int], Any]]:
        """Return functions that create the random arguments of a transform or an attack, by argument name.

        Each function takes the number of the step in the round, and returns the argument.

        Args:
            taken: argument names of the transform or attack. Only "draws", "generator" and "rng" are random arguments.
            purpose, round, worker: name, round and worker ID that seed the random numbers.
        """
        drawn, sources = (self._task.experiment.seed, purpose, round, worker), dict[str, Callable[[int], Any]]()
        if "draws" in taken:
            sources["draws"] = Draws.of(*drawn, device=self._task.device).steps()
        if "generator" in taken:
            sources["generator"] = lambda step: torch_generator(*drawn, step)
        if "rng" in taken:
            sources["rng"] = lambda step: numpy_generator(*drawn, step)
        return sources


def _altered(batches: Iterable[tuple[Tensor, Tensor]], alter: Alteration | None, first: int = 0) -> Batches:
    """Yield the batches after calling `alter(inputs, targets, step)` on each. If `alter` is None, they do not change.

    The step of the first batch is `first`.
    """
    for step, (inputs, targets) in enumerate(batches, first):
        yield alter(inputs, targets, step) if alter else (inputs, targets)
