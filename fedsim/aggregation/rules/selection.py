"""Rules that select some updates by their distances or norms, and average them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_to, norms
from fedsim.aggregation.numerics.gram import TIED, Gram, stable_order
from fedsim.aggregation.numerics.sorting import mean_nearest, middle, sorted_columns
from fedsim.aggregation.numerics.subset_search import least_covariance, least_diameter
from fedsim.aggregation.rule import ByzantineCount, LinearCombination, average_of, require, require_finite, rule
from fedsim.aggregation.rules.order_statistics import median
from fedsim.core.numbers import NonNegativeInt, PositiveInt
from fedsim.errors import ExperimentError


@rule("krum")
def krum(gram: Gram, *, f: ByzantineCount) -> LinearCombination:
    """Select the update with the smallest Krum score (Blanchard et al. 2017).

    The Krum score of an update is the sum of its squared distances to the n - f - 2 nearest other updates. Of equal
    scores, the first worker's update is selected.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, n >= 2f + 3.

    Returns the selected update [d]. Cost: one n x n x d matrix product.

    >>> fedsim.aggregate(torch.tensor([[1.0], [1.1], [1.3], [1.6], [99.0]]), "krum", f=1)
    tensor([1.1000])
    """
    n = len(gram)
    require(n >= 2 * f + 3, "krum", "n >= 2f + 3", f=f, n=n)
    return _mean_of_least_krum(gram, f, 1)


@rule("multi_krum")
def multi_krum(gram: Gram, *, f: ByzantineCount, m: PositiveInt | None = None) -> LinearCombination:
    """Average the m updates with the smallest Krum scores (Blanchard et al. 2017).

    The Krum score of an update is the sum of its squared distances to the n - f - 2 nearest other updates.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, n >= f + 3.
        m: number of updates to average, 1 <= m <= n. None: n - f.

    Returns the mean [d]. Cost: one n x n x d matrix product.

    >>> fedsim.aggregate(torch.tensor([[1.0], [1.1], [1.3], [1.6], [99.0]]), "multi_krum", f=1)
    tensor([1.2500])
    """
    n = len(gram)
    require(n >= f + 3, "multi_krum", "n >= f + 3", f=f, n=n)
    m = n - f if m is None else m
    require(1 <= m <= n, "multi_krum", "1 <= m <= n", m=m, n=n)
    return _mean_of_least_krum(gram, f, m)


def _mean_of_least_krum(gram: Gram, f: int, count: int) -> LinearCombination:
    """Return the mean of the `count` updates with the smallest Krum scores."""
    scores_of = partial(krum_scores, f=f)
    return mean_of_least(scores_of(gram.squares_deciding(scores_of, count)), count)


def mean_of_least(values: Tensor, count: int) -> LinearCombination:
    """Return the mean of the `count` updates with the smallest `values` [n]."""
    return average_of(stable_order(values)[:count], len(values))


def krum_scores(squared_distances: Tensor, f: int) -> Tensor:
    """Return each update's Krum score, [n]: the sum of squared distances to its n - f - 2 nearest other updates."""
    n = len(squared_distances)
    others = np.array(squared_distances.numpy())
    others.flat[:: n + 1] = math.inf
    others.sort(axis=1)
    return torch.from_numpy(others[:, : max(0, n - f - 2)].sum(1))


@rule("bulyan")
def bulyan(gram: Gram, *, f: ByzantineCount) -> LinearCombination:
    """Select updates with repeated Krum, then average each coordinate around its median (El Mhamdi et al. 2018).

    Krum selects theta = n - 2f updates one after another. When n' updates are left, a Krum score is the sum of squared
    distances to the n' - f - 2 nearest neighbours (at least one). Each coordinate of the result is the mean of the
    theta - 2f selected values nearest the median of the selected values.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, n >= 4f + 3.

    Returns the aggregate [d]. Cost: one n x n x d matrix product, n^3 log n operations for the scores, and n log n
    comparisons per coordinate.

    >>> updates = torch.tensor([[1.0], [1.1], [1.2], [1.3], [1.4], [1.5], [99.0]])
    >>> fedsim.aggregate(updates, "bulyan", f=1)
    tensor([1.2000])
    """
    n = len(gram)
    require(n >= 4 * f + 3, "bulyan", "n >= 4f + 3", f=f, n=n)
    picked = torch.eye(n, dtype=torch.double)[_picked_by_krum(gram.squared_distances, f, n - 2 * f)]
    everything = tuple(range(len(picked)))

    def around_median(rows: Tensor) -> Tensor:
        ascending = sorted_columns(rows, everything)
        return mean_nearest(ascending, rows, middle(ascending), n - 4 * f)

    return LinearCombination(picked, then=around_median)


def _picked_by_krum(squared_distances: Tensor, f: int, count: int) -> Tensor:
    """Select `count` of the n updates by repeated Krum. Returns a mask, bool [n]."""
    n = len(squared_distances)
    others = squared_distances.clone().fill_diagonal_(math.inf).sort(dim=1)
    left = torch.ones(n, dtype=torch.bool)
    for size in range(n, n - count, -1):
        is_left = left[others.indices]  # one sort suffices, because removing rows keeps the order of the remaining rows
        neighbours = max(1, size - f - 2)
        nearest = is_left & (is_left.cumsum(1) <= neighbours)
        scores = torch.where(nearest, others.values, 0).sum(1)[left]
        left[left.nonzero().flatten()[stable_order(scores)[0]]] = False
    return ~left


@rule("mda")
def mda(gram: Gram, *, f: ByzantineCount) -> LinearCombination:
    """Average the set of n - f updates with the smallest diameter (minimum-diameter averaging, El Mhamdi et al. 2021).

    The diameter of a set is its largest pairwise distance. Of sets with equal diameters, the lexicographically first
    one is averaged.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the mean [d]. Raises ExperimentError if the search could need more than 2^20 branches. Cost: one n x n x d
    matrix product, and a search of at most 2^f branches.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), "mda", f=1)
    tensor([2.])
    """
    n = len(gram)
    require(2 * f < n, "mda", "2f < n", f=f, n=n)
    return average_of(torch.tensor(least_diameter(gram.squared_distances, f)), n)


@rule("smea")
def smea(gram: Gram, *, f: ByzantineCount) -> LinearCombination:
    """Average the set of n - f updates with the smallest maximal variance in any direction (Allouah et al. 2023).

    Smallest maximum eigenvalue averaging (SMEA) chooses the set whose empirical covariance has the smallest maximal
    eigenvalue. Of sets with equal eigenvalues, the lexicographically first one is averaged. The paper is
    "Robust Distributed Learning: Tight Error Bounds and Breakdown Point under Data Heterogeneity", NeurIPS 2023.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the mean [d]. Raises ExperimentError for more than 2^17 sets. Cost: one n x n x d matrix product, and the
    eigenvalues of an [n - f, n - f] matrix for each of the C(n, f) sets.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), "smea", f=1)
    tensor([2.])
    """
    n = len(gram)
    require(2 * f < n, "smea", "2f < n", f=f, n=n)
    return average_of(torch.tensor(least_covariance(gram.squared_distances, f)), n)


@rule("medoid")
def medoid(gram: Gram) -> LinearCombination:
    """Select the update with the smallest sum of distances to all other updates (Kaufman and Rousseeuw 1987).

    Of equal sums, the first worker's update is selected.

    Args:
        gram: distances and inner products of the updates [n, d], n >= 1.

    Returns the selected update [d]. Cost: one n x n x d matrix product.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), "medoid")
    tensor([2.])
    """
    distances = gram.squares_deciding(lambda squares: squares.sqrt().sum(1), 1).sqrt().numpy()
    require_finite(distances, "medoid")
    others = distances.copy()
    np.fill_diagonal(others, math.inf if len(gram) > 1 else 0)
    beyond = distances - others.min(0)  # otherwise an outlier's large distance would make all sums count as equal
    sums = beyond.sum(1)
    best = int(sums.argmin())
    rounding = max(TIED * np.abs(beyond[best]).sum(), np.finfo(float).eps * distances[best].sum())
    return average_of(torch.from_numpy(sums - sums[best] <= rounding).nonzero().flatten()[:1], len(gram))


@rule("cge")
def cge(updates: Tensor, *, f: ByzantineCount) -> LinearCombination:
    """Average the n - f updates with the smallest norms (comparative gradient elimination, Gupta et al. 2021).

    Of equal norms, those of the first workers are chosen.

    Args:
        updates: updates of the n workers, [n, d].
        f: number of Byzantine workers, f < n.

    Returns the mean [d]. Cost: two passes over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [99.0]]), "cge", f=1)
    tensor([1.5000])
    """
    n = len(updates)
    require(f < n, "cge", "f < n", f=f, n=n)
    return mean_of_least(norms(updates), n - f)


@rule("aksel")
def aksel(updates: Tensor, *, f: ByzantineCount) -> LinearCombination:
    """Average the n - f updates nearest the coordinate-wise median (Boussetta et al. 2021).

    Of equally near updates, those of the first workers are chosen.

    Args:
        updates: updates of the n workers, [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the mean [d]. Cost: the median, and one more pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [99.0]]), "aksel", f=1)
    tensor([1.5000])
    """
    n = len(updates)
    require(2 * f < n, "aksel", "2f < n", f=f, n=n)
    return mean_of_least(distances_to(updates, median(updates)), n - f)


@rule("monna")
def monna(updates: Tensor, workers: list[int], *, f: ByzantineCount, row: NonNegativeInt = 0) -> LinearCombination:
    """Average a trusted worker's update and the n - f - 1 updates nearest to it (Farhadkhani et al. 2023).

    Of equally near updates, those of the first workers are chosen.

    Args:
        updates: updates of the n workers, [n, d].
        workers: IDs of the n workers.
        f: number of Byzantine workers, f < n.
        row: ID of the trusted worker.

    Returns the mean [d]. Raises ExperimentError if the trusted worker is not in the cohort. Cost: two passes over the
    updates.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [99.0]]), "monna", f=1)
    tensor([1.5000])
    """
    n = len(updates)
    require(f < n, "monna", "f < n", f=f, n=n)
    if row not in workers:
        raise ExperimentError(
            f"monna: row = {row}: must be the ID of a worker in the cohort (the trusted worker), one of {workers}"
        )
    trusted = workers.index(row)
    away = distances_to(updates, updates[trusted])
    away[trusted] = -1  # the trusted row comes before rows that are equal to it
    return mean_of_least(away, n - f)
