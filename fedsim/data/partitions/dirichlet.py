"""Partitions whose label distributions are drawn from a Dirichlet distribution: over workers, or over classes."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveInt

from fedsim.data.partitions.dealing import (
    Concentration,
    cut_by_shares,
    deal,
    draw_until_large_enough,
    even_sizes,
    samples_by_class,
)
from fedsim.data.partitions.strategy import partition_strategy


@partition_strategy("dirichlet")
def dirichlet(
    labels: np.ndarray,
    n_workers: int,
    rng: np.random.Generator,
    *,
    alpha: Concentration = 0.5,
    min_size: PositiveInt = 1,
    balanced: bool = False,
) -> list[np.ndarray]:
    """Each class is shared out among workers by shares ~ Dir(alpha): the smaller alpha, the more skew.

    For class c with n_c samples: q ~ Dir(alpha, ..., alpha) over the workers; its shuffled samples are cut at
    floor(cumsum(q) n_c), the last worker with a share taking the rest. Workers' sizes differ widely. Yurochkin et al.
    2019; Li et al. 2022 (NIID-Bench).

    Args:
        min_size: samples that every worker must get. The shares of all classes are drawn anew until they do, at most
            1000 times; then, or where min_size * n_workers > n, an ExperimentError names the numbers. The default only
            keeps workers from being empty; NIID-Bench asks for 10. The greater it is, the less skew is left.
        balanced: workers that hold n / n_workers samples or more when a class is shared out are closed: their shares
            become zero and the others are scaled up to sum to one, as in the original code of both papers. Where the
            open ones' shares are all zero (they underflow for tiny alpha), those are drawn anew, which is the same
            distribution.

    Draws: for each try, for each class in ascending order, one `rng.dirichlet`; when a try is good, each class in
    ascending order is shuffled by `rng.permutation`.

    Labels [n], result one index array per worker. Cost: O(n log n), and O(C n_workers) for each try.
    """
    by_class = samples_by_class(labels)
    class_sizes = [len(samples) for samples in by_class]

    def draw() -> np.ndarray:
        return _share_out(class_sizes, n_workers, rng, alpha, balanced)

    n = len(labels)
    counts = draw_until_large_enough(draw, min_size, n, n_workers, f"alpha = {alpha}", "a larger alpha")
    return deal(by_class, counts, rng)


def _share_out(
    class_sizes: list[int], n_workers: int, rng: np.random.Generator, alpha: float, balanced: bool
) -> np.ndarray:
    """How many samples of each class every worker gets, [n_workers, classes]."""
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
    labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, alpha: Concentration = 0.5
) -> list[np.ndarray]:
    """Each worker draws its own class mixture ~ Dir(alpha), then its samples by that mixture; equal sizes.

    Hsu et al. 2019. Workers choose one after another: q ~ Dir(alpha, ..., alpha) over the C classes that occur; as
    often as the worker's size says, a class is drawn from q and a sample of that class without replacement. A class
    that has run out is struck from q, which is scaled up to sum to one. Sizes differ by at most one, the larger first.
    The last workers get what is left, so their mixtures are less their own.

    In that paper's notation, Dir(alpha p) with a prior p over classes that sums to one, a uniform p makes this alpha
    its alpha / C.

    Draws: for each worker one `rng.dirichlet`, then all its classes by one `rng.choice(C, samples wanted, p=q)`, of
    which those before the first draw of a class that has run out count, and so on for the rest with the smaller q.
    Then each class in ascending order is shuffled by `rng.permutation`. (Where the shares of all classes left are zero,
    as they may be for tiny alpha, one more `rng.dirichlet` draws them anew, which is the same distribution.)

    Labels [n], result one index array per worker. Cost: O(n log n + C n_workers).
    """
    by_class = samples_by_class(labels)
    left = np.array([len(samples) for samples in by_class])
    counts = np.zeros((n_workers, len(by_class)), dtype=np.int64)
    for worker, size in enumerate(even_sizes(len(labels), n_workers)):
        counts[worker] = draw_counts(int(size), np.full(len(by_class), alpha), left, rng)
        left -= counts[worker]
    return deal(by_class, counts, rng)


def draw_counts(size: int, alphas: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How many samples of each class, int64 [C], a worker has that draws `size` by a mixture ~ Dir(alphas).

    left: how many there are of each class, [C], together at least `size`. Draws: as in `dirichlet_workers`.
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
    """Shares ~ Dir(alphas) given that only the open ones count: the others zero, the sum one."""
    shares = np.where(is_open, shares, 0.0)
    if not shares.any():
        # Whatever the others have come out as, the open ones in proportion are Dir(alphas) among themselves.
        shares[is_open] = rng.dirichlet(alphas[is_open])
    return shares / shares.sum()


def _while_they_last(drawn: np.ndarray, left: np.ndarray) -> np.ndarray:
    """The draws before the first one of a class of which, by then, nothing is left."""
    too_many = np.flatnonzero(np.bincount(drawn, minlength=len(left)) > left)
    stop = min((np.flatnonzero(drawn == number)[left[number]] for number in too_many), default=len(drawn))
    return drawn[:stop]
