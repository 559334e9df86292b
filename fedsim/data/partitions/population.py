"""Shards as engines ask for them: all of them listed, or each drawn when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsim.data.partitions.dealing import samples_by_class
from fedsim.errors import ExperimentError
from fedsim.randomness import numpy_generator

KEPT = 4096  # drawn shards that a process keeps, so that a round asks for most of them once


class Shards(ABC):
    """Who holds which samples. Goes to other processes with its tensors by handle."""

    listed: ClassVar[bool]  # whether all shards are there already, so that to look at every one costs next to nothing

    @abstractmethod
    def __len__(self) -> int:
        """The number of workers."""

    @abstractmethod
    def size(self, worker: int) -> int:
        """How many samples a worker holds."""

    @abstractmethod
    def of(self, worker: int) -> Tensor:
        """The positions of a worker's samples in the data set, int64 [size], on the host. Not to be changed."""

    def together(self, workers: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The positions of these workers' samples in one tensor, int64, and where those of each begin in it."""
        shards = [self.of(worker) for worker in workers]
        return torch.cat(shards), [0, *accumulate(map(len, shards))][:-1]

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What lies in memory however many processes there are, for an engine to share."""


class ListedShards(Shards):
    """Shards that are all there, one after another in one tensor.

    Args:
        positions: all workers' sample positions, int64.
        ends: where each worker's end in it, int64 [workers].
    """

    listed = True

    def __init__(self, positions: Tensor, ends: Tensor) -> None:
        self._positions, self._ends = positions, ends
        self._cuts = [0, *ends.tolist()]

    def __reduce__(self) -> tuple[type[ListedShards], tuple[Tensor, Tensor]]:
        return ListedShards, (self._positions, self._ends)

    @classmethod
    def of_arrays(cls, shards: Sequence[np.ndarray]) -> ListedShards:
        """From one index array per worker."""
        sizes = [len(shard) for shard in shards]
        return cls(torch.from_numpy(np.concatenate(shards)), torch.from_numpy(np.cumsum(sizes)))

    def __len__(self) -> int:
        return len(self._ends)

    def size(self, worker: int) -> int:
        return self._cuts[worker + 1] - self._cuts[worker]

    def of(self, worker: int) -> Tensor:
        return self._positions[self._cuts[worker] : self._cuts[worker + 1]]

    def together(self, workers: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Always the same tensor, of all workers."""
        return self._positions, [self._cuts[worker] for worker in workers]

    @property
    def tensors(self) -> list[Tensor]:
        return [self._positions, self._ends]


class DrawnShards(Shards):
    """Virtual shards: each a pure function of (seed, worker), drawn when it is asked for, and kept for a while at most.

    Args:
        name: the strategy's, for errors.
        strategy: gives one worker's positions; its method `size(worker)`, if it has one, their number without a draw.
        takes: what it is called with, by name, of labels, n_workers, rng, ids, worker and by_class.
        labels: [n]; a tensor is shared between processes, not copied.
        ids: [n], for a strategy that takes them.
    """

    listed = False

    def __init__(
        self,
        name: str,
        strategy: Callable[..., Any],
        takes: Collection[str],
        n_workers: int,
        seed: int,
        labels: np.ndarray | Tensor,
        ids: np.ndarray | None = None,
    ) -> None:
        self._name, self._strategy, self._takes = name, strategy, frozenset(takes)
        self._n_workers, self._seed, self._labels = n_workers, seed, labels
        self._ids = ids if "ids" in takes else None
        by_class = samples_by_class(np.asarray(labels)) if "by_class" in takes else []
        self._sorted = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *by_class]))
        self._class_ends = np.cumsum([len(samples) for samples in by_class]).tolist()
        self._kept: dict[int, Tensor] = {}  # what was asked for last stands last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __len__(self) -> int:
        return self._n_workers

    def size(self, worker: int) -> int:
        said = self._size_said(worker)
        return len(self.of(worker)) if said is None else said

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
        return [self._sorted, *([self._labels] if isinstance(self._labels, Tensor) else [])]

    def _size_said(self, worker: int) -> int | None:
        size = getattr(self._strategy, "size", None)
        return None if size is None else int(size(worker))

    def _draw(self, worker: int) -> np.ndarray:
        menu = {
            "labels": np.asarray(self._labels),  # here and not before: sharing a tensor moves its memory
            "n_workers": self._n_workers,
            "rng": numpy_generator(self._seed, "partition", worker),
            "ids": self._ids,
            "worker": worker,
            "by_class": self._by_class(),
        }
        drawn = self._strategy(**{name: menu[name] for name in self._takes})
        shard = np.asarray(drawn, dtype=np.int64)
        self._check(worker, shard)
        return shard

    def _by_class(self) -> list[np.ndarray]:
        samples = self._sorted.numpy()
        return [samples[start:end] for start, end in zip([0, *self._class_ends], self._class_ends, strict=False)]

    def _check(self, worker: int, shard: np.ndarray) -> None:
        where = f'partition.strategy = "{self._name}"'
        n = len(self._labels)
        if shard.ndim != 1 or not len(shard):
            raise ExperimentError(f"{where}: must give each worker positions [size >= 1]; {worker} got {shard.shape}")
        if shard.min() < 0 or shard.max() >= n:
            wrong = shard[(shard < 0) | (shard >= n)][0]
            raise ExperimentError(f"{where}: gave worker {worker} the position {wrong}; there are {n} samples")
        said = self._size_said(worker)
        if said not in (None, len(shard)):
            raise ExperimentError(f"{where}: gave worker {worker} {len(shard)} samples, and size({worker}) says {said}")
