"""Attacks that know the honest rows and stay close to them, some tuned against the rule in use.

All attackers send the same row, computed in float64. The factor of a tuned attack is the one that moves the result of
the rule farthest from the honest mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedsim.byzantine.base import Aggregate, attack_strategy
from fedsim.byzantine.statistics import blocks_of, mean_and_std, mean_of
from fedsim.errors import ExperimentError

Sign = Literal[-1, 1]
Ddof = Literal[0, 1]
Deviation = Literal["unit", "sign", "std"]
Bound = Literal["max", "min"]
Evaluations = Annotated[int, Field(ge=2)]

GOLDEN = (3 - 5**0.5) / 2  # the smaller part of a golden section


@attack_strategy("alie")
@dataclass(frozen=True)
class ALittleIsEnough:
    """A little is enough: mean + sign z std of the honest rows, per coordinate (Baruch et al. 2019).

    Args:
        z: None: `z_max(n, f)` of the n = h + f workers of this round, f of them Byzantine. It is 0 for some n and f (10
            and 2, 8 and 2, 5 and 1), for which the attack has no effect and a warning says so; it may be negative.
        sign: -1 or 1.
        ddof: std divides by h - ddof.

    Returns [d] for honest rows [h, d]. Raises ExperimentError unless h > ddof, and if n and f have no z_max. Cost: one
    pass over the honest rows.

    >>> fedsim.attack(torch.tensor([[1.0], [2.0], [3.0]]), 1, "alie", z=2.0)
    tensor([[0.]])
    """

    z: float | None = None
    sign: Sign = -1
    ddof: Ddof = 1

    def __call__(self, honest: Tensor, n_byzantine: int) -> Tensor:
        """Return the row [d] of all attackers."""
        mean, std = mean_and_std(honest, self.ddof)
        z = z_max(len(honest) + n_byzantine, n_byzantine) if self.z is None else self.z
        return mean.add_(std, alpha=self.sign * z)

    def weakness(self, n: int, f: int) -> str | None:
        """Return a line if the default z is 0 for f Byzantine workers among n; else None."""
        if self.z is not None or not _has_z_max(n, f) or z_max(n, f):
            return None
        return f"z = 0 for n = {n}, f = {f}: this attack does nothing; set attack.z, e.g. 1.5"


def z_max(n: int, f: int) -> float:
    """alie's z for f Byzantine workers among n: Phi^-1((n - f - s) / (n - f)) with s = floor(n / 2 + 1) - f.

    s is the number of honest workers that the attackers need for a majority; about s of them are farther than z_max
    standard deviations from the mean.

    Raises ExperimentError unless 0 < s < n - f.

    >>> round(fedsim.byzantine.crafted.z_max(50, 24), 2)
    1.43
    """
    s = n // 2 + 1 - f
    if not _has_z_max(n, f):
        raise ExperimentError(
            f"attack.z: z_max needs 0 < s < n - f with s = floor(n / 2 + 1) - f, but n = {n} and f = {f} make s = {s} "
            f"and n - f = {n - f}; choose z"
        )
    return NormalDist().inv_cdf((n - f - s) / (n - f))


def _has_z_max(n: int, f: int) -> bool:
    return 0 < n // 2 + 1 - f < n - f


@attack_strategy("ipm")
def ipm(honest: Tensor, *, eps: NonNegativeFloat = 0.1) -> Tensor:
    """Inner product manipulation: -eps times the mean of the honest rows (Xie et al. 2019).

    Args:
        honest: [h, d].
        eps: >= 0.

    Returns [d]. Cost: one pass over the honest rows.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), 2, "ipm", eps=0.5)
    tensor([[-1.],
            [-1.]])
    """
    return mean_of(honest).mul_(-eps)


@attack_strategy("min_max")
def min_max(honest: Tensor, *, dev: Deviation = "unit", bound: Bound = "max") -> Tensor:
    """mean - g dev with the largest g >= 0 whose greatest distance from an honest row is allowed.

    Allowed is the greatest distance between two honest rows (Shejwalkar and Houmansadr 2021). g is exact:
    |x_i - mean + g dev|^2 is a quadratic of g for every i, and g is the least of their larger roots.

    Args:
        honest: [h, d].
        dev: "unit": mean / |mean|; "sign": the signs of the mean; "std": the standard deviation per coordinate. If it
            is zero, the result is the mean.
        bound: each honest row has a greatest distance from the others; allowed is the "max" of these, or their "min".
            If the mean itself is farther than the "min" from an honest row, the result is the mean.

    Returns [d]. Cost: one product [h, d] x [d, h] in float64.

    >>> fedsim.attack(torch.tensor([[0.0], [2.0]]), 1, "min_max")
    tensor([[0.]])
    """
    mean, deviation = _mean_and_deviation(honest, dev)
    h = len(honest)
    gram, slopes = mean.new_zeros(h, h), mean.new_zeros(h)
    for columns, centred in blocks_of(honest, mean):
        gram.addmm_(centred, centred.T)
        slopes.addmv_(centred, deviation[columns])
    squares = gram.diagonal()
    greatest = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * gram).amax(1)
    room = (greatest.max() - squares).clamp_(min=0) if bound == "max" else greatest.min() - squares
    curvature = deviation.square().sum()
    if curvature == 0 or (room < 0).any():
        return mean
    # Of curvature g^2 + 2 slope g = room, the root >= 0, in the form in which nothing cancels.
    root = (slopes.square() + curvature * room).sqrt()
    roots = torch.where(slopes > 0, room / (slopes + root), (root - slopes) / curvature)
    return mean - roots.min() * deviation


@attack_strategy("min_sum")
def min_sum(honest: Tensor, *, dev: Deviation = "unit", bound: Bound = "max") -> Tensor:
    """mean - g dev with the largest g whose sum of squared distances from the honest rows is allowed.

    g = |x_k - mean| / |dev| for an honest row k, since around the mean these sums are sum_i |x_i - mean|^2 plus
    h g^2 |dev|^2, or plus h |x_k - mean|^2 for honest row k. Shejwalkar and Houmansadr 2021.

    Args:
        honest: [h, d].
        dev: as in min_max.
        bound: allowed is the "max" of the sums of the honest rows, as in the paper, or their "min", as in the code that
            was published with it.

    Returns [d]. Cost: two passes over the honest rows.

    >>> fedsim.attack(torch.tensor([[0.0], [2.0]]), 1, "min_sum")
    tensor([[0.]])
    """
    mean, deviation = _mean_and_deviation(honest, dev)
    squares = mean.new_zeros(len(honest))
    for _, centred in blocks_of(honest, mean):
        squares += centred.square_().sum(1)
    curvature = deviation.square().sum()
    if curvature == 0:
        return mean
    allowed = squares.max() if bound == "max" else squares.min()
    return mean - (allowed / curvature).sqrt() * deviation


def _mean_and_deviation(honest: Tensor, dev: Deviation) -> tuple[Tensor, Tensor]:
    if dev == "std":
        return mean_and_std(honest, ddof=0)  # only its direction matters, which ddof does not change
    mean = mean_of(honest)
    if dev == "sign":
        return mean, mean.sign()
    norm = torch.linalg.vector_norm(mean)
    return mean, mean / norm if norm > 0 else torch.zeros_like(mean)


@attack_strategy("opt_alie")
def opt_alie(
    honest: Tensor,
    aggregate: Aggregate,
    *,
    evaluations: Evaluations = 16,
    sign: Sign = -1,
    ddof: Ddof = 1,
) -> Tensor:
    """alie with the z >= 0 that moves the result of the rule in use farthest from the honest mean.

    z is the best of the factors that `line_search` tries. After Shejwalkar and Houmansadr 2021.

    Args:
        honest: [h, d].
        aggregate: the rule in use, from the row [d] that all attackers send to its result [d].
        evaluations: calls of the rule, >= 2.
        sign, ddof: as in alie.

    Returns [d]. Raises ExperimentError unless h > ddof, and without `aggregate`. Cost: two passes over the honest rows,
    and `evaluations` times the rule on [h + b, d].

    >>> honest = torch.tensor([[1.0], [2.0], [3.0]])
    >>> fedsim.attack(honest, 1, "opt_alie", aggregate=lambda rows: fedsim.aggregate(rows, rule="median"))
    tensor([[1.]])
    """
    mean, std = mean_and_std(honest, ddof)
    return _farthest(mean, mean, std.mul_(sign), honest, aggregate, evaluations)


@attack_strategy("opt_ipm")
def opt_ipm(honest: Tensor, aggregate: Aggregate, *, evaluations: Evaluations = 16) -> Tensor:
    """ipm with the eps >= 0 that moves the result of the rule in use farthest from the honest mean.

    eps is the best of the factors that `line_search` tries. After Shejwalkar and Houmansadr 2021.

    Args:
        honest, aggregate, evaluations: as in opt_alie.

    Returns [d]. Raises ExperimentError without `aggregate`. Cost: one pass over the honest rows, and `evaluations`
    times the rule on [h + b, d].

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), 1, "opt_ipm", aggregate=fedsim.aggregate, evaluations=4)
    tensor([[-8.]])
    """
    mean = mean_of(honest)
    return _farthest(mean, torch.zeros_like(mean), -mean, honest, aggregate, evaluations)


def _farthest(
    mean: Tensor,
    start: Tensor,
    direction: Tensor,
    honest: Tensor,
    aggregate: Aggregate,
    evaluations: int,
) -> Tensor:
    """The row start + x direction, x >= 0, that moves the aggregate farthest from `mean` if all attackers send it."""

    def row(x: float) -> Tensor:
        return start.add(direction, alpha=x).to(honest.dtype)  # rounded as it will be sent

    def distance(x: float) -> float:
        result = aggregate(row(x))
        return torch.linalg.vector_norm(result.to(mean.dtype) - mean).item()

    return row(line_search(distance, evaluations))


def line_search(height: Callable[[float], float], evaluations: int) -> float:
    """Return the x >= 0 with the greatest `height` of those that are tried; of equal heights the first.

    It tries 0, then 1, 2, 4, ... while the height increases, then golden sections around the best x. It finds the top
    of a height that rises and then falls, also if it falls at once; for other heights a local top. A height that is not
    finite counts as the lowest.

    >>> round(fedsim.byzantine.crafted.line_search(lambda x: -abs(x - 3), 40), 3)
    3.0
    """

    def finite_height(x: float) -> float:
        value = height(x)
        return value if math.isfinite(value) else -math.inf

    low, best, high = 0.0, 0.0, 1.0
    top, doubling = finite_height(best), True
    for _ in range(evaluations - 1):
        larger_gap = max(high - best, low - best, key=abs)  # of the two beside the best
        x = high if doubling else best + GOLDEN * larger_gap
        value = finite_height(x)
        doubling = doubling and value > top
        if doubling:
            low, best, high, top = best, x, 2 * x, value
        elif value > top:
            low, high = (best, high) if x > best else (low, best)
            best, top = x, value
        elif x > best:
            high = x
        else:
            low = x
    return best
