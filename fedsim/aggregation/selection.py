"""Rules that select rows by their distances or norms, and average what they selected."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsim.aggregation.columns import distances_to, norms
from fedsim.aggregation.diameter import least_diameter
from fedsim.aggregation.gram import TIED, Gram, stable_order
from fedsim.aggregation.order_statistics import median
from fedsim.aggregation.rule import Count, Mix, average_of, require, rule
from fedsim.aggregation.sorting import mean_nearest, middle, of_sorted_columns
from fedsim.errors import ExperimentError


@rule("krum")
def krum(gram: Gram, *, f: Count) -> Mix:
    """The row with the least sum of squared distances to its n - f - 2 nearest others (Blanchard et al. 2017).

    Needs n >= 2f + 3. Ties: the lowest index. Updates [n, d], result [d]. Cost: one n x n x d matrix product.
    """
    n = len(gram)
    require(n >= 2 * f + 3, "krum", "n >= 2f + 3", f=f, n=n)
    return average_of(stable_order(krum_scores(gram.squared_distances, f))[:1], n)


@rule("multi_krum")
def multi_krum(gram: Gram, *, f: Count, m: Annotated[int, Field(ge=1)] | None = None) -> Mix:
    """The mean of the m rows with the best Krum scores, by default m = n - f (Blanchard et al. 2017).

    Needs 1 <= m <= n and n >= f + 3, without which scores mean nothing. Updates [n, d], result [d]. Cost: one n x n x d
    matrix product.
    """
    n = len(gram)
    require(n >= f + 3, "multi_krum", "n >= f + 3", f=f, n=n)
    m = n - f if m is None else m
    require(1 <= m <= n, "multi_krum", "1 <= m <= n", m=m, n=n)
    return average_of(stable_order(krum_scores(gram.squared_distances, f))[:m], n)


def krum_scores(squared_distances: Tensor, f: int) -> Tensor:
    """Sum of the squared distances of each row to its n - f - 2 nearest others, [n]."""
    n = len(squared_distances)
    others = np.array(squared_distances.numpy())
    np.fill_diagonal(others, math.inf)
    others.sort(axis=1)
    return torch.from_numpy(others[:, : max(0, n - f - 2)].sum(1))


@rule("bulyan")
def bulyan(gram: Gram, *, f: Count) -> Mix:
    """Krum repeated, then a mean around the median of what it picked (El Mhamdi et al. 2018).

    theta = n - 2f rows are picked by Krum one by one, scores recomputed without those picked before; then per
    coordinate the mean of the theta - 2f picked values nearest their median. A row is scored by at least one neighbour,
    also where n' - f - 2 = 0 of the n' rows left (the last pick with f = 1). Needs n >= 4f + 3. Updates [n, d], result
    [d]. Cost: one n x n x d matrix product, n^3 log n for the scores, and n log n comparisons per coordinate.
    """
    n = len(gram)
    require(n >= 4 * f + 3, "bulyan", "n >= 4f + 3", f=f, n=n)
    picked = torch.eye(n, dtype=torch.double)[_picked_by_krum(gram.squared_distances, f, n - 2 * f)]
    keep = n - 4 * f

    def around_median(ascending: Tensor, block: Tensor) -> Tensor:
        return mean_nearest(ascending, block, middle(ascending), keep)

    return Mix(picked, then=lambda rows: of_sorted_columns(rows, around_median))


def _picked_by_krum(squared_distances: Tensor, f: int, count: int) -> Tensor:
    """The rows that Krum picks one by one, each time of those that are left, bool [n].

    Of n' rows that are left each is scored by its n' - f - 2 nearest, but by at least one.
    """
    n = len(squared_distances)
    others = squared_distances.clone().fill_diagonal_(math.inf).sort(dim=1)
    left = torch.ones(n, dtype=torch.bool)
    for size in range(n, n - count, -1):
        is_left = left[others.indices]  # sorted once: those that are left stay in order
        neighbours = max(1, size - f - 2)
        nearest = is_left & (is_left.cumsum(1) <= neighbours)
        scores = torch.where(nearest, others.values, 0).sum(1)[left]
        left[left.nonzero().flatten()[stable_order(scores)[0]]] = False
    return ~left


@rule("mda")
def mda(gram: Gram, *, f: Count) -> Mix:
    """Minimum diameter averaging: the mean of the n - f rows that lie closest together (El Mhamdi et al. 2021).

    Of all sets of n - f rows, the one whose greatest pairwise distance is least; the lexicographically first on ties.
    Needs 2f < n. Updates [n, d], result [d]. Cost: one n x n x d matrix product, and a search of at most 2^f branches,
    refused beyond 2^20.
    """
    n = len(gram)
    require(2 * f < n, "mda", "2f < n", f=f, n=n)
    return average_of(torch.tensor(least_diameter(gram.squared_distances, f)), n)


@rule("medoid")
def medoid(gram: Gram) -> Mix:
    """The row with the least sum of distances to all others. Ties: the lowest index.

    Any n >= 1. Updates [n, d], result [d]. After Kaufman and Rousseeuw 1987. Cost: one n x n x d matrix product.
    """
    distances = gram.distances.numpy()
    others = distances.copy()
    np.fill_diagonal(others, math.inf if len(gram) > 1 else 0)
    beyond = distances - others.min(0)  # of sums that hold an outlier's distance all would count as ties
    sums = beyond.sum(1)
    best = int(sums.argmin())
    rounding = max(TIED * np.abs(beyond[best]).sum(), np.finfo(float).eps * distances[best].sum())
    return average_of(torch.from_numpy(sums - sums[best] <= rounding).nonzero().flatten()[:1], len(gram))


@rule("cge")
def cge(updates: Tensor, *, f: Count) -> Mix:
    """Comparative gradient elimination: the mean of the n - f rows of least norm (Gupta et al. 2021).

    Needs f < n. Ties: the lowest index. Cost: two passes over the [n, d] updates.
    """
    n = len(updates)
    require(f < n, "cge", "f < n", f=f, n=n)
    return average_of(stable_order(norms(updates))[: n - f], n)


@rule("aksel")
def aksel(updates: Tensor, *, f: Count) -> Mix:
    """The mean of the n - f rows nearest the coordinate-wise median (Boussetta et al. 2021).

    Needs 2f < n. Ties: the lowest index. Cost: the median, and one further pass over the [n, d] updates.
    """
    n = len(updates)
    require(2 * f < n, "aksel", "2f < n", f=f, n=n)
    return average_of(stable_order(distances_to(updates, median(updates)))[: n - f], n)


@rule("monna")
def monna(updates: Tensor, workers: list[int], *, f: Count, row: Annotated[int, Field(ge=0)] = 0) -> Mix:
    """The mean of the n - f rows nearest the trusted row, itself included (Farhadkhani et al. 2023).

    `row` is the number of the trusted worker, which has to take part. Needs f < n. Ties: the lowest index. Cost: two
    passes over the [n, d] updates.
    """
    n = len(updates)
    require(f < n, "monna", "f < n", f=f, n=n)
    if row not in workers:
        raise ExperimentError(f"monna: the trusted row = {row} is not among the workers {workers}")
    trusted = workers.index(row)
    away = distances_to(updates, updates[trusted])
    away[trusted] = -1  # it counts itself before any row that equals it
    return average_of(stable_order(away)[: n - f], n)
