"""Partitions with label skew: workers hold few classes, or contiguous runs of samples sorted by label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim.core.numbers import Fraction, PositiveInt
from fedsim.data.partitions.allocation import assign_samples, by_label, even_sizes
from fedsim.data.partitions.base import partition_strategy
from fedsim.errors import ExperimentError


@partition_strategy("shards")
def shards(labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, s: PositiveInt = 2) -> list[np.ndarray]:
    """Sort samples by label, cut them into s * n_workers equal pieces, and give each worker s random pieces.

    McMahan et al. 2017 ("pathological non-IID", s = 2). The sort is stable. The sizes of the pieces differ by at most
    one, larger pieces first.

    Draws: one `rng.permutation(s * n_workers)`. Worker i gets the pieces listed at positions i s to i s + s - 1.

    Args:
        labels: class labels, [n].
        n_workers: number of shards.
        rng: for all draws.
        s: number of pieces per worker, s * n_workers <= n.

    Returns one index array per worker. Raises ExperimentError if there are more pieces than samples. Cost: O(n log n).

    >>> fedsim.partition([0, 1, 2, 3, 0, 1, 2, 3], "shards", 2)
    [array([0, 4, 2, 6]), array([3, 7, 1, 5])]
    """
    if s * n_workers > len(labels):
        raise ExperimentError(
            f"partition.s = {s}: {n_workers} workers with {s} pieces of the sorted samples per worker need at least "
            f"{s * n_workers} samples, but there are only {len(labels)}; lower s or use fewer workers"
        )
    runs = np.array_split(by_label(labels), s * n_workers)
    assigned = rng.permutation(s * n_workers).reshape(n_workers, s)
    return [np.concatenate([runs[number] for number in numbers]) for numbers in assigned]


@partition_strategy("classes_per_worker")
def classes_per_worker(
    by_class: Sequence[np.ndarray], n_workers: int, rng: np.random.Generator, *, k: PositiveInt = 2
) -> list[np.ndarray]:
    """Give worker i samples of k classes: class i mod C, and k - 1 random classes.

    C is the number of classes. Each class is split evenly among its workers: their sample counts differ by at most one,
    and lower worker IDs get the larger counts. With fewer workers than classes, i mod C never reaches the classes
    n_workers, ..., C - 1. Each of these classes is first assigned to one random worker. Li et al. 2022 ("#C = k").

    Draws: each worker has k - 1 free places for random classes. With fewer workers than classes, the n_workers * (k -
    1) free places (of worker 0, then of worker 1, ...) are shuffled by one `rng.permutation`. The first places then get
    the unassigned classes, in ascending order. Then for each worker one `rng.choice(classes, free places,
    replace=False)` among the classes that the worker does not have, in ascending order. Then each class in ascending
    order is shuffled by `rng.permutation` and handed out in the order of the workers.

    Args:
        by_class: sample indices of each class, one array [size] per class.
        n_workers: number of shards.
        rng: for all draws.
        k: number of classes per worker, k <= C and k * n_workers >= C.

    Returns one index array per worker. Raises ExperimentError if k > C or k * n_workers < C. Cost: O(n log n + C
    n_workers).

    >>> fedsim.partition([0, 1, 2, 3, 0, 1, 2, 3], "classes_per_worker", 2, k=2)
    [array([0, 4, 2, 6]), array([1, 5, 3, 7])]
    """
    n_classes = len(by_class)
    if k > n_classes:
        raise ExperimentError(f"partition.k = {k}: must be at most the number of classes, {n_classes}")
    if k * n_workers < n_classes:
        raise ExperimentError(
            f"partition.k = {k}: {n_workers} workers with {k} classes each cover only {k * n_workers} of "
            f"{n_classes} classes, so the other classes would be lost; use a larger k or more workers"
        )
    holds = _draw_classes(n_workers, n_classes, k, rng)
    counts = np.zeros(holds.shape, dtype=np.int64)
    for number, samples in enumerate(by_class):
        holders = np.flatnonzero(holds[:, number])
        counts[holders, number] = even_sizes(len(samples), len(holders))
    return assign_samples(by_class, counts, rng)


def _draw_classes(n_workers: int, n_classes: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Return which classes each worker holds, as a bool array [n_workers, n_classes].

    Each worker (row) holds k classes, and each class (column) has at least one worker.
    """
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
    labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, gamma: Fraction = 0.1
) -> list[np.ndarray]:
    """Distribute a fraction gamma of the samples at random, and the rest, sorted by label, in one piece per worker.

    Hsu et al. 2019; Karimireddy et al. 2020 (SCAFFOLD: "s% similarity", s = 100 gamma). The round(gamma n) random
    samples are distributed as in `iid`. The remaining samples are sorted stably by label and cut into one contiguous
    piece per worker. Shard sizes differ by at most one. gamma = 1 is `iid`, and gamma = 0 involves no randomness.

    Draws: one `rng.permutation(n)`, whose first round(gamma n) samples are the random part.

    Args:
        labels: class labels, or scalar targets, [n].
        n_workers: number of shards.
        rng: for all draws.
        gamma: fraction of the samples that are distributed at random, 0 <= gamma <= 1.

    Returns one index array per worker. Cost: O(n log n).

    >>> fedsim.partition([0, 1, 0, 1], "similarity", 2, gamma=0.0)
    [array([0, 2]), array([1, 3])]
    """
    n = len(labels)
    n_random = round(gamma * n)
    drawn = rng.permutation(n)
    rest = np.sort(drawn[n_random:])
    rest = rest[by_label(labels[rest])]
    # The sizes of the runs are chosen such that random part plus run have even sizes.
    runs = np.split(rest, np.cumsum(even_sizes(n, n_workers) - even_sizes(n_random, n_workers))[:-1])
    parts = np.array_split(drawn[:n_random], n_workers)
    return [np.concatenate(pair) for pair in zip(parts, runs, strict=True)]
