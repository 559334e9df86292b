"""Partitions with labels drawn from a Dirichlet distribution, over workers or over classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import PositiveInt

from fedsim.data.partitions.allocation import (
    Concentration,
    assign_samples,
    cut_by_shares,
    draw_until_large_enough,
    even_sizes,
)
from fedsim.data.partitions.base import partition_strategy


@partition_strategy("dirichlet")
def dirichlet(
    by_class: Sequence[np.ndarray],
    n_workers: int,
    rng: np.random.Generator,
    *,
    alpha: Concentration = 0.5,
    min_size: PositiveInt = 1,
    balanced: bool = False,
) -> list[np.ndarray]:
    """Each class is divided among the workers by shares ~ Dir(alpha): a smaller alpha gives more skew.

    For class c with n_c samples: q ~ Dir(alpha, ..., alpha) over the workers; its shuffled samples are cut at
    floor(cumsum(q) n_c), the last worker with a share gets the rest. Workers' sizes differ widely. Yurochkin et al.
    2019; Li et al. 2022 (NIID-Bench).

    Draws: for each try, for each class in ascending order, one `rng.dirichlet`; for the good try, each class in
    ascending order is shuffled by `rng.permutation`.

    Args:
        by_class: the positions [n] of the samples of each class, one array for each.
        n_workers: number of shards.
        rng: for all draws.
        alpha: > 0.
        min_size: least samples of a worker. All shares are drawn again until it is reached, at most 1000 times. 10 in
            NIID-Bench; a larger value leaves less skew.
        balanced: a worker with n / n_workers samples or more gets no share of further classes, and the other shares are
            scaled to sum to one, as in the original code of both papers. If all other shares are zero (tiny alpha),
            they are drawn again, from the same distribution.

    Returns one index array per worker. Raises ExperimentError if min_size is not reached. Cost: O(n log n), and O(C
    n_workers) for each try.

    >>> fedsim.partition(np.arange(8) % 2, 2, "dirichlet", seed=1)
    [array([2, 0]), array([6, 4, 5, 1, 7, 3])]
    """
    class_sizes = [len(samples) for samples in by_class]

    def draw() -> np.ndarray:
        return _share_out(class_sizes, n_workers, rng, alpha, balanced)

    n = sum(class_sizes)
    counts = draw_until_large_enough(draw, min_size, n, n_workers, f"alpha = {alpha}", "a larger alpha")
    return assign_samples(by_class, counts, rng)


def _share_out(
    class_sizes: list[int], n_workers: int, rng: np.random.Generator, alpha: float, balanced: bool
) -> np.ndarray:
    """Return the number of samples of each class that every worker gets, [n_workers, classes]."""
    counts = np.zeros((n_workers, len(class_sizes)), dtype=np.int64)
    held = np.zeros(n_workers, dtype=np.int64)
    alphas = np.full(n_workers, alpha)
    for number, size in enumerate(class_sizes):
        shares = rng.dirichlet(alphas)
        if balanced:  # some worker is open: before the last class, fewer than n samples are held
            shares = _restricted(shares, held * n_workers < sum(class_sizes), rng, alphas)
        counts[:, number] = cut_by_shares(size, shares)
        held += counts[:, number]
    return counts


@partition_strategy("dirichlet_workers")
def dirichlet_workers(
    by_class: Sequence[np.ndarray], n_workers: int, rng: np.random.Generator, *, alpha: Concentration = 0.5
) -> list[np.ndarray]:
    """Each worker draws its class mixture ~ Dir(alpha), then its samples from that mixture; sizes are equal.

    Workers choose one after another: q ~ Dir(alpha, ..., alpha) over the C classes; for each of the worker's samples a
    class is drawn from q and a sample of that class without replacement. A class without samples left is removed from
    q, which is scaled to sum to one. Sizes differ by at most one, the larger first. The last workers get the remaining
    samples, so their mixtures deviate. With the prior p of Hsu et al. 2019, Dir(alpha p) with a uniform p that sums to
    one, this alpha is theirs over C.

    Draws: for each worker one `rng.dirichlet`, then all its classes by one `rng.choice(C, samples needed, p=q)`, of
    which the draws before the first class without samples count, and so on for the rest with the smaller q. Then each
    class in ascending order is shuffled by `rng.permutation`. (If all remaining shares are zero (tiny alpha), one more
    `rng.dirichlet` draws them again, from the same distribution.)

    Args:
        by_class: the positions [n] of the samples of each class, one array for each.
        n_workers: number of shards.
        rng: for all draws.
        alpha: > 0.

    Returns one index array per worker. Cost: O(n log n + C n_workers).

    >>> fedsim.partition(np.arange(8) % 2, 2, "dirichlet_workers", seed=1)
    [array([6, 0, 2, 1]), array([4, 7, 5, 3])]
    """
    left = np.array([len(samples) for samples in by_class])
    counts = np.zeros((n_workers, len(by_class)), dtype=np.int64)
    for worker, size in enumerate(even_sizes(sum(left), n_workers)):
        counts[worker] = draw_counts(int(size), np.full(len(by_class), alpha), left, rng)
        left -= counts[worker]
    return assign_samples(by_class, counts, rng)


def draw_counts(size: int, alphas: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the samples of each class, int64 [C], of a worker that draws `size` samples from a mixture ~ Dir(alphas).

    left: the available samples of each class, [C], together at least `size`. Draws: as in `dirichlet_workers`.
    """
    mixture = rng.dirichlet(alphas)
    counts = np.zeros(len(alphas), dtype=np.int64)
    while size:  # again only when a class has run out, which each does once
        mixture = _restricted(mixture, left > 0, rng, alphas)
        drawn = rng.choice(len(alphas), size, p=mixture)
        taken = np.bincount(_while_they_last(drawn, left), minlength=len(alphas))
        counts += taken
        left = left - taken
        size -= int(taken.sum())
    return counts


def _restricted(shares: np.ndarray, is_open: np.ndarray, rng: np.random.Generator, alphas: np.ndarray) -> np.ndarray:
    """Shares ~ Dir(alphas), set to zero for the closed classes and scaled to sum 1."""
    shares = np.where(is_open, shares, 0.0)
    if not shares.any():
        # The open shares of a Dirichlet draw, divided by their sum, are Dir(alphas) whatever the closed ones are.
        shares[is_open] = rng.dirichlet(alphas[is_open])
    return shares / shares.sum()


def _while_they_last(drawn: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return the draws before the first draw of a class without samples left."""
    too_many = np.flatnonzero(np.bincount(drawn, minlength=len(left)) > left)
    stop = min((np.flatnonzero(drawn == number)[left[number]] for number in too_many), default=len(drawn))
    return drawn[:stop]
