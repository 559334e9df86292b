"""Containers for the shards of all workers: stored in one tensor, or drawn one by one on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.core.randomness import numpy_generator
from fedsim.data.partitions.allocation import NO_STRATA, Strata, draw_part, has_classes, samples_by_class
from fedsim.errors import ExperimentError

KEPT = 4096  # maximum number of drawn shards that a process caches, so that most are drawn only once per round


class Shards(ABC):
    """Container with the sample positions of every worker's shard.

    When a Shards object is sent to another process, its tensors are shared, not copied.

    Attributes:
        listed: whether all shards are stored, so that reading all of them is cheap.
        equal_sizes: whether all workers are known to have the same number of samples.
    """

    listed: ClassVar[bool]
    equal_sizes = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    def size(self, worker: int) -> int:
        """Return the number of samples in the shard of the worker with the ID `worker`."""

    def sizes(self, workers: np.ndarray) -> np.ndarray:
        """Return the number of samples of each of n `workers`, int64 [n]."""
        if self.equal_sizes and len(workers):
            return np.full(len(workers), self.size(int(workers[0])))
        return np.array([self.size(worker) for worker in workers.tolist()], dtype=np.int64)

    @abstractmethod
    def of(self, worker: int) -> Tensor:
        """Return the positions of a worker's samples in the data set, a read-only int64 CPU tensor [size]."""

    def together(self, workers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return one tensor with the sample positions of `workers`, and the index where each worker's part begins."""
        shards = [self.of(worker) for worker in workers.tolist()]
        return torch.cat(shards), np.cumsum([0, *map(len, shards)])[:-1]

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The tensors that an engine places in shared memory for its worker processes."""


class ListedShards(Shards):
    """Shards of all workers, stored one after another in one tensor.

    Args:
        positions: sample positions of worker 0, then of worker 1, and so on, int64.
        ends: where each worker's positions end in `positions`, int64 [workers].

    >>> shards = fedsim.data.ListedShards.of_arrays([np.array([4, 2]), np.array([0])])
    >>> shards.of(0), shards.size(1)
    (tensor([4, 2]), 1)
    """

    listed = True

    def __init__(self, positions: Tensor, ends: Tensor) -> None:
        self._positions, self._ends = positions, ends
        self._cuts = [0, *ends.tolist()]
        self._begins, self._sizes = np.array(self._cuts[:-1], dtype=np.int64), np.diff(self._cuts)

    def __reduce__(self) -> tuple[type[ListedShards], tuple[Tensor, Tensor]]:
        return ListedShards, (self._positions, self._ends)

    @classmethod
    def of_arrays(cls, shards: Sequence[np.ndarray]) -> ListedShards:
        """Build ListedShards from one int64 index array per worker."""
        sizes = [len(shard) for shard in shards]
        return cls(torch.from_numpy(np.concatenate(shards)), torch.from_numpy(np.cumsum(sizes)))

    def __len__(self) -> int:
        return len(self._ends)

    def size(self, worker: int) -> int:
        return self._cuts[worker + 1] - self._cuts[worker]

    def sizes(self, workers: np.ndarray) -> np.ndarray:
        return self._sizes[workers]

    def of(self, worker: int) -> Tensor:
        return self._positions[self._cuts[worker] : self._cuts[worker + 1]]

    def together(self, workers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the tensor with the positions of all workers, and the index where each part of `workers` begins."""
        return self._positions, self._begins[workers]

    @property
    def tensors(self) -> list[Tensor]:
        return [self._positions, self._ends]


class DrawnShards(Shards):
    """Shards of a virtual partition strategy, drawn on demand as a function of (seed, worker).

    At most KEPT drawn shards are cached.

    Args:
        name: the strategy's name, for error messages.
        strategy: function that returns one worker's sample positions. An optional method `size(worker)` returns their
            number without drawing them.
        takes: names of the inputs that `strategy` accepts, among labels, n_workers, rng, ids, worker and by_class.
        n_workers: number of workers.
        labels: class labels or other targets, [n]. A tensor is shared between processes.
        ids: dict from column name to the owner of each sample, [n], for a strategy with an input `ids`.
        seed: seed for all random draws.
    """

    listed = False

    def __init__(
        self,
        name: str,
        strategy: Callable[..., Any],
        takes: Collection[str],
        n_workers: int,
        labels: np.ndarray | Tensor,
        ids: Mapping[str, np.ndarray] | None = None,
        *,
        seed: int,
    ) -> None:
        self._name, self._strategy, self._takes = name, strategy, frozenset(takes)
        self._n_workers, self._seed, self._labels = n_workers, seed, labels
        self._ids = ids if "ids" in takes else None
        targets, self._by_class = np.asarray(labels), None
        if "by_class" in takes and has_classes(targets):
            self._by_class = ListedShards.of_arrays(samples_by_class(targets))  # each class as a shard
        self.equal_sizes = getattr(strategy, "equal_sizes", False)
        self._kept: dict[int, Tensor] = {}  # cached shards, the least recently used first

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __len__(self) -> int:
        return self._n_workers

    def size(self, worker: int) -> int:
        declared = self._declared_size(worker)
        return len(self.of(worker)) if declared is None else declared

    def of(self, worker: int) -> Tensor:
        shard = self._kept.pop(worker, None)
        if shard is None:
            shard = torch.from_numpy(self._draw(worker))
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[worker] = shard
        return shard

    @property
    def tensors(self) -> list[Tensor]:
        of_classes = self._by_class.tensors if self._by_class else []
        return [*of_classes, *([self._labels] if isinstance(self._labels, Tensor) else [])]

    def _declared_size(self, worker: int) -> int | None:
        size = getattr(self._strategy, "size", None)
        return None if size is None else int(size(worker))

    def _draw(self, worker: int) -> np.ndarray:
        classes = self._by_class
        values = {
            "labels": np.asarray(self._labels),  # converted on each draw, since sharing a tensor moves its memory
            "n_workers": self._n_workers,
            "rng": numpy_generator(self._seed, "partition", worker),
            "ids": self._ids,
            "worker": worker,
            "by_class": classes and [classes.of(number).numpy() for number in range(len(classes))],
        }
        drawn = self._strategy(**{name: values[name] for name in self._takes})
        shard = as_indices(drawn, worker, self._name)
        self._check(worker, shard)
        return shard

    def _check(self, worker: int, shard: np.ndarray) -> None:
        where = f'partition.name = "{self._name}"'
        n = len(self._labels)
        if shard.ndim != 1 or not len(shard):
            raise ExperimentError(
                f"{where}: must return a non-empty one-dimensional index array for each worker; the array for worker "
                f"{worker} has shape {shard.shape}"
            )
        if len(wrong := shard[(shard < 0) | (shard >= n)]):
            raise ExperimentError(
                f"{where}: the strategy returned index {wrong[0]} for worker {worker}; valid indices are 0 to {n - 1}"
            )
        declared = self._declared_size(worker)
        if declared not in (None, len(shard)):
            raise ExperimentError(
                f"{where}: returned {len(shard)} samples for worker {worker}, but the strategy's size({worker}) is "
                f"{declared}; both must be equal"
            )


def hold_out(shards: Shards, fraction: float, strata: Strata = NO_STRATA, *, seed: int) -> tuple[Shards, Shards]:
    """Split every worker's shard at random into training samples and local test samples.

    Args:
        shards: shards of all workers.
        fraction: fraction of test samples, 0 < fraction < 1. A worker with n samples has round(fraction n) test
            samples, but at least one and at most n - 1. A worker with a single sample has no test samples.
        strata: classes and owners of all samples of the data set, which each worker's split respects (see `draw_part`).
            A worker has fewer test samples if its classes have too few samples, and none if all samples have one owner.
        seed: seed for the splits. Each worker's split depends only on (seed, worker).

    Returns (training shards, test shards). If `shards` are drawn on demand, so are both results.

    >>> train, test = fedsim.data.hold_out(fedsim.data.ListedShards.of_arrays([np.arange(10)]), 0.2, seed=0)
    >>> train.size(0), test.size(0)
    (8, 2)
    """
    part = partial(PartOfShards, shards, fraction, strata, seed=seed)
    parts = part(held_out=False), part(held_out=True)
    if not shards.listed:
        return parts
    train, test = (ListedShards.of_arrays([part.of(k).numpy() for k in range(len(shards))]) for part in parts)
    return train, test


class PartOfShards(Shards):
    """Either the training part or the test part of every worker's shard, as split by `hold_out`.

    Args:
        shards: shards of all workers.
        fraction: fraction of test samples, 0 < fraction < 1.
        strata: classes and owners of all samples of the data set.
        seed: seed for the splits.
        held_out: whether this object contains the test part.
    """

    def __init__(
        self, shards: Shards, fraction: float, strata: Strata = NO_STRATA, *, seed: int, held_out: bool
    ) -> None:
        self._shards, self._fraction, self._seed, self._held_out = shards, fraction, seed, held_out
        self._strata, self._observes = strata, any(values is not None for values in strata)
        self.equal_sizes = shards.equal_sizes and not self._observes

    @property
    def listed(self) -> bool:  # type: ignore[override]
        return self._shards.listed

    def __len__(self) -> int:
        return len(self._shards)

    def size(self, worker: int) -> int:
        if self._observes:
            return len(self.of(worker))
        tests = self._tests(n := self._shards.size(worker))
        return tests if self._held_out else n - tests

    def _tests(self, n: int) -> int:
        """Return how many of a worker's n samples are for tests. A split by classes or owners may differ."""
        return min(max(1, round(self._fraction * n)), n - 1)

    def of(self, worker: int) -> Tensor:
        positions = self._shards.of(worker)
        n = len(positions)
        order = numpy_generator(self._seed, "local_test_fraction", worker).permutation(n)
        chosen = draw_part(order, self._fraction, self._tests(n), self._strata.take(positions.numpy()))
        chosen = chosen if self._held_out else np.setdiff1d(np.arange(n), chosen)
        return positions[torch.from_numpy(chosen)]

    @property
    def tensors(self) -> list[Tensor]:
        return self._shards.tensors


def as_indices(shard: Any, worker: int, strategy: str) -> np.ndarray:
    """Return the shard that a strategy returned for a worker as int64.

    Raises ExperimentError if it contains other values than integers, such as those of a Boolean mask.
    """
    array = np.asarray(shard)
    if array.size and array.dtype.kind not in "iu":
        raise ExperimentError(
            f'partition.name = "{strategy}": returned {array.dtype} values for worker {worker}; must return indices, '
            "for example np.flatnonzero(mask) instead of a Boolean mask"
        )
    return array.astype(np.int64, copy=False)
