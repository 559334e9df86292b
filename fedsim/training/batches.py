"""Training and test batches of each worker. Their order and augmentation do not depend on the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.schedule import Schedule
from fedsim.config.schema import OWN
from fedsim.core.model_inputs import Inputs, on_each, on_image
from fedsim.core.philox import Stream, shuffles
from fedsim.core.randomness import Draws, draw_keys, numpy_generator, torch_generator
from fedsim.data import CustomSubset, TensorData
from fedsim.data.augmentation import ImageTransform
from fedsim.data.tensors import in_order
from fedsim.system.devices import to_device
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

SAMPLES_AT_ONCE = 2**17  # maximum number of samples that are shuffled at once, over workers and epochs
EPOCHS_AT_ONCE = 64  # maximum number of epochs per worker that are shuffled at once
LOSSES, LOCAL_TESTS = "losses", "local_test_fraction"  # purposes of samples that are not trained on

Batches = Iterator[tuple[Inputs, Tensor]]
Alteration = Callable[[Inputs, Tensor, int], tuple[Inputs, Tensor]]  # (inputs, targets, step) -> (inputs, targets)


class WorkItem(NamedTuple):
    """A worker, and the steps of its round that a trainer must run.

    Attributes:
        slot: position of the worker in the cohort, which is the index of its data in the tensors of the cohort.
        worker: worker ID.
        round: number of the worker's round.
        steps: number of steps to train, from the first step of the round; None for all steps of the round.
        step: number (from 0) of the step, if the item is a single step of the round; otherwise None.
        ends: whether the worker's round ends after these steps. The client algorithm's `finish` is then called.
        stack: index of the stack, the workers that are trained in one batched call; 0 if there are no stacks.
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

    def steps_for(self, schedule: Schedule, n_samples: int) -> int:
        """Return the number of steps to train. `schedule` has the steps of a whole round with `n_samples` samples."""
        if self.step is not None:
            return 1
        return schedule.of(self.worker, self.round).steps_for(n_samples) if self.steps is None else self.steps


@dataclass(frozen=True, eq=False)
class WorkItems(Sequence[WorkItem]):
    """Several work items, as one array for each field of `WorkItem`.

    Attributes:
        slots, workers, rounds, stacks: as in `WorkItem`, int64 [n].
        sizes: number of training samples of each worker, int64 [n].
        steps: number of steps to train, int64 [n].
        step: number of the only step to train, or -1 to train from the first step of the round, int64 [n].
        ends: whether the workers' rounds end after these steps.
    """

    slots: np.ndarray
    workers: np.ndarray
    rounds: np.ndarray
    stacks: np.ndarray
    sizes: np.ndarray
    steps: np.ndarray
    step: np.ndarray
    ends: bool = True

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[WorkItem]:
        return starmap(self._item, zip(*(column.tolist() for column in self._columns), strict=True))

    def __getitem__(self, index: Any) -> Any:
        """Return the work item at an integer index, or the `WorkItems` that a slice or an index array selects."""
        if isinstance(index, int):
            return self._item(*(int(column[index]) for column in self._columns))
        return replace(self, **{name: array[index] for name, array in vars(self).items() if name != "ends"})

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.slots, self.workers, self.rounds, self.steps, self.step, self.stacks

    def _item(self, slot: int, worker: int, round: int, steps: int, step: int, stack: int) -> WorkItem:
        by_step = step >= 0
        return WorkItem(slot, worker, round, None if by_step else steps, step if by_step else None, self.ends, stack)

    @property
    def first(self) -> np.ndarray:
        """Number of the first step that each work item trains, counted from 0 in the worker's round, int64 [n].

        It is `step` for an item that trains a single step of the round, and 0 for an item that trains from the start.
        """
        return np.maximum(self.step, 0)

    @property
    def round(self) -> int:
        """Number of the round, or of the first worker's round if the rounds differ."""
        return int(self.rounds[0])


class Orders(NamedTuple):
    """Shuffled sample indices of several epochs of n workers, in one tensor.

    Attributes:
        positions: indices into the dataset, int64, on the device.
        begins: where each worker's first epoch begins in `positions`, int64 [n].
        lengths: distance in `positions` between the starts of consecutive epochs of a worker, int64 [n].
    """

    positions: Tensor
    begins: np.ndarray
    lengths: np.ndarray


class WorkerSamples(NamedTuple):
    """Samples of n workers, in the order of the data set.

    Attributes:
        data: data set.
        positions: indices into the data set, int64, on the device.
        begins: where each worker's samples begin in `positions`, int64 [n].
        sizes: number of samples of each worker, int64 [n].
    """

    data: TensorData
    positions: Tensor
    begins: np.ndarray
    sizes: np.ndarray


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
        rule = task.experiment.rule
        self.root = len(shared.data.shards) if rule.accepts("root") else None
        self._iterators: dict[int, RoundIterator] = {}  # by worker, for workers that train step by step
        self._coming: Sequence[WorkItem] = []  # announced workers whose samples are not shuffled yet
        self._drawn: dict[tuple[int, int], list[Tensor]] = {}  # the first epochs, by worker and round
        self._shards = self._shards_on_host = torch.zeros(0, dtype=torch.int64)

    def size(self, worker: int) -> int:
        """Return the number of samples of a worker."""
        return len(self._shared.data.root) if worker == self.root else self._shared.data.shards.size(worker)

    def sizes(self, workers: np.ndarray) -> np.ndarray:
        """Return the number of samples of each of n `workers`, int64 [n]."""
        shards = self._shared.data.shards
        if self.root is None or not (is_root := workers == self.root).any():
            return shards.sizes(workers)
        return np.where(is_root, len(self._shared.data.root), shards.sizes(np.where(is_root, 0, workers)))

    def work(self, members: Sequence[WorkItem]) -> WorkItems:
        """Convert a sequence of work items to `WorkItems`."""
        if isinstance(members, WorkItems):
            return members
        items = [
            (item.slot, item.worker, item.round, item.stack, *(-1 if n is None else n for n in (item.steps, item.step)))
            for item in members
        ]
        *columns, steps, step = np.array(items, dtype=np.int64).reshape(-1, 6).T
        work, ends = self.rounds_of(*columns), all(item.ends for item in members)
        return replace(work, steps=np.where(step >= 0, 1, np.where(steps < 0, work.steps, steps)), step=step, ends=ends)

    def rounds_of(self, slots: np.ndarray, workers: np.ndarray, rounds: np.ndarray, stacks: np.ndarray) -> WorkItems:
        """Return the `WorkItems` of workers that train all steps of their rounds."""
        sizes = self.sizes(workers)
        steps = self._task.schedule.of(workers, rounds).steps_for(sizes)
        return WorkItems(slots, workers, rounds, stacks, sizes, steps, np.full(len(slots), -1))

    def steps(self, worker: int, round: int) -> int:
        """Return the number of steps of a worker in `round`.

        For the server's own samples in synchronous SGD, the number is `sys.maxsize`: the server trains until the last
        worker has finished.
        """
        if worker == self.root and self._task.sync_in(round) == "gradients":
            return sys.maxsize
        return self._task.schedule.of(worker, round).steps_for(self.size(worker))

    def steps_of(self, member: WorkItem) -> int:
        """Return the number of steps that `member` trains."""
        return member.steps_for(self._task.schedule, self.size(member.worker))

    def shard(self, worker: int) -> CustomSubset:
        """Return the training samples of a worker, in the order of the dataset."""
        positions = self._shared.data.root if worker == self.root else self._shared.data.shards.of(worker)
        return CustomSubset(self._shared.data.train, to_device(positions, self._task.device))

    def batches(self, worker: int, round: int) -> Batches:
        """Yield training batches (inputs, targets) of a worker, shuffled in each epoch. The sequence does not end."""
        train, size = self._shared.data.train, self._task.schedule.of(worker, round).batch_size
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
            yield from positions.split(self._task.schedule.of(worker, round).batch_size)

    def epochs(self, worker: int, round: int) -> Iterator[Tensor]:
        """Yield a worker's shuffled sample indices, int64 [samples], for one epoch after another, without end.

        With `drop_last`, an incomplete last batch is left out.
        """
        if (worker, round) not in self._drawn:
            self._draw_coming()
        orders, epoch = self._drawn.pop((worker, round), []), 0
        while True:
            if not orders:
                work = self.work([WorkItem(0, worker, round)])
                end = min(2 * epoch, epoch + EPOCHS_AT_ONCE, int(self.epochs_of(work)[0]))
                orders = self._by_epoch(work, np.array([epoch]), np.array([max(end, epoch + 1)]))[0]
            yield from orders
            epoch, orders = epoch + len(orders), []

    def announce(self, members: Sequence[WorkItem]) -> None:
        """Announce which workers are trained next, so that the samples of all of them can be shuffled at once."""
        self._coming, self._drawn = members, {}

    def _draw_coming(self) -> None:
        """Shuffle the first epochs of the next announced workers, at most `SAMPLES_AT_ONCE` samples in total."""
        if not self._coming:
            return
        coming = self.work(self._coming)
        coming = coming[coming.step <= 0]
        epochs = np.minimum(EPOCHS_AT_ONCE, self.epochs_of(coming))
        count = int(((epochs * coming.sizes).cumsum() <= SAMPLES_AT_ONCE).sum())
        work, self._coming = coming[:count], coming[count:]
        if count:
            orders = self._by_epoch(work, np.zeros(count, dtype=np.int64), epochs[:count])
            self._drawn |= zip(zip(work.workers.tolist(), work.rounds.tolist(), strict=True), orders, strict=True)

    def epochs_of(self, work: WorkItems) -> np.ndarray:
        """Return the number of epochs that each worker trains, rounded up, int64 [n]."""
        return -(-work.steps // self._task.schedule.of(work.workers, work.rounds).batches_per_epoch(work.sizes))

    def _by_epoch(self, work: WorkItems, begin: np.ndarray, end: np.ndarray) -> list[list[Tensor]]:
        """Return a list of tensors for each worker: the shuffled sample indices of its epochs `begin` to `end` - 1."""
        positions, _, lengths = self.orders(work, begin, end)
        counts, schedule = end - begin, self._task.schedule.of(work.workers, work.rounds)
        sizes = schedule.samples_per_epoch(work.sizes)
        epochs = iter(positions.split(np.repeat(lengths, counts).tolist()))
        pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
        return [[order[:size] for order in islice(epochs, count)] for size, count in pairs]

    def orders(self, work: WorkItems, begin: np.ndarray, end: np.ndarray) -> Orders:
        """Shuffle the samples of n workers for the epochs `begin` to `end` - 1 of their rounds (int64 [n] each)."""
        counts, lengths = end - begin, work.sizes + work.sizes % 2
        of_worker = np.repeat(np.arange(len(work)), counts)
        ends, taken = counts.cumsum(), (lengths // 2)[of_worker]
        epochs = np.arange(len(of_worker)) - (ends - end)[of_worker]
        shards, starts = self.shards_of(work.workers)
        keys = draw_keys(self._task.experiment.seed, "batches", work.rounds, work.workers)
        columns = keys[of_worker], epochs, work.sizes[of_worker], taken.cumsum() - taken, starts[of_worker]
        table = to_device(torch.from_numpy(np.stack(columns)), self._task.device)
        taken_at, of_entry = shuffles(Stream(table[0], table[1]), table[2], table[3], int(taken.sum()))
        positions = shards[(table[4][of_entry] + taken_at).clamp_(max=len(shards) - 1)]
        return Orders(positions, (lengths * counts).cumsum() - lengths * counts, lengths)

    def shards_of(self, workers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return one tensor of sample indices, and the position in this tensor where each worker's indices begin."""
        is_root = np.zeros(len(workers), dtype=bool) if self.root is None else workers == self.root
        root = to_device(self._shared.data.root, self._task.device)
        if is_root.all():
            return root, np.zeros(len(workers), dtype=np.int64)
        positions, begins = self._shared.data.shards.together(workers[~is_root])
        if positions is not self._shards_on_host:
            self._shards_on_host, self._shards = positions, to_device(positions, self._task.device)
        if not is_root.any():
            return self._shards, begins
        starts = np.full(len(workers), len(self._shards))
        starts[~is_root] = begins
        return torch.cat([self._shards, root]), starts

    def samples_seen(self, worker: int, round: int, batch_size: int, purpose: str = LOSSES) -> Batches:
        """Yield batches that contain each training sample of a worker once, without augmentation.

        `purpose` names the use of the samples. Random numbers, as in the poisoning of samples, depend on this name.
        """
        return _altered(self.shard(worker).batches(batch_size), self.alteration(worker, round, purpose))

    def test_samples(self, worker: int, round: int, batch_size: int) -> Batches:
        """Yield batches of the local test samples of a worker, or of a data owner without training samples."""
        positions = to_device(self._shared.data.worker_tests.of(worker), self._task.device)
        samples = CustomSubset(self._data_of_tests, positions)
        return _altered(samples.batches(batch_size), self.alteration(worker, round, LOCAL_TESTS))

    @property
    def _data_of_tests(self) -> TensorData:
        own = self._task.experiment.data.local_test_fraction == OWN
        return self._shared.data.own_tests if own else self._shared.data.train

    def samples_of(self, workers: np.ndarray, purpose: str) -> WorkerSamples:
        """Return the samples that `samples_seen` or `test_samples` yields for each of n `workers`."""
        if purpose != LOCAL_TESTS:
            return WorkerSamples(self._shared.data.train, *self.shards_of(workers), self.sizes(workers))
        tests = self._shared.data.worker_tests
        positions, begins = tests.together(workers)
        sizes = tests.sizes(workers)
        return WorkerSamples(self._data_of_tests, to_device(positions, self._task.device), begins, sizes)

    def alterations(self, work: Sequence[WorkItem], purpose: str | None = None) -> list[Alteration | None]:
        """Return, for each worker, a function that changes the worker's batches, or None (see `alteration`).

        The list is empty if no worker's batches change.
        """
        task, augments = self._task, purpose is None and bool(self._task.experiment.data.transforms)
        poisons = bool(task.byzantine) and task.experiment.attack.component.poison is not None
        if not augments and not poisons and task.transforms is None:
            return []
        return [self.alteration(member.worker, member.round, purpose) for member in work]

    def alteration(self, worker: int, round: int, purpose: str | None = None) -> Alteration | None:
        """Return the function that transforms, augments and poisons a worker's batches; None if they do not change.

        Args:
            worker: worker ID.
            round: number of the round.
            purpose: name of the use of the batches, on which random numbers depend; None for training. Only training
                batches are augmented.
        """
        augment = self._task.experiment.data.transforms if purpose is None else []
        purposes = ("augment", "poison") if purpose is None else (f"{purpose}_view", f"{purpose}_poison")
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

        def alter(inputs: Inputs, targets: Tensor, step: int) -> tuple[Inputs, Tensor]:
            arguments: dict[str, Any] = {name: at(step) for name, at in for_transforms.items()}
            arguments["normalisation"] = normalisation
            for transform in transforms:
                inputs = on_image(transform.__call__, inputs, "partition.name: the transform", arguments)
            if poison is not None:
                arguments = {name: at(step) for name, at in for_poison.items()}
                arguments |= {"inputs": inputs, "targets": targets, "classes": classes}
                inputs, targets = poison(**{name: arguments[name] for name in attack.poison_accepts})
            return on_each(in_order, inputs), targets

        return alter

    def _random(self, taken: Collection[str], purpose: str, round: int, worker: int) -> dict[str, Callable[[int], Any]]:
        """Return functions that create the random arguments of a transform or an attack, by argument name.

        Each function takes the number of the step in the round, and returns the argument.

        Args:
            taken: argument names of the transform or attack, of which "draws", "generator" and "rng" are random.
            purpose, round, worker: name, round and worker ID that seed the random numbers.
        """
        seed, moment, sources = self._task.experiment.seed, (purpose, round, worker), dict[str, Callable[[int], Any]]()
        if "draws" in taken:
            sources["draws"] = Draws.of(*moment, seed=seed, device=self._task.device).steps()
        if "generator" in taken:
            sources["generator"] = lambda step: torch_generator(seed, *moment, step)
        if "rng" in taken:
            sources["rng"] = lambda step: numpy_generator(seed, *moment, step)
        return sources


def _altered(batches: Iterable[tuple[Inputs, Tensor]], alter: Alteration | None, first: int = 0) -> Batches:
    """Yield `alter(inputs, targets, step)` for each batch, or the unchanged batches if `alter` is None.

    `first` is the step number of the first batch.
    """
    for step, (inputs, targets) in enumerate(batches, first):
        yield alter(inputs, targets, step) if alter else (inputs, targets)
