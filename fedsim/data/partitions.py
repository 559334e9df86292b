"""Partition strategies: who holds which samples.

A strategy is a function `(labels [n], n_workers, rng, *, parameters) -> list of index arrays`, one per worker, which
may leave out what it does not need. Every result is checked to be an exact disjoint cover of range(n) without an empty
shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.errors import ExperimentError
from fedsim.randomness import numpy_generator
from fedsim.registry import Registry

partition_strategy = Registry("partition strategy", given=("labels", "n_workers", "rng"))


@partition_strategy("contiguous")
def contiguous(labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Equal runs in the data set's order; the remainder of the division goes to the last worker."""
    size = len(labels) // n_workers
    return np.split(np.arange(len(labels)), [size * worker for worker in range(1, n_workers)])


@partition_strategy("iid")
def iid(labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffled, then cut into runs whose sizes differ by at most one."""
    return np.array_split(rng.permutation(len(labels)), n_workers)


def partition(
    labels: Sequence[int] | np.ndarray,
    n_workers: int,
    strategy: str = "contiguous",
    seed: int = 0,
    **params: Any,
) -> list[np.ndarray]:
    """Cut samples into one shard per worker.

    Args:
        labels: class label of every sample, [n].
        n_workers: number of shards, 1 <= n_workers <= n.
        strategy: a registered name, or "package.module:function".
        seed: the draw is a pure function of it; nothing else is seeded or consumed.
        params: the strategy's own parameters.

    Returns int64 index arrays, one per worker: an exact disjoint cover of range(n), none empty.

    Raises ExperimentError (a ValueError) for an unknown strategy, a wrong parameter, or more workers than samples.
    """
    plug = partition_strategy.get(strategy, "partition.strategy")
    params = plug.check(params, "partition", beside=["strategy"])
    labels = np.asarray(labels)
    if not 1 <= n_workers <= len(labels):
        raise ExperimentError(f"workers = {n_workers}: must be between 1 and the number of samples, {len(labels)}")
    given = plug.given(labels=labels, n_workers=n_workers, rng=numpy_generator(seed, "partition"))
    shards = plug.target(**given, **params)
    shards = [np.asarray(shard, dtype=np.int64) for shard in shards]
    _check_cover(shards, len(labels), n_workers, strategy)
    return shards


def _check_cover(shards: list[np.ndarray], n_samples: int, n_workers: int, strategy: str) -> None:
    where = f'partition.strategy = "{strategy}"'
    if len(shards) != n_workers:
        raise ExperimentError(f"{where}: gave {len(shards)} shards for {n_workers} workers")
    empty = [worker for worker, shard in enumerate(shards) if not len(shard)]
    if empty:
        raise ExperimentError(f"{where}: leaves worker {empty[0]} without a sample ({len(empty)} such workers)")
    held = np.concatenate(shards)
    if len(held) != n_samples or not np.array_equal(np.sort(held), np.arange(n_samples)):
        raise ExperimentError(
            f"{where}: must give each of {n_samples} samples to exactly one worker; it gave {len(held)}, "
            f"{len(np.unique(held))} of them distinct"
        )
