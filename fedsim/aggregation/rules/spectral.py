"""Rules that find outliers along top singular vectors or in the statistics of signs."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.aggregation.mean_shift import bandwidth_of, mean_shift
from fedsim.aggregation.numerics.columns import most_columns, norms
from fedsim.aggregation.numerics.gram import TIED, Gram, require_no_overflow
from fedsim.aggregation.rule import Count, LinearCombination, Positive, average_of, require, rule
from fedsim.aggregation.rules.clipping import clip_factors
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype

MARGIN = 1e-9  # added before rounding down, since 0.29 times 100 is less than 29 in floating point
SAMPLE_BLOCK = 512  # drawn columns of a block on a CPU
EIGENVECTOR_ERROR = 8 * np.finfo(float).eps  # of its largest number
EQUAL_POINTS = 1e-7  # scikit-learn rounds the distance of equal points up to sqrt(eps); different shares differ by more
NORM_RANGE = (0.1, 3.0)  # SignGuard: of the median norm


@rule("caf")
def caf(gram: Gram, *, f: Count) -> LinearCombination:
    """Covariance-bound agnostic filter: lowers outliers' weights until n - 2f weight is left (Allouah et al. 2025).

    All weights c_k start at 1. While sum c > n - 2f: v is the top eigenvector of the weighted covariance, t_k = <x_k -
    mean, v>^2, and c_k *= 1 - t_k / max t over the rows with c > 0. The result is the weighted mean with the least top
    eigenvalue.

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, 2f < n.

    Returns [d]. Cost: one n x n x d matrix product, then at most n eigenvectors of [n, n] matrices.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), rule="caf", f=1)
    tensor([2.0069])
    """
    n = len(gram)
    require(2 * f < n, "caf", "2f < n", f=f, n=n)
    offsets, c = gram.offsets, np.ones(n)
    best, least = c / n, math.inf
    while True:
        shares = c / c.sum()
        to_mean = (offsets @ torch.from_numpy(shares)).numpy()
        centred = offsets.numpy() - to_mean - to_mean[:, None] + (shares * to_mean).sum()
        roots = np.sqrt(shares)
        values, vectors = torch.linalg.eigh(torch.from_numpy(roots[:, None] * centred * roots))
        top = float(values[-1])
        if top < least:
            best, least = shares, top
        along = np.abs((torch.from_numpy(centred) @ torch.from_numpy(roots * vectors.numpy()[:, -1])).numpy())
        highest = along[c > 0].max()
        if highest <= 0:  # all rows with weight are equal
            break
        with np.errstate(all="ignore"):  # a row with weight 0 may be at any distance
            c = c * (1 - (along / highest) ** 2)
            c = np.where(c > TIED, c, 0)  # a smaller weight is a rounding error
        if c.sum() <= n - 2 * f:
            break
    return LinearCombination(torch.from_numpy(best))


@rule("dnc")
def dnc(
    updates: Tensor,
    draws: Draws,
    *,
    f: Count,
    b: PositiveInt = 10_000,
    c: Positive = 1.0,
    iterations: PositiveInt = 1,
) -> LinearCombination:
    """Divide and conquer: drops the rows farthest along the top singular vector (Shejwalkar and Houmansadr 2021).

    Each iteration draws b coordinates (all if d <= b), centres the rows, and keeps the n - floor(c f) rows with the
    smallest squared projection on the top right singular vector. The result is the mean of the rows that every
    iteration keeps.

    Args:
        updates: [n, d].
        draws: draws the coordinates.
        f: number of Byzantine rows, c f < n.
        b: number of coordinates.
        c: each iteration drops floor(c f) rows.
        iterations: >= 1.

    Returns [d]. Raises ExperimentError if the iterations keep no common row. Cost: [n, b] singular vectors per
    iteration.

    >>> fedsim.aggregate(torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0], [99.0, 9.0]]), rule="dnc", f=1)
    tensor([2.0000, 0.3333])
    """
    n, d = updates.shape
    dropped = int(c * f + MARGIN)
    require(dropped < n, "dnc", "c f < n", c=c, f=f, n=n)
    is_kept = torch.ones(n, dtype=torch.bool)
    for _ in range(iterations):
        columns = draws.choice(d, min(b, d))
        values, vectors = torch.linalg.eigh(_centred_products(updates, columns))
        along = vectors[:, -1].square() * values[-1].clamp(min=0)
        good = torch.zeros(n, dtype=torch.bool)
        good[_ascending(along)[: n - dropped]] = True
        is_kept &= good
    if not bool(is_kept.any()):
        raise ExperimentError(
            f"dnc: {iterations} iterations have no row in common (n = {n}, f = {f}, c = {c}); use fewer, or a smaller c"
        )
    return average_of(is_kept.nonzero().flatten(), n)


def _centred_products(updates: Tensor, columns: Tensor) -> Tensor:
    """Inner products float64 [n, n] of the rows less their mean, at these columns."""
    n, wide = len(updates), wide_dtype(updates.device)
    products = torch.zeros(n, n, dtype=wide, device=updates.device)
    for part in _parts(updates, columns):
        rows = updates[:, part].to(wide)
        rows -= rows.mean(0)
        products.addmm_(rows, rows.t())
    products = products.cpu().double()
    require_no_overflow(products, updates)
    return products


def _parts(updates: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    return columns.split(SAMPLE_BLOCK if updates.device.type == "cpu" else most_columns(len(updates), updates.device))


def _ascending(along: Tensor) -> Tensor:
    """Positions of squared projections [n] in ascending order, ties to the lowest index.

    Projections that differ by no more than the rounding error of the eigenvector are ties.
    """
    values = along.numpy()
    order = values.argsort(kind="stable")
    ascending, top = values[order], values.max()
    rounding = EIGENVECTOR_ERROR * np.sqrt(np.maximum(ascending[:-1], EIGENVECTOR_ERROR**2 * top)) * np.sqrt(top)
    rank = np.zeros(len(values), dtype=int)
    rank[order[1:]] = (np.diff(ascending) > rounding).cumsum()
    return torch.from_numpy(rank.argsort(kind="stable"))


@rule("signguard")
def signguard(
    updates: Tensor, draws: Draws, *, fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
) -> LinearCombination:
    """The mean of rows with usual norms and usual signs, clipped to the median norm (Xu et al. 2022).

    A row passes the norm filter if its norm is within 0.1 and 3 times the median norm. The shares of positive, zero and
    negative values in a random `fraction` of the coordinates are clustered by mean shift; the largest cluster passes.
    The result is the mean of x min(1, median norm / |x|) over the rows that pass both filters.

    Args:
        updates: [n, d], n >= 1, d >= 1.
        draws: draws the coordinates.
        fraction: 0 < fraction <= 1.

    Returns [d]. Raises ExperimentError if no row passes. Cost: two passes over the updates.

    >>> updates = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.5, 1.5], [-99.0, -99.0]])
    >>> fedsim.aggregate(updates, rule="signguard", fraction=1.0).round(decimals=1)
    tensor([1.5000, 1.5000])
    """
    n, d = updates.shape
    require(d >= 1, "signguard", "d >= 1", d=d)
    lengths = norms(updates)
    typical = float(lengths.quantile(0.5))
    ordinary = (lengths >= NORM_RANGE[0] * typical) & (lengths <= NORM_RANGE[1] * typical)
    columns = draws.choice(d, max(1, int(fraction * d + MARGIN)))
    selected = (ordinary & _largest_cluster(_sign_shares(updates, columns))).nonzero().flatten()
    if not len(selected):
        raise ExperimentError(f"signguard: none of the {n} rows passes both filters")
    coefficients = torch.zeros(n, dtype=torch.double)
    coefficients[selected] = clip_factors(lengths[selected], typical) / len(selected)
    return LinearCombination(coefficients)


def _sign_shares(updates: Tensor, columns: Tensor) -> Tensor:
    """Return the shares of positive, zero and negative values of each row at these columns, [n, 3]."""
    counts = torch.zeros(len(updates), 3, dtype=torch.int64, device=updates.device)
    for part in _parts(updates, columns):
        signs = updates[:, part].sign()
        counts += torch.stack([(signs == value).sum(1) for value in (1, 0, -1)], dim=1)
    return counts.cpu().double() / len(columns)


def _largest_cluster(features: Tensor) -> Tensor:
    """Which rows belong to the largest cluster that mean shift finds, [n] bool; of equally large ones the first."""
    points = features.numpy()
    bandwidth = bandwidth_of(points)
    if bandwidth < EQUAL_POINTS:  # most rows are the same point
        labels = np.unique(points, axis=0, return_inverse=True)[1].reshape(-1)
    else:
        labels = mean_shift(points, bandwidth)
    clusters = [label for label in dict.fromkeys(labels.tolist()) if label >= 0]
    if not clusters:
        return torch.ones(len(features), dtype=torch.bool)
    largest = max(clusters, key=lambda label: int((labels == label).sum()))
    return torch.from_numpy(labels == largest)
