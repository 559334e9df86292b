"""Rules that find outliers along top singular vectors, or from the signs of the coordinates."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.mean_shift import bandwidth_of, mean_shift
from fedsim.aggregation.numerics.columns import distances_on_device, most_columns, on_host
from fedsim.aggregation.numerics.gram import TIED, Gram, require_no_overflow
from fedsim.aggregation.rule import ByzantineCount, LinearCombination, average_of, require, require_finite, rule
from fedsim.aggregation.rules.clipping import clip_factors
from fedsim.core.numbers import Iterations, PositiveFloat, PositiveFraction, PositiveInt
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype

MARGIN = 1e-9  # added before rounding down, because 0.29 * 100 is less than 29 in floating point
SAMPLE_BLOCK = 512  # number of drawn columns in a block on a CPU
EIGENVECTOR_ERROR = 8 * np.finfo(float).eps  # rounding error relative to the largest component
EQUAL_POINTS = 1e-7  # points at a smaller distance are equal; scikit-learn may return sqrt(eps) for equal points
NORM_RANGE = (0.1, 3.0)  # norms that pass SignGuard's filter, relative to the median norm


@rule("caf")
def caf(gram: Gram, *, f: ByzantineCount) -> LinearCombination:
    """Average the updates after lowering the weights of outliers step by step (CAF, Allouah et al. 2025).

    The covariance-bound agnostic filter starts with weight c_k = 1 for each update x_k. Each step computes the top
    eigenvector v of the weighted covariance, and t_k = <x_k - mean, v>^2. Then each c_k is multiplied by 1 - t_k / max
    t, where the maximum is over the updates with c > 0. The steps end when sum_k c_k <= n - 2f. The result is the
    weighted mean of the step whose covariance has the smallest top eigenvalue.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the weighted mean [d]. Cost: one n x n x d matrix product, then at most n eigenvectors of [n, n] matrices.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), "caf", f=1)
    tensor([2.0069])
    """
    n = len(gram)
    require(2 * f < n, "caf", "2f < n", f=f, n=n)
    offsets, c = gram.offsets, np.ones(n)
    require_finite(offsets.numpy(), "caf")
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
    f: ByzantineCount,
    b: PositiveInt = 10_000,
    c: PositiveFloat = 1.0,
    iterations: Iterations = 1,
) -> LinearCombination:
    """Average the updates except those farthest along the top singular vector (DnC, Shejwalkar and Houmansadr 2021).

    Each iteration of divide-and-conquer draws b coordinates (all if d <= b), centres the updates, and keeps the
    n - floor(c f) updates with the smallest squared projections on the top right singular vector. The result is the
    mean of the updates that all iterations keep.

    Args:
        updates: updates of the n workers, [n, d].
        draws: draws the coordinates.
        f: number of Byzantine workers, c f < n.
        b: number of coordinates, >= 1.
        c: filtering fraction, > 0: each iteration drops floor(c f) updates.
        iterations: number of iterations, >= 1.

    Returns the mean [d]. Raises ExperimentError if no update is kept by all iterations. Cost: singular vectors of an
    [n, b] matrix per iteration.

    >>> fedsim.aggregate(torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0], [99.0, 9.0]]), "dnc", f=1)
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
            f"dnc: no update is kept by all {iterations} iterations (n = {n} updates, f = {f}, c = {c}); reduce "
            "iterations or c"
        )
    return average_of(is_kept.nonzero().flatten(), n)


def _centred_products(updates: Tensor, columns: Tensor) -> Tensor:
    """Return the inner products of the updates minus their mean, over the given columns only: float64 [n, n]."""
    n, wide = len(updates), wide_dtype(updates.device)
    products = torch.zeros(n, n, dtype=wide, device=updates.device)
    for part in _parts(updates, columns):
        rows = updates[:, part].to(wide)
        rows -= rows.mean(0)
        products.addmm_(rows, rows.t())
    # The products depend on some columns only, but `on_host` needs numbers that depend on all values.
    products = on_host(products, updates.sum(1, dtype=wide))[0] if updates.is_cuda else products.cpu().double()
    require_no_overflow(products, updates)
    require_finite(products.numpy(), "dnc")
    return products


def _parts(updates: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    return columns.split(SAMPLE_BLOCK if updates.device.type == "cpu" else most_columns(len(updates), updates.device))


def _ascending(along: Tensor) -> Tensor:
    """Return the indices that sort the squared projections `along` [n] in ascending order.

    Values that differ only by rounding count as equal, and keep their order.
    """
    values = along.numpy()
    order = values.argsort(kind="stable")
    ascending, top = values[order], values.max()
    rounding = EIGENVECTOR_ERROR * np.sqrt(np.maximum(ascending[:-1], EIGENVECTOR_ERROR**2 * top)) * np.sqrt(top)
    rank = np.zeros(len(values), dtype=int)
    rank[order[1:]] = (np.diff(ascending) > rounding).cumsum()
    return torch.from_numpy(rank.argsort(kind="stable"))


@rule("signguard")
def signguard(updates: Tensor, draws: Draws, *, fraction: PositiveFraction = 0.1) -> LinearCombination:
    """Average the updates with typical norms and signs, clipped to the median norm (SignGuard, Xu et al. 2022).

    An update passes the norm filter if its norm is between 0.1 and 3 times the median norm. The sign filter counts
    positive, zero and negative values in a random `fraction` of the coordinates, and clusters the updates by these
    counts (mean shift). The updates in the largest cluster pass. The result is the mean of x min(1, median norm / |x|)
    over the updates x that pass both filters.

    Args:
        updates: updates of the n workers, [n, d], n >= 1, d >= 1.
        draws: draws the coordinates.
        fraction: fraction of the coordinates whose signs are counted, 0 < fraction <= 1.

    Returns the mean [d]. Raises ExperimentError if no update passes both filters. Cost: two passes over the updates.

    >>> updates = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.5, 1.5], [-99.0, -99.0]])
    >>> fedsim.aggregate(updates, "signguard", fraction=1.0).round(decimals=1)
    tensor([1.5000, 1.5000])
    """
    n, d = updates.shape
    require(d >= 1, "signguard", "d >= 1", d=d)
    columns = draws.choice(d, max(1, int(fraction * d + MARGIN)))
    lengths, counts = on_host(distances_on_device(updates, None), _sign_counts(updates, columns))
    typical = float(lengths.quantile(0.5))
    ordinary = (lengths >= NORM_RANGE[0] * typical) & (lengths <= NORM_RANGE[1] * typical)
    selected = (ordinary & _largest_cluster(counts / len(columns))).nonzero().flatten()
    if not len(selected):
        raise ExperimentError(
            f"signguard: none of the {n} updates passes both filters (norms and signs); use another rule"
        )
    coefficients = torch.zeros(n, dtype=torch.double)
    coefficients[selected] = clip_factors(lengths[selected], typical) / len(selected)
    return LinearCombination(coefficients)


def _sign_counts(updates: Tensor, columns: Tensor) -> Tensor:
    """Return the numbers of positive, zero and negative values of each update in the given columns, [n, 3]."""
    counts = torch.zeros(len(updates), 3, dtype=torch.int64, device=updates.device)
    for part in _parts(updates, columns):
        signs = updates[:, part].sign()
        counts += torch.stack([(signs == value).sum(1) for value in (1, 0, -1)], dim=1)
    return counts


def _largest_cluster(features: Tensor) -> Tensor:
    """Return a mask of the points in the largest cluster, bool [n]. The rows of `features` [n, 3] are the points."""
    points = features.numpy()
    bandwidth = bandwidth_of(points)
    if bandwidth < EQUAL_POINTS:  # most points are equal
        labels = np.unique(points, axis=0, return_inverse=True)[1].reshape(-1)
    else:
        labels = mean_shift(points, bandwidth)
    clusters = [label for label in dict.fromkeys(labels.tolist()) if label >= 0]
    if not clusters:
        return torch.ones(len(features), dtype=torch.bool)
    largest = max(clusters, key=lambda label: int((labels == label).sum()))
    return torch.from_numpy(labels == largest)
