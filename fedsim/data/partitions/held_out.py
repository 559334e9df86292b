"""A test set of each worker: samples of its shard that it does not train on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.core.randomness import numpy_generator
from fedsim.data.partitions.population import ListedShards, Shards


def hold_out(shards: Shards, fraction: float, seed: int) -> tuple[Shards, Shards]:
    """Split the shard of every worker into training samples and test samples, at random.

    Args:
        shards: of all workers.
        fraction: of a worker's n samples, 0 < fraction < 1; it has round(fraction n) test samples, but at least one and
            at most n - 1. A worker with a single sample has no test samples.
        seed: the split of a worker is a pure function of (seed, worker).

    Returns the shards to train on and those to test on. Shards that are drawn on demand stay so.

    >>> train, test = fedsim.data.hold_out(fedsim.data.ListedShards.of_arrays([np.arange(10)]), 0.2, seed=0)
    >>> train.size(0), test.size(0)
    (8, 2)
    """
    parts = PartOfShards(shards, fraction, seed, held_out=False), PartOfShards(shards, fraction, seed, held_out=True)
    if not shards.listed:
        return parts
    train, test = (ListedShards.of_arrays([part.of(k).numpy() for k in range(len(shards))]) for part in parts)
    return train, test


class PartOfShards(Shards):
    """The training samples, or the test samples, of shards.

    Args:
        shards, fraction, seed: as of `hold_out`.
        held_out: whether these are the test samples.
    """

    def __init__(self, shards: Shards, fraction: float, seed: int, *, held_out: bool) -> None:
        self._shards, self._fraction, self._seed, self._held_out = shards, fraction, seed, held_out
        self.equal_sizes = shards.equal_sizes

    @property
    def listed(self) -> bool:  # type: ignore[override]
        return self._shards.listed

    def __len__(self) -> int:
        return len(self._shards)

    def size(self, worker: int) -> int:
        n = self._shards.size(worker)
        tests = min(max(1, round(self._fraction * n)), n - 1)
        return tests if self._held_out else n - tests

    def of(self, worker: int) -> Tensor:
        positions = self._shards.of(worker)
        order = numpy_generator(self._seed, "worker_test", worker).permutation(len(positions))
        size = self.size(worker)
        chosen = order[:size] if self._held_out else order[len(order) - size :]
        return positions[torch.from_numpy(np.sort(chosen))]

    @property
    def tensors(self) -> list[Tensor]:
        return self._shards.tensors
