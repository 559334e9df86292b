"""Partitions in which workers hold few classes, or runs of the samples sorted by label."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from fedsim.data.partitions.dealing import deal, even_sizes, samples_by_class
from fedsim.data.partitions.strategy import partition_strategy
from fedsim.errors import ExperimentError


@partition_strategy("shards")
def shards(labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, s: PositiveInt = 2) -> list[np.ndarray]:
    """Sorted by label and cut into s * n_workers equal runs, of which each worker gets s at random.

    McMahan et al. 2017 ("pathological non-IID", s = 2). The sort is stable. Sizes of runs differ by at most one, the
    larger first, so that no sample is lost.

    Draws: one `rng.permutation(s * n_workers)`; worker i gets the runs with numbers i s to i s + s - 1 of it.

    Raises ExperimentError where s * n_workers exceeds the number of samples.

    Labels [n], result one index array per worker. Cost: O(n log n).
    """
    if s * n_workers > len(labels):
        raise ExperimentError(
            f"partition.s = {s}: {s} shards for each of {n_workers} workers are {s * n_workers}, more than the "
            f"{len(labels)} samples"
        )
    runs = np.array_split(np.argsort(labels, kind="stable"), s * n_workers)
    dealt = rng.permutation(s * n_workers).reshape(n_workers, s)
    return [np.concatenate([runs[number] for number in numbers]) for numbers in dealt]


@partition_strategy("label_k")
def label_k(labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, k: PositiveInt = 2) -> list[np.ndarray]:
    """Each worker holds k classes, i mod C and k - 1 random others; a class is split evenly among its holders.

    Li et al. 2022 ("#C = k"). C is the number of classes that occur, here numbered in ascending order. Parts of a class
    differ by at most one sample, the larger to the lower workers.

    With fewer workers than classes, the classes n_workers, ..., C - 1 that are nobody's i mod C go to random workers
    first, each to one, so that no sample is lost; this needs k * n_workers >= C.

    Draws: with fewer workers than classes, one `rng.permutation` of the n_workers * (k - 1) free places (k - 1 times
    worker 0, then worker 1, ...), whose first take the classes nobody holds, in ascending order. Then for each worker
    one `rng.choice(others, places left, replace=False)` of the classes it does not hold yet, ascending. Then each class
    in ascending order is shuffled by `rng.permutation`; its holders take from it in their order.

    Raises ExperimentError where k > C or k * n_workers < C.

    Labels [n], result one index array per worker. Cost: O(n log n + C n_workers).
    """
    by_class = samples_by_class(labels)
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
    return deal(by_class, counts, rng)


def _draw_classes(n_workers: int, n_classes: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Which classes each worker holds, bool [n_workers, n_classes]: k in each row, at least one in each column."""
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
    """A fraction gamma of the samples is spread at random; the rest is sorted by label and cut into runs.

    Hsu et al. 2019; Karimireddy et al. 2020 (SCAFFOLD: "s% similarity", s = 100 gamma). round(gamma n) samples are
    drawn and cut as `iid` cuts them; the others, sorted stably by label, are cut into one run per worker. Workers'
    sizes differ by at most one. gamma = 1 is `iid`, to the sample; gamma = 0 leaves nothing to chance.

    Draws: one `rng.permutation(n)`, whose first round(gamma n) samples are the random part.

    Labels [n], result one index array per worker. Cost: O(n log n).
    """
    n = len(labels)
    n_random = round(gamma * n)
    drawn = rng.permutation(n)
    rest = np.sort(drawn[n_random:])
    rest = rest[np.argsort(labels[rest], kind="stable")]
    # The runs make up for what the random parts leave uneven.
    runs = np.split(rest, np.cumsum(even_sizes(n, n_workers) - even_sizes(n_random, n_workers))[:-1])
    parts = np.array_split(drawn[:n_random], n_workers)
    return [np.concatenate(pair) for pair in zip(parts, runs, strict=True)]
