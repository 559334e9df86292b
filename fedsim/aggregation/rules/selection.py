"""Rules that select rows by their distances or norms, and average them."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_to, norms
from fedsim.aggregation.numerics.gram import TIED, Gram, stable_order
from fedsim.aggregation.numerics.sorting import mean_nearest, middle, sorted_columns
from fedsim.aggregation.numerics.subset_search import least_covariance, least_diameter
from fedsim.aggregation.rule import Count, LinearCombination, average_of, require, rule
from fedsim.aggregation.rules.order_statistics import median
from fedsim.errors import ExperimentError


@rule("krum")
def krum(gram: Gram, *, f: Count) -> LinearCombination:
    """The row with the least sum of squared distances to its n - f - 2 nearest others (Blanchard et al. 2017).

    Ties go to the lowest index.

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, n >= 2f + 3.

    Returns [d]. Cost: one n x n x d matrix product.

    >>> fedsim.aggregate(torch.tensor([[1.0], [1.1], [1.3], [1.6], [99.0]]), rule="krum", f=1)
    tensor([1.1000])
    """
    n = len(gram)
    require(n >= 2 * f + 3, "krum", "n >= 2f + 3", f=f, n=n)
    return mean_of_least(krum_scores(gram.squared_distances, f), 1)


@rule("multi_krum")
def multi_krum(gram: Gram, *, f: Count, m: Annotated[int, Field(ge=1)] | None = None) -> LinearCombination:
    """The mean of the m rows with the best Krum scores (Blanchard et al. 2017).

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, n >= f + 3.
        m: 1 <= m <= n; None: n - f.

    Returns [d]. Cost: one n x n x d matrix product.

    >>> fedsim.aggregate(torch.tensor([[1.0], [1.1], [1.3], [1.6], [99.0]]), rule="multi_krum", f=1)
    tensor([1.2500])
    """
    n = len(gram)
    require(n >= f + 3, "multi_krum", "n >= f + 3", f=f, n=n)
    m = n - f if m is None else m
    require(1 <= m <= n, "multi_krum", "1 <= m <= n", m=m, n=n)
    return mean_of_least(krum_scores(gram.squared_distances, f), m)


def mean_of_least(values: Tensor, count: int) -> LinearCombination:
    """The mean of the `count` rows with the least `values` [n]; ties go to the lowest index."""
    return average_of(stable_order(values)[:count], len(values))


def krum_scores(squared_distances: Tensor, f: int) -> Tensor:
    """Sum of the squared distances of each row to its n - f - 2 nearest others, [n]."""
    n = len(squared_distances)
    others = np.array(squared_distances.numpy())
    np.fill_diagonal(others, math.inf)
    others.sort(axis=1)
    return torch.from_numpy(others[:, : max(0, n - f - 2)].sum(1))


@rule("bulyan")
def bulyan(gram: Gram, *, f: Count) -> LinearCombination:
    """Krum repeated, then a mean around the median of the selected rows (El Mhamdi et al. 2018).

    Krum selects theta = n - 2f rows one after another, each time from the n' remaining rows, whose scores count the
    n' - f - 2 nearest neighbours, at least one. The result is per coordinate the mean of the theta - 2f selected
    values nearest their median.

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, n >= 4f + 3.

    Returns [d]. Cost: one n x n x d matrix product, n^3 log n for the scores, and n log n comparisons per coordinate.

    >>> updates = torch.tensor([[1.0], [1.1], [1.2], [1.3], [1.4], [1.5], [99.0]])
    >>> fedsim.aggregate(updates, rule="bulyan", f=1)
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
    """Whether repeated Krum selects each row, bool [n]."""
    n = len(squared_distances)
    others = squared_distances.clone().fill_diagonal_(math.inf).sort(dim=1)
    left = torch.ones(n, dtype=torch.bool)
    for size in range(n, n - count, -1):
        is_left = left[others.indices]  # one sort suffices: removing rows keeps the order of the others
        neighbours = max(1, size - f - 2)
        nearest = is_left & (is_left.cumsum(1) <= neighbours)
        scores = torch.where(nearest, others.values, 0).sum(1)[left]
        left[left.nonzero().flatten()[stable_order(scores)[0]]] = False
    return ~left


@rule("mda")
def mda(gram: Gram, *, f: Count) -> LinearCombination:
    """Minimum diameter averaging: the mean of the n - f rows of least diameter (El Mhamdi et al. 2021).

    Of all sets of n - f rows, the set with the least greatest pairwise distance; on ties the lexicographically first.

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, 2f < n.

    Returns [d]. Raises ExperimentError if the search could take more than 2^20 branches. Cost: one n x n x d matrix
    product, and a search of at most 2^f branches.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), rule="mda", f=1)
    tensor([2.])
    """
    n = len(gram)
    require(2 * f < n, "mda", "2f < n", f=f, n=n)
    return average_of(torch.tensor(least_diameter(gram.squared_distances, f)), n)


@rule("smea")
def smea(gram: Gram, *, f: Count) -> LinearCombination:
    """Smallest maximum eigenvalue averaging: the mean of the n - f rows of least spread (Allouah et al. 2023).

    Of all sets of n - f rows, the set whose empirical covariance has the smallest maximal eigenvalue; on ties the
    lexicographically first. "Robust Distributed Learning: Tight Error Bounds and Breakdown Point under Data
    Heterogeneity", NeurIPS 2023.

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, 2f < n.

    Returns [d]. Raises ExperimentError for more than 2^17 sets. Cost: one n x n x d matrix product, and the
    eigenvalues of an [n - f, n - f] matrix for each of the C(n, f) sets.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), rule="smea", f=1)
    tensor([2.])
    """
    n = len(gram)
    require(2 * f < n, "smea", "2f < n", f=f, n=n)
    return average_of(torch.tensor(least_covariance(gram.squared_distances, f)), n)


@rule("medoid")
def medoid(gram: Gram) -> LinearCombination:
    """The row with the least sum of distances to all others (Kaufman and Rousseeuw 1987).

    Ties go to the lowest index.

    Args:
        gram: of the updates [n, d], n >= 1.

    Returns [d]. Cost: one n x n x d matrix product.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), rule="medoid")
    tensor([2.])
    """
    distances = gram.distances.numpy()
    others = distances.copy()
    np.fill_diagonal(others, math.inf if len(gram) > 1 else 0)
    beyond = distances - others.min(0)  # without this, an outlier's distance would make all sums count as ties
    sums = beyond.sum(1)
    best = int(sums.argmin())
    rounding = max(TIED * np.abs(beyond[best]).sum(), np.finfo(float).eps * distances[best].sum())
    return average_of(torch.from_numpy(sums - sums[best] <= rounding).nonzero().flatten()[:1], len(gram))


@rule("cge")
def cge(updates: Tensor, *, f: Count) -> LinearCombination:
    """Comparative gradient elimination: the mean of the n - f rows of least norm (Gupta et al. 2021).

    Ties go to the lowest index.

    Args:
        updates: [n, d].
        f: number of Byzantine rows, f < n.

    Returns [d]. Cost: two passes over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [99.0]]), rule="cge", f=1)
    tensor([1.5000])
    """
    n = len(updates)
    require(f < n, "cge", "f < n", f=f, n=n)
    return mean_of_least(norms(updates), n - f)


@rule("aksel")
def aksel(updates: Tensor, *, f: Count) -> LinearCombination:
    """The mean of the n - f rows nearest the coordinate-wise median (Boussetta et al. 2021).

    Ties go to the lowest index.

    Args:
        updates: [n, d].
        f: number of Byzantine rows, 2f < n.

    Returns [d]. Cost: the median, and one more pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [99.0]]), rule="aksel", f=1)
    tensor([1.5000])
    """
    n = len(updates)
    require(2 * f < n, "aksel", "2f < n", f=f, n=n)
    return mean_of_least(distances_to(updates, median(updates)), n - f)


@rule("monna")
def monna(updates: Tensor, workers: list[int], *, f: Count, row: Annotated[int, Field(ge=0)] = 0) -> LinearCombination:
    """The mean of the n - f rows nearest a trusted row, itself included (Farhadkhani et al. 2023).

    Ties go to the lowest index.

    Args:
        updates: [n, d].
        workers: the n workers' numbers.
        f: number of Byzantine rows, f < n.
        row: the number of the trusted worker.

    Returns [d]. Raises ExperimentError if the trusted worker does not take part. Cost: two passes over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [99.0]]), rule="monna", f=1)
    tensor([1.5000])
    """
    n = len(updates)
    require(f < n, "monna", "f < n", f=f, n=n)
    if row not in workers:
        raise ExperimentError(f"monna: the trusted row = {row} is not among the workers {workers}")
    trusted = workers.index(row)
    away = distances_to(updates, updates[trusted])
    away[trusted] = -1  # before any row that equals it
    return mean_of_least(away, n - f)
