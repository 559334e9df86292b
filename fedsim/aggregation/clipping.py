"""Rules that pull far rows in: clipping of norms, centered clipping and the geometric median."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.aggregation.columns import distances_beyond, norms
from fedsim.aggregation.gram import Gram
from fedsim.aggregation.rows import Rows
from fedsim.aggregation.rule import Count, Mix, Positive, pre_aggregator, require, rule
from fedsim.errors import ExperimentError


def clip_factors(lengths: Tensor, c: float) -> Tensor:
    """min(1, c / length) for each of the lengths; 1 for zero. Raises ExperimentError for one that is infinite."""
    values = lengths.numpy()
    beyond = np.isinf(values)
    if beyond.any():
        raise ExperimentError(
            f"updates: {beyond.sum()} of {len(values)} rows are longer than float64 can say ({sys.float_info.max:.3g})"
        )
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.fmin(c / values, 1.0))


@pre_aggregator("norm_clipping")
def norm_clipping(updates: Tensor, *, c: Positive) -> Mix:
    """Each row x becomes x min(1, c / |x|).

    Cost: one pass over the [n, d] updates, or two where rows are clipped.
    """
    return Mix(torch.diag(clip_factors(distances_beyond(updates, None, c), c)))


@rule("norm_clipping")
def mean_of_clipped(updates: Tensor, *, c: Positive) -> Mix:
    """The mean of the rows x min(1, c / |x|) (Sun et al. 2019).

    Cost: two passes over the [n, d] updates, or three where rows are clipped.
    """
    return Mix(clip_factors(distances_beyond(updates, None, c), c) / len(updates))


@pre_aggregator("arc")
def arc(updates: Tensor, *, f: Count) -> Mix:
    """Adaptive robust clipping: the largest norms become the next one (Allouah et al. 2025).

    The k = floor(2f (n - f) / n) rows of largest norm are scaled to the norm of the next. Needs 2f < n. Cost: one
    pass over the [n, d] updates.
    """
    return Mix(torch.diag(_arc_factors(updates, f)))


@rule("arc")
def mean_of_arc(updates: Tensor, *, f: Count) -> Mix:
    """The mean after adaptive robust clipping of the largest norms to the next one (Allouah et al. 2025).

    The k = floor(2f (n - f) / n) rows of largest norm are scaled to the norm of the next. Needs 2f < n. Cost: two
    passes over the [n, d] updates.
    """
    return Mix(_arc_factors(updates, f) / len(updates))


def _arc_factors(updates: Tensor, f: int) -> Tensor:
    n = len(updates)
    require(2 * f < n, "arc", "2f < n", f=f, n=n)
    lengths = norms(updates)
    clipped = 2 * f * (n - f) // n
    return clip_factors(lengths, float(lengths.sort(descending=True).values[clipped]))


@rule("centered_clipping")
def centered_clipping(
    updates: Tensor,
    last: Tensor | None,
    *,
    tau: Positive = 10.0,
    iterations: PositiveInt = 1,
    start: Literal["zeros", "mean"] = "zeros",
) -> Mix:
    """v += mean of (x_k - v) min(1, tau / |x_k - v|), `iterations` times (Karimireddy et al. 2021).

    v starts at the last round's result; in the first round, and in stateless use without `last` [d], at `start`. Cost:
    two passes over the [n, d] updates for each iteration, or three where rows are clipped.
    """
    n, centre = len(updates), last  # None: zero
    if centre is None and start == "mean":
        centre = updates.mean(0)
    for iteration in range(iterations):
        mix = Mix(clip_factors(distances_beyond(updates, centre, tau), tau) / n)
        if centre is not None:
            mix = Mix(mix.coefficients, centre * float(1 - mix.coefficients.sum()))
        if iteration < iterations - 1:
            centre = Rows(updates).row(mix)
    return mix


@rule("geometric_median")
def geometric_median(
    gram: Gram,
    weights: Tensor | None = None,
    *,
    nu: Positive = 1e-6,
    iterations: PositiveInt = 1_000,
    tol: Annotated[float, Field(ge=0)] = 1e-10,
    start: Literal["mean", "zeros"] = "mean",
) -> Mix:
    """The point with the least sum of a_k |z - x_k|: RFA, by the smoothed Weiszfeld algorithm (Pillutla et al. 2022).

    a_k are the normalised weights. Each iteration takes z to the mean of the rows with weights
    a_k / max(nu, |z - x_k|), until z moves by less than tol |z|, or `iterations` are done. Any n >= 1. Updates [n, d],
    result [d]. Cost: one n x n x d matrix product, since all iterates are combinations of the rows.
    """
    n = len(gram)
    shares = torch.full((n,), 1 / n, dtype=torch.double) if weights is None else weights / weights.sum()
    if not bool(shares.isfinite().all()):
        raise ExperimentError("geometric_median: all weights of this cohort are zero")
    point = shares
    distances = gram.norms if start == "zeros" else gram.squared_distances_to(shares).sqrt()
    for iteration in range(iterations):
        pull = shares / distances.clamp(min=nu / gram.unit)
        moved = pull / pull.sum()
        settled = False
        if iteration or start == "mean":
            step = float((moved - point) @ gram.offsets @ (moved - point))
            settled = max(0.0, step) <= tol**2 * gram.squared_norm(moved)
        point = moved
        if settled:
            break
        distances = gram.squared_distances_to(point).sqrt()
    return Mix(point)
