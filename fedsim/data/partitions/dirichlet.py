"""Partitions with Dirichlet label skew: class shares are drawn over workers or over classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim.core.numbers import PositiveInt
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
    """Divide each class among the workers by shares ~ Dir(alpha). A smaller alpha gives more label skew.

    For class c with n_c samples, shares q ~ Dir(alpha, ..., alpha) over the workers are drawn. The shuffled samples are
    cut at floor(cumsum(q) n_c). The last worker with a share above zero gets the rest. Shard sizes differ widely.
    Yurochkin et al. 2019; Li et al. 2022 (NIID-Bench).

    Draws: each try draws one `rng.dirichlet` per class, in ascending order. After the successful try, each class in
    ascending order is shuffled by `rng.permutation`.

    Args:
        by_class: sample indices of each class, one array [size] per class.
        n_workers: number of shards.
        rng: for all draws.
        alpha: concentration of the Dirichlet distribution, > 0.
        min_size: minimum number of samples per worker. All shares are redrawn until it is reached, at most 1000 times.
            NIID-Bench uses 10. A larger value reduces the skew.
        balanced: whether a worker that already has n / n_workers samples or more gets no samples of the remaining
            classes, as in the code of both papers. The other workers' shares are rescaled to sum to one. If rounding
            makes all other shares zero (tiny alpha), they are redrawn from the same distribution.

    Returns one index array per worker. Raises ExperimentError if min_size is not reached. Cost: O(n log n), plus O(C
    n_workers) for each try.

    >>> fedsim.partition(np.arange(8) % 2, "dirichlet", 2, seed=1)
    [array([2, 0]), array([6, 4, 5, 1, 7, 3])]
    """
    class_sizes, alphas = [len(samples) for samples in by_class], np.full(n_workers, alpha)
    n = sum(class_sizes)

    def draw() -> np.ndarray:
        """Draw the number of samples of each worker and class, int64 [n_workers, classes]."""
        counts = np.zeros((n_workers, len(class_sizes)), dtype=np.int64)
        worker_sizes = np.zeros(n_workers, dtype=np.int64)
        for number, size in enumerate(class_sizes):
            shares = rng.dirichlet(alphas)
            if balanced:  # some worker is below n / n_workers, since fewer than n samples are assigned so far
                shares = _restricted(shares, worker_sizes * n_workers < n, rng, alphas)
            counts[:, number] = cut_by_shares(size, shares)
            worker_sizes += counts[:, number]
        return counts

    counts = draw_until_large_enough(draw, min_size, n, n_workers, f"alpha = {alpha}", "a larger alpha")
    return assign_samples(by_class, counts, rng)


@partition_strategy("dirichlet_workers")
def dirichlet_workers(
    by_class: Sequence[np.ndarray], n_workers: int, rng: np.random.Generator, *, alpha: Concentration = 0.5
) -> list[np.ndarray]:
    """Draw a class mixture ~ Dir(alpha) for each worker, then the worker's samples from it. Shard sizes are equal.

    Workers are served one after another. For each worker a mixture q ~ Dir(alpha, ..., alpha) over the C classes is
    drawn. Each of the worker's samples is a random sample, without replacement, from a class drawn from q. A class that
    has run out of samples is removed from q, and q is rescaled to sum to one. Shard sizes differ by at most one, larger
    ones first. The last workers get the remaining samples, so their mixtures deviate from Dir(alpha). Hsu et al. 2019
    use Dir(alpha p), where p sums to one: for a uniform p, `alpha` here is their alpha divided by C.

    Draws: for each worker one `rng.dirichlet`, then all its classes by one `rng.choice(C, samples needed, p=q)`. If a
    class runs out of samples, the draws from there on are repeated with the reduced q. Finally each class in ascending
    order is shuffled by `rng.permutation`. If all remaining shares are zero (tiny alpha), one more `rng.dirichlet`
    redraws them from the same distribution.

    Args:
        by_class: sample indices of each class, one array [size] per class.
        n_workers: number of shards.
        rng: for all draws.
        alpha: concentration of the Dirichlet distribution, > 0. A smaller alpha gives more label skew.

    Returns one index array per worker. Cost: O(n log n + C n_workers).

    >>> fedsim.partition(np.arange(8) % 2, "dirichlet_workers", 2, seed=1)
    [array([6, 0, 2, 1]), array([4, 7, 5, 3])]
    """
    left = np.array([len(samples) for samples in by_class])
    counts = np.zeros((n_workers, len(by_class)), dtype=np.int64)
    for worker, size in enumerate(even_sizes(sum(left), n_workers)):
        counts[worker] = draw_counts(int(size), np.full(len(by_class), alpha), left, rng)
        left -= counts[worker]
    return assign_samples(by_class, counts, rng)


def draw_counts(size: int, alphas: np.ndarray, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw one worker's number of samples per class, int64 [C], from a class mixture ~ Dir(alphas).

    Args:
        size: number of samples of the worker.
        alphas: concentration of each class, [C].
        left: number of available samples of each class, [C]. Their sum is at least `size`.
        rng: for all draws, in the order described in `dirichlet_workers`.
    """
    mixture = rng.dirichlet(alphas)
    counts = np.zeros(len(alphas), dtype=np.int64)
    while size:  # repeats only when a class has run out, so at most C times
        mixture = _restricted(mixture, left > 0, rng, alphas)
        drawn = rng.choice(len(alphas), size, p=mixture)
        taken = np.bincount(_while_they_last(drawn, left), minlength=len(alphas))
        counts += taken
        left = left - taken
        size -= int(taken.sum())
    return counts


def _restricted(shares: np.ndarray, is_open: np.ndarray, rng: np.random.Generator, alphas: np.ndarray) -> np.ndarray:
    """Return a class mixture [C] with zero for classes that have no samples left, rescaled to sum to one.

    Args:
        shares: class mixture that was drawn from Dir(alphas), [C].
        is_open: whether each class has samples left, bool [C].
        rng: draws the mixture again if all remaining shares are zero.
        alphas: concentration of each class, [C].
    """
    shares = np.where(is_open, shares, 0.0)
    if not shares.any():
        # The rescaled open shares of a Dirichlet draw are Dir(alphas[is_open]), independently of the closed shares.
        shares[is_open] = rng.dirichlet(alphas[is_open])
    return shares / shares.sum()


def _while_they_last(drawn: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return the drawn class numbers before the first draw from an exhausted class.

    `left` [C] is the number of samples of each class before these draws.
    """
    too_many = np.flatnonzero(np.bincount(drawn, minlength=len(left)) > left)
    stop = min((np.flatnonzero(drawn == number)[left[number]] for number in too_many), default=len(drawn))
    return drawn[:stop]
