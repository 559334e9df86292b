"""Rules that limit distant rows: clipping of norms, centered clipping and the geometric median."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_to, norms
from fedsim.aggregation.numerics.gram import Gram, times
from fedsim.aggregation.numerics.lazy_rows import LazyRows
from fedsim.aggregation.rule import Count, LinearCombination, Positive, pre_aggregator, require, rule
from fedsim.errors import ExperimentError


def clip_factors(lengths: Tensor, c: float) -> Tensor:
    """min(1, c / length) for each length [n]; 1 for zero. Raises ExperimentError for an infinite length."""
    values = lengths.numpy()
    beyond = np.isinf(values)
    if beyond.any():
        raise ExperimentError(f"updates: {beyond.sum()} of {len(values)} rows have infinite norms")
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.fmin(c / values, 1.0))


def _clipped_share(factors: Tensor) -> float:
    return int((factors < 1).sum()) / len(factors)


@rule("norm_clipping")
@pre_aggregator("norm_clipping")
def norm_clipping(
    updates: Tensor, metrics: dict[str, Any], *, c: Annotated[Positive, Field(examples=[1.0])]
) -> LinearCombination:
    """Each row x becomes x min(1, c / |x|); the rule is the mean of these rows (Sun et al. 2019).

    Args:
        updates: [n, d].
        metrics: gets `clipped_share`, the share of rows that are clipped.
        c: the largest norm of a clipped row, > 0.

    Returns rows [n, d]; the rule [d]. Cost: two passes over the updates.

    >>> updates = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> fedsim.pre_aggregate(updates, "norm_clipping", c=1.0)
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    >>> fedsim.aggregate(updates, rule="norm_clipping", c=1.0)
    tensor([0.3000, 0.4000])
    """
    factors = clip_factors(norms(updates), c)
    metrics["clipped_share"] = _clipped_share(factors)
    return LinearCombination(torch.diag(factors))


@rule("arc")
@pre_aggregator("arc")
def arc(updates: Tensor, *, f: Count) -> LinearCombination:
    """Adaptive robust clipping of the largest norms; the rule is the mean of the rows (Allouah et al. 2025).

    The k = floor(2f (n - f) / n) rows of largest norm are scaled to the norm of the next row.

    Args:
        updates: [n, d].
        f: number of Byzantine rows, 2f < n.

    Returns rows [n, d]; the rule [d]. Cost: two passes over the updates.

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
    tau: Positive = 10.0,
    iterations: PositiveInt = 1,
    start: Literal["zeros", "mean"] = "zeros",
) -> LinearCombination:
    """v += mean of (x_k - v) min(1, tau / |x_k - v|), `iterations` times (Karimireddy et al. 2021).

    v starts at the last round's result; in the first round, and without `last`, at `start`.

    Args:
        updates: [n, d].
        last: [d].
        metrics: gets `clipped_share`, the share of rows that the last iteration clips.
        tau: the largest distance from v that a row keeps, > 0.
        iterations: >= 1.
        start: "zeros", or "mean" of the rows.

    Returns [d]. Cost: two passes over the updates for each iteration.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [90.0]]), rule="centered_clipping", tau=3.0)
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
    nu: Positive = 1e-6,
    iterations: PositiveInt = 1_000,
    tol: Annotated[float, Field(ge=0)] = 1e-10,
    start: Literal["mean", "zeros"] = "mean",
) -> LinearCombination:
    """The z with the least sum of a_k |z - x_k|: RFA, by the smoothed Weiszfeld algorithm (Pillutla et al. 2022).

    a_k are the normalised weights. Each iteration moves z to the mean of the rows with weights a_k / max(nu, |z -
    x_k|), until z moves by less than tol |z|.

    Args:
        gram: of the updates [n, d], n >= 1.
        metrics: gets `weiszfeld_iterations`, the number of iterations.
        weights: [n]; None: equal weights.
        nu: smallest distance, > 0.
        iterations: the most iterations.
        tol: relative tolerance, >= 0.
        start: "mean" of the rows, or "zeros".

    Returns [d]. Raises ExperimentError if all weights are zero. Cost: one n x n x d matrix product, since all iterates
    are combinations of the rows.

    >>> fedsim.aggregate(torch.tensor([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0]]).double(), rule="geometric_median").round()
    tensor([1., 0.], dtype=torch.float64)
    """
    n = len(gram)
    shares = np.full(n, 1 / n) if weights is None else (weights / weights.sum()).numpy()
    if not np.isfinite(shares).all():
        raise ExperimentError("geometric_median: all weights of this cohort are zero")
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
