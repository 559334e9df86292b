"""Rules that look for what sticks out: along top singular vectors, or in the statistics of signs."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.aggregation.clipping import clip_factors
from fedsim.aggregation.columns import most_columns, norms
from fedsim.aggregation.gram import TIED, Gram
from fedsim.aggregation.magnitude import unit_for
from fedsim.aggregation.rule import Count, Mix, Positive, average_of, require, rule
from fedsim.errors import ExperimentError
from fedsim.randomness import Draws
from fedsim.system.devices import wide_dtype

ROUNDING = 1e-9  # 0.29 times 100 is 29
PART = 512  # columns, of those that were drawn, to work on at once on a CPU
ROUNDED = 8 * np.finfo(float).eps  # of an eigenvector's numbers
SAME = 1e-7  # scikit-learn's distance of equal points may be rounded up to sqrt(eps); shares differ by more
NORM_RANGE = (0.1, 3.0)  # SignGuard: of the median norm


@rule("caf")
def caf(gram: Gram, *, f: Count) -> Mix:
    """Covariance-bound agnostic filter: weights down what sticks out, until n - 2f weigh in (Allouah et al. 2025).

    All weights c_k start at 1. While sum c > n - 2f: of the weighted covariance take the top eigenvector v; row k's
    t_k = <x_k - mean, v>^2; c_k *= 1 - t_k / max t over the rows that still count. The result is the weighted mean
    at which the top eigenvalue was least. Needs 2f < n. Cost: one n x n x d matrix product, then at most n
    eigenvectors of [n, n] matrices, since all these vectors are combinations of the rows.
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
        if highest <= 0:  # all rows that count are the same
            break
        with np.errstate(all="ignore"):  # a row that does not count may be as far away as it likes
            c = c * (1 - (along / highest) ** 2)
            c = np.where(c > TIED, c, 0)  # what is left of a weight by rounding does not count
        if c.sum() <= n - 2 * f:
            break
    return Mix(torch.from_numpy(best))


@rule("dnc")
def dnc(
    updates: Tensor,
    draws: Draws,
    *,
    f: Count,
    b: PositiveInt = 10_000,
    c: Positive = 1.0,
    iterations: PositiveInt = 1,
) -> Mix:
    """Divide and conquer: drops the rows farthest along the top singular vector (Shejwalkar and Houmansadr 2021).

    Each iteration takes b coordinates at random (all of them where d <= b), centres the rows, and keeps the
    n - floor(c f) with the smallest squared projection on the top right singular vector. The result is the mean of
    the rows that every iteration kept; none is an error. Needs c f < n. Cost: [n, b] singular vectors per iteration.
    """
    n, d = updates.shape
    dropped = int(c * f + ROUNDING)
    require(dropped < n, "dnc", "c f < n", c=c, f=f, n=n)
    kept = torch.ones(n, dtype=torch.bool)
    for _ in range(iterations):
        columns = draws.choice(d, min(b, d))
        values, vectors = torch.linalg.eigh(_centred_products(updates, columns))
        along = vectors[:, -1].square() * values[-1].clamp(min=0)
        good = torch.zeros(n, dtype=torch.bool)
        good[_ascending(along)[: n - dropped]] = True
        kept &= good
    if not bool(kept.any()):
        raise ExperimentError(
            f"dnc: {iterations} iterations have no row in common (n = {n}, f = {f}, c = {c}); use fewer, or a smaller c"
        )
    return average_of(kept.nonzero().flatten(), n)


def _centred_products(updates: Tensor, columns: Tensor) -> Tensor:
    """Inner products of the rows less their mean at these columns, float64 [n, n], in a unit in which they fit."""
    n, wide = len(updates), wide_dtype(updates.device)
    parts = _parts(updates, columns)
    peak = max((float(torch.linalg.vector_norm(updates[:, part], torch.inf)) for part in parts), default=0.0)
    unit = unit_for(peak, n * n * len(columns), wide)
    products = torch.zeros(n, n, dtype=wide, device=updates.device)
    for part in parts:
        rows = updates[:, part].to(wide).div_(unit)
        rows -= rows.mean(0)
        products.addmm_(rows, rows.t())
    return products.cpu().double()


def _parts(updates: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """The numbers of columns in parts, each to be worked on at once."""
    return columns.split(PART if updates.device.type == "cpu" else most_columns(len(updates), updates.device))


def _ascending(along: Tensor) -> Tensor:
    """Positions of squared projections [n] in ascending order, ties to the lowest index.

    What an eigenvector's numbers are off by goes by the largest of them: beside a huge outlier the others are nearly
    alike, and no ties all the same.
    """
    values = along.numpy()
    order = values.argsort(kind="stable")
    ascending, top = values[order], values.max()
    rounding = ROUNDED * np.sqrt(np.maximum(ascending[:-1], ROUNDED**2 * top)) * np.sqrt(top)
    rank = np.zeros(len(values), dtype=int)
    rank[order[1:]] = (np.diff(ascending) > rounding).cumsum()
    return torch.from_numpy(rank.argsort(kind="stable"))


@rule("signguard")
def signguard(updates: Tensor, draws: Draws, *, fraction: Annotated[float, Field(gt=0, le=1)] = 0.1) -> Mix:
    """The mean of rows of ordinary norm and ordinary signs, clipped to the median norm (Xu et al. 2022).

    Rows pass the norm filter if their norm is within 0.1 and 3 times the median norm. The shares of positive, zero
    and negative values, over a random `fraction` of the coordinates, are clustered by mean shift; the largest cluster
    passes. The result is the mean of x min(1, median norm / |x|) over the rows that pass both; none is an error.
    Any n >= 1. Cost: two passes over the [n, d] updates.
    """
    n, d = updates.shape
    require(d >= 1, "signguard", "d >= 1", d=d)
    lengths = norms(updates)
    typical = float(lengths.quantile(0.5))
    ordinary = (lengths >= NORM_RANGE[0] * typical) & (lengths <= NORM_RANGE[1] * typical)
    columns = draws.choice(d, max(1, int(fraction * d + ROUNDING)))
    kept = (ordinary & _largest_cluster(_sign_shares(updates, columns))).nonzero().flatten()
    if not len(kept):
        raise ExperimentError(f"signguard: none of the {n} rows passes both filters")
    coefficients = torch.zeros(n, dtype=torch.double)
    coefficients[kept] = clip_factors(lengths[kept], typical) / len(kept)
    return Mix(coefficients)


def _sign_shares(updates: Tensor, columns: Tensor) -> Tensor:
    """The shares of positive, zero and negative values of each row at these columns, [n, 3]."""
    counts = torch.zeros(len(updates), 3, dtype=torch.int64, device=updates.device)
    for part in _parts(updates, columns):
        signs = updates[:, part].sign()
        counts += torch.stack([(signs == value).sum(1) for value in (1, 0, -1)], dim=1)
    return counts.cpu().double() / len(columns)


def _largest_cluster(features: Tensor) -> Tensor:
    """Which rows belong to the largest cluster that mean shift finds, [n] bool; of equally large ones the first."""
    from sklearn.cluster import MeanShift, estimate_bandwidth  # takes a second, and one rule needs it

    points = features.numpy()
    bandwidth = estimate_bandwidth(points, quantile=0.5)
    if bandwidth < SAME:  # most rows are the same point
        _, labels = np.unique(points, axis=0, return_inverse=True)
    else:
        labels = MeanShift(bandwidth=bandwidth, bin_seeding=True, cluster_all=False).fit(points).labels_
    labels = np.asarray(labels).reshape(-1)
    clusters = [label for label in dict.fromkeys(labels.tolist()) if label >= 0]
    if not clusters:
        return torch.ones(len(features), dtype=torch.bool)
    largest = max(clusters, key=lambda label: int((labels == label).sum()))
    return torch.from_numpy(labels == largest)
