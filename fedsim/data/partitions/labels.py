"""Partitions in which workers hold few classes, or runs of samples sorted by label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from fedsim.data.partitions.allocation import assign_samples, by_label, even_sizes
from fedsim.data.partitions.base import partition_strategy
from fedsim.errors import ExperimentError


@partition_strategy("shards")
def shards(labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, s: PositiveInt = 2) -> list[np.ndarray]:
    """Samples sorted by label are cut into s * n_workers equal runs; each worker gets s random runs.

    McMahan et al. 2017 ("pathological non-IID", s = 2). The sort is stable. Sizes of runs differ by at most one, the
    larger first.

    Draws: one `rng.permutation(s * n_workers)`; worker i gets the runs at its places i s to i s + s - 1.

    Args:
        labels: [n].
        n_workers: number of shards.
        rng: for all draws.
        s: runs of a worker, s * n_workers <= n.

    Returns one index array per worker. Raises ExperimentError if there are more runs than samples. Cost: O(n log n).

    >>> fedsim.partition([0, 1, 2, 3, 0, 1, 2, 3], 2, "shards")
    [array([0, 4, 2, 6]), array([3, 7, 1, 5])]
    """
    if s * n_workers > len(labels):
        raise ExperimentError(
            f"partition.s = {s}: {s} shards for each of {n_workers} workers are {s * n_workers}, more than the "
            f"{len(labels)} samples"
        )
    runs = np.array_split(by_label(labels), s * n_workers)
    assigned = rng.permutation(s * n_workers).reshape(n_workers, s)
    return [np.concatenate([runs[number] for number in numbers]) for numbers in assigned]


@partition_strategy("classes_per_worker")
def classes_per_worker(
    by_class: Sequence[np.ndarray], n_workers: int, rng: np.random.Generator, *, k: PositiveInt = 2
) -> list[np.ndarray]:
    """Each worker holds k classes, i mod C and k - 1 random others; a class is divided evenly among its holders.

    Li et al. 2022 ("#C = k"). C is the number of classes, in ascending order. Parts of a class differ by at most one
    sample, the larger to the lower workers. With fewer workers than classes, the classes n_workers, ..., C - 1, which
    no worker holds as i mod C, go to random workers first, each to one.

    Draws: with fewer workers than classes, one `rng.permutation` of the n_workers * (k - 1) free places (k - 1 times
    worker 0, then worker 1, ...), whose first get the classes without a holder, in ascending order. Then for each
    worker one `rng.choice(others, places left, replace=False)` of the classes that it does not hold, ascending. Then
    each class in ascending order is shuffled by `rng.permutation`; its holders take from it in their order.

    Args:
        by_class: the positions [n] of the samples of each class, one array for each.
        n_workers: number of shards.
        rng: for all draws.
        k: classes of a worker, k <= C and k * n_workers >= C.

    Returns one index array per worker. Raises ExperimentError if k > C or k * n_workers < C. Cost: O(n log n + C
    n_workers).

    >>> fedsim.partition([0, 1, 2, 3, 0, 1, 2, 3], 2, "classes_per_worker", k=2)
    [array([0, 4, 2, 6]), array([1, 5, 3, 7])]
    """
    n_classes = len(by_class)
    if k > n_classes:
        raise ExperimentError(f"partition.k = {k}: must be at most the number of classes, {n_classes}")
    if k * n_workers < n_classes:
        raise ExperimentError(
            f"partition.k = {k}: {n_workers} workers with {k} classes each hold at most {k * n_workers} of "
            f"{n_classes} classes, and samples of the others would be lost"
        )
    holds = _draw_classes(n_workers, n_classes, k, rng)
    counts = np.zeros(holds.shape, dtype=np.int64)
    for number, samples in enumerate(by_class):
        holders = np.flatnonzero(holds[:, number])
        counts[holders, number] = even_sizes(len(samples), len(holders))
    return assign_samples(by_class, counts, rng)


def _draw_classes(n_workers: int, n_classes: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """The classes that each worker holds, bool [n_workers, n_classes]: k in each row, at least one in each column."""
    workers = np.arange(n_workers)
    holds = np.zeros((n_workers, n_classes), dtype=bool)
    holds[workers, workers % n_classes] = True
    if n_workers < n_classes:
        unheld = np.arange(n_workers, n_classes)
        holds[rng.permutation(np.repeat(workers, k - 1))[: len(unheld)], unheld] = True
    for row in holds:
        others = np.flatnonzero(~row)
        row[rng.choice(others, k - row.sum(), replace=False)] = True
    return holds


@partition_strategy("similarity")
def similarity(
    labels: np.ndarray,
    n_workers: int,
    rng: np.random.Generator,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.1,
) -> list[np.ndarray]:
    """A fraction gamma of the samples is distributed at random; the rest is sorted by label and cut into runs.

    Hsu et al. 2019; Karimireddy et al. 2020 (SCAFFOLD: "s% similarity", s = 100 gamma). round(gamma n) samples are
    drawn and cut as in `iid`; the others, sorted stably by label, are cut into one run per worker. Workers' sizes
    differ by at most one. gamma = 1 is `iid`; gamma = 0 has no randomness.

    Draws: one `rng.permutation(n)`, whose first round(gamma n) samples are the random part.

    Args:
        labels: [n].
        n_workers: number of shards.
        rng: for all draws.
        gamma: 0 <= gamma <= 1.

    Returns one index array per worker. Cost: O(n log n).

    >>> fedsim.partition([0, 1, 0, 1], 2, "similarity", gamma=0.0)
    [array([0, 2]), array([1, 3])]
    """
    n = len(labels)
    n_random = round(gamma * n)
    drawn = rng.permutation(n)
    rest = np.sort(drawn[n_random:])
    rest = rest[by_label(labels[rest])]
    # The runs make up for what the random parts leave uneven.
    runs = np.split(rest, np.cumsum(even_sizes(n, n_workers) - even_sizes(n_random, n_workers))[:-1])
    parts = np.array_split(drawn[:n_random], n_workers)
    return [np.concatenate(pair) for pair in zip(parts, runs, strict=True)]
