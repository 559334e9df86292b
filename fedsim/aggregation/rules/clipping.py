"""Rules that limit the influence of distant updates: norm clipping, centered clipping and the geometric median."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_to, norms
from fedsim.aggregation.numerics.gram import Gram, times
from fedsim.aggregation.numerics.lazy_rows import LazyRows
from fedsim.aggregation.rule import ByzantineCount, LinearCombination, pre_aggregator, require, rule
from fedsim.core.numbers import Example, Iterations, NonNegativeFloat, PositiveFloat
from fedsim.errors import ExperimentError


def clip_factors(lengths: Tensor, c: float) -> Tensor:
    """Return the factors min(1, c / length) that clip updates with these norms (`lengths` [n]) to the norm c.

    The factor of a zero norm is 1. Raises ExperimentError for an infinite norm.
    """
    values = lengths.numpy()
    beyond = np.isinf(values)
    if beyond.any():
        count = int(beyond.sum())
        raise ExperimentError(f"updates: {count} of {len(values)} updates have infinite norms; scale the updates down")
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.fmin(c / values, 1.0))


def _clipped_share(factors: Tensor) -> float:
    return int((factors < 1).sum()) / len(factors)


@rule("norm_clipping")
@pre_aggregator("norm_clipping")
def norm_clipping(
    updates: Tensor, metrics: dict[str, Any], *, c: Annotated[PositiveFloat, Example(1.0)]
) -> LinearCombination:
    """Clip each update x to norm c: x min(1, c / |x|) (Sun et al. 2019). As a rule, return the mean of the results.

    Args:
        updates: updates of the n workers, [n, d].
        metrics: receives `clipped_share`, the fraction of updates that are clipped.
        c: maximum norm, > 0.

    Returns the clipped updates [n, d] as a pre-aggregator, or their mean [d] as a rule. Cost: two passes over the
    updates.

    >>> updates = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> fedsim.pre_aggregate(updates, "norm_clipping", c=1.0)
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    >>> fedsim.aggregate(updates, "norm_clipping", c=1.0)
    tensor([0.3000, 0.4000])
    """
    factors = clip_factors(norms(updates), c)
    metrics["clipped_share"] = _clipped_share(factors)
    return LinearCombination(torch.diag(factors))


@rule("arc")
@pre_aggregator("arc")
def arc(updates: Tensor, *, f: ByzantineCount) -> LinearCombination:
    """Clip the updates with the largest norms (adaptive robust clipping, Allouah et al. 2025).

    The k = floor(2f (n - f) / n) updates with the largest norms are scaled down to the (k + 1)-th largest norm.

    Args:
        updates: updates of the n workers, [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the clipped updates [n, d] as a pre-aggregator, or the mean [d] of all updates after clipping as a rule.
    Cost: two passes over the updates.

    >>> fedsim.pre_aggregate(torch.tensor([[1.0], [2.0], [9.0]]), "arc", f=1)
    tensor([[1.],
            [2.],
            [2.]])
    """
    n = len(updates)
    require(2 * f < n, "arc", "2f < n", f=f, n=n)
    lengths = norms(updates)
    clipped = 2 * f * (n - f) // n
    return LinearCombination(torch.diag(clip_factors(lengths, float(lengths.sort(descending=True).values[clipped]))))


@rule("centered_clipping")
def centered_clipping(
    updates: Tensor,
    last: Tensor | None,
    metrics: dict[str, Any],
    *,
    tau: PositiveFloat = 10.0,
    iterations: Iterations = 1,
    start: Literal["zeros", "mean"] = "zeros",
) -> LinearCombination:
    """Average the updates after clipping their distances from a centre (centered clipping, Karimireddy et al. 2021).

    Each iteration moves the centre v: v += mean_k of (x_k - v) min(1, tau / |x_k - v|). v starts at `last`, the result
    of the previous round, or at `start` if `last` is None (in the first round).

    Args:
        updates: updates x_k of the n workers, [n, d].
        last: result of the previous round, [d], or None.
        metrics: receives `clipped_share`, the fraction of updates that the last iteration clips.
        tau: maximum distance from v that is not clipped, > 0.
        iterations: number of iterations, >= 1.
        start: "zeros", or "mean" for the mean of the updates.

    Returns the last centre v [d]. Cost: two passes over the updates for each iteration.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [90.0]]), "centered_clipping", tau=3.0)
    tensor([2.])
    """
    n, centre = len(updates), last  # None: zero
    if centre is None and start == "mean":
        centre = updates.mean(0)
    for iteration in range(iterations):
        factors = clip_factors(distances_to(updates, centre), tau)
        metrics["clipped_share"] = _clipped_share(factors)
        factors = factors / n
        result = LinearCombination(factors, None if centre is None else centre * float(1 - factors.sum()))
        if iteration < iterations - 1:
            centre = LazyRows(updates).row(result)
    return result


@rule("geometric_median")
def geometric_median(
    gram: Gram,
    metrics: dict[str, Any],
    weights: Tensor | None = None,
    *,
    nu: PositiveFloat = 1e-6,
    iterations: Iterations = 1_000,
    tol: NonNegativeFloat = 1e-10,
    start: Literal["mean", "zeros"] = "mean",
) -> LinearCombination:
    """Return the geometric median of the updates, computed as in RFA (smoothed Weiszfeld, Pillutla et al. 2022).

    The geometric median z minimizes sum_k a_k |z - x_k|, where a_k is the normalised weight of update x_k. Each
    iteration moves z to the weighted mean of the updates, with weights a_k / max(nu, |z - x_k|). The iterations stop
    when z moves by at most tol |z|.

    Args:
        gram: distances and inner products of the updates [n, d], n >= 1.
        metrics: receives `weiszfeld_iterations`, the number of iterations.
        weights: weight of each update, [n]. None: equal weights.
        nu: lower bound of the distances, > 0.
        iterations: maximum number of iterations.
        tol: relative tolerance, >= 0.
        start: starting point: "mean" for the mean of the updates, or "zeros".

    Returns the geometric median [d]. Raises ExperimentError if all weights are zero. Cost: one n x n x d matrix
    product, because all iterates are linear combinations of the updates.

    >>> fedsim.aggregate(torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]]).double(), "geometric_median").round()
    tensor([1., 0.], dtype=torch.float64)
    """
    n = len(gram)
    shares = np.full(n, 1 / n) if weights is None else (weights / weights.sum()).numpy()
    if not np.isfinite(shares).all():
        raise ExperimentError("geometric_median: all weights of this cohort are zero; at least one must be > 0")
    point = shares
    with np.errstate(all="ignore"):  # rows may be infinite
        distances = gram.norms.numpy() if start == "zeros" else gram.distances_to(shares)
        for iteration in range(iterations):
            pull = shares / np.maximum(distances, nu)
            moved = pull / pull.sum()
            settled = False
            if iteration or start == "mean":
                step = moved - point
                squares = step @ times(gram.offsets, step), moved @ times(gram.products, moved)
                settled = max(0.0, squares[0]) <= tol**2 * max(0.0, squares[1])
            point = moved
            if settled:
                break
            distances = gram.distances_to(point)
    metrics["weiszfeld_iterations"] = iteration + 1
    return LinearCombination(torch.from_numpy(point))
