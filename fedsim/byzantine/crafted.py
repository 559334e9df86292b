"""Attacks that know the honest updates and stay close to them. Some are tuned against the aggregation rule.

All attackers send the same update, which is computed in float64. Tuned attacks (`opt_...`) search for the factor z or
eps that moves the result of the aggregation rule farthest from the honest mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedsim.byzantine.base import Aggregate, attack_strategy
from fedsim.byzantine.statistics import blocks_of, mean_and_std, mean_of
from fedsim.core.numbers import Limits, NonNegativeFloat
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype

Sign = Literal[-1, 1]
Ddof = Literal[0, 1]
Deviation = Literal["unit", "sign", "std"]
Bound = Literal["max", "min"]
Evaluations = Annotated[int, Limits(ge=2)]

GOLDEN = (3 - 5**0.5) / 2  # the smaller part of a golden section


@attack_strategy("alie")
@dataclass(frozen=True)
class ALittleIsEnough:
    """A-little-is-enough attack: in each coordinate, mean + sign * z * std of the honest updates (Baruch et al. 2019).

    Args:
        z: number of standard deviations. None: `z_max(n, f)`, where f of the n workers in the cohort are Byzantine.
            z_max may be negative. For some n and f (10 and 2, 8 and 2, 5 and 1) it is 0. The attack then has no
            effect, and a warning is shown.
        sign: direction of the deviation, -1 or 1.
        ddof: 0 or 1. The variance is a sum of squares divided by h - ddof, for h honest workers.

    Returns the update [d] that all attackers send, for honest updates [h, d]. Raises ExperimentError unless h > ddof,
    or if z_max is undefined for n and f. Cost: one pass over the honest updates.

    >>> fedsim.attack(torch.tensor([[1.0], [2.0], [3.0]]), "alie", 1, z=2.0)
    tensor([[0.]])
    """

    z: float | None = None
    sign: Sign = -1
    ddof: Ddof = 1

    def __call__(self, honest: Tensor, n_byzantine: int) -> Tensor:
        """Return the update [d] that all attackers send."""
        mean, std = mean_and_std(honest, self.ddof)
        z = z_max(len(honest) + n_byzantine, n_byzantine) if self.z is None else self.z
        return mean.add_(std, alpha=self.sign * z)

    def weakness(self, n: int, f: int) -> str | None:
        """Return a warning if the default z is 0 for f Byzantine workers among n, otherwise None."""
        if self.z is not None or not _has_z_max(n, f) or z_max(n, f):
            return None
        return f"z = 0 for n = {n}, f = {f}: this attack does nothing; set attack.z=1.5"


def z_max(n: int, f: int) -> float:
    """Return the default z of the attack `alie` for f Byzantine workers among n.

    z is Phi^-1((n - f - s) / (n - f)). Here s = floor(n / 2 + 1) - f is the number of honest workers that the attackers
    need for a majority. About s honest updates deviate from the mean by more than z standard deviations in the
    direction of the attack.

    Raises ExperimentError unless 0 < s < n - f.

    >>> round(fedsim.byzantine.crafted.z_max(50, 24), 2)
    1.43
    """
    s = n // 2 + 1 - f
    if not _has_z_max(n, f):
        raise ExperimentError(
            f"attack.z: its default needs 0 < s < n - f with s = floor(n / 2 + 1) - f, but n = {n} workers and f = "
            f"{f} Byzantine workers make s = {s} and n - f = {n - f}; set attack.z=1.5"
        )
    return NormalDist().inv_cdf((n - f - s) / (n - f))


def _has_z_max(n: int, f: int) -> bool:
    return 0 < n // 2 + 1 - f < n - f


@attack_strategy("ipm")
def ipm(honest: Tensor, *, eps: NonNegativeFloat = 0.1) -> Tensor:
    """Return -eps times the mean of the honest updates (inner product manipulation, Xie et al. 2019).

    Args:
        honest: updates of the h honest workers, [h, d].
        eps: magnitude of the factor, >= 0.

    Returns the update [d] that all attackers send. Cost: one pass over the honest updates.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), "ipm", 2, eps=0.5)
    tensor([[-1.],
            [-1.]])
    """
    return mean_of(honest).mul_(-eps)


@attack_strategy("dissensus")
def dissensus(honest: Tensor, weights: Tensor, byzantine_weights: Tensor, *, eps: NonNegativeFloat = 1.0) -> Tensor:
    """Return the update that drives one receiver on a graph away from its honest neighbours (He et al. 2022).

    The paper is "Byzantine-Robust Decentralized Learning via Self-Centered Clipping". The rows are differences to the
    model x_i of the receiver. All attackers send x_i - eps sum_k W_ik (x_k - x_i) / sum_b W_ib, with a sum over the
    honest workers k, and a sum over the attackers b. If the receiver averages with the weights W, its model does not
    change for eps = 1, and moves away from the models of its honest neighbours for eps > 1.

    Args:
        honest: differences x_k - x_i of the h honest workers, [h, d].
        weights: weights W_ik, [h].
        byzantine_weights: weights W_ib of the b attackers, [b].
        eps: magnitude of the factor, >= 0. The authors' experiments use 1.5.

    Returns the difference [d] that all attackers send to this receiver. Cost: one pass over the honest rows.

    >>> fedsim.attack(torch.tensor([[0.0], [1.0], [3.0]]), "dissensus", 2)
    tensor([[-2.],
            [-2.]])
    """
    total = honest.new_zeros(honest.shape[1], dtype=wide_dtype(honest.device))
    for row, factor in zip(honest, (weights / byzantine_weights.sum()).tolist(), strict=True):
        total.add_(row, alpha=-eps * factor)
    return total


@attack_strategy("min_max")
def min_max(honest: Tensor, *, dev: Deviation = "unit", bound: Bound = "max") -> Tensor:
    """Return mean - g * dev with the largest g >= 0 that keeps the result near every honest update (min-max attack).

    The distance of the result from each honest update x_i must not exceed the distance that `bound` allows (Shejwalkar
    and Houmansadr 2021). g is computed exactly. For every i, |x_i - mean + g dev|^2 = (allowed distance)^2 is a
    quadratic equation with two roots. g is the minimum of the larger roots over all i.

    Args:
        honest: updates of the h honest workers, [h, d].
        dev: direction of the deviation: "unit" for mean / |mean|, "sign" for the signs of the mean, or "std" for the
            standard deviation of each coordinate. If the direction is zero, the result is the mean.
        bound: allowed distance. For each honest update, take its distance to the farthest other honest update. "max"
            (as in the paper) allows the largest of these distances, "min" the smallest. If the mean itself is farther
            from an honest update than "min" allows, the result is the mean.

    Returns the update [d] that all attackers send. Cost: one matrix product [h, d] x [d, h] in float64.

    >>> fedsim.attack(torch.tensor([[0.0], [2.0]]), "min_max", 1)
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
    # The root >= 0 of curvature g^2 + 2 slope g = room, in the form without cancellation.
    root = (slopes.square() + curvature * room).sqrt()
    roots = torch.where(slopes > 0, room / (slopes + root), (root - slopes) / curvature)
    allows_none = (curvature == 0) | (room < 0).any()  # on a GPU, an `if` would wait for the device
    return mean - torch.where(allows_none, 0, roots.min()) * deviation


@attack_strategy("min_sum")
def min_sum(honest: Tensor, *, dev: Deviation = "unit", bound: Bound = "max") -> Tensor:
    """Return mean - g * dev with the largest g that keeps the result near the honest updates (min-sum attack).

    The sum of squared distances from the result to all honest updates x_i must not exceed the same sum for one honest
    update x_k, which `bound` chooses (Shejwalkar and Houmansadr 2021). The sum is
    sum_i |x_i - mean|^2 + h g^2 |dev|^2 for the result, and sum_i |x_i - mean|^2 + h |x_k - mean|^2 for x_k. Hence
    g = |x_k - mean| / |dev|.

    Args:
        honest: updates of the h honest workers, [h, d].
        dev: direction of the deviation: "unit" for mean / |mean|, "sign" for the signs of the mean, or "std" for the
            standard deviation of each coordinate. If the direction is zero, the result is the mean.
        bound: allowed sum. For each honest update, take its sum of squared distances to all honest updates. "max" (as
            in the paper) allows the largest of these sums, "min" (as in the paper's code) the smallest.

    Returns the update [d] that all attackers send. Cost: two passes over the honest updates.

    >>> fedsim.attack(torch.tensor([[0.0], [2.0]]), "min_sum", 1)
    tensor([[0.]])
    """
    mean, deviation = _mean_and_deviation(honest, dev)
    squares = mean.new_zeros(len(honest))
    for _, centred in blocks_of(honest, mean):
        squares += centred.square_().sum(1)
    curvature = deviation.square().sum()
    allowed = squares.max() if bound == "max" else squares.min()
    return mean - torch.where(curvature == 0, 0, (allowed / curvature).sqrt()) * deviation


def _mean_and_deviation(honest: Tensor, dev: Deviation) -> tuple[Tensor, Tensor]:
    if dev == "std":
        return mean_and_std(honest, ddof=0)  # only the direction matters, which does not depend on ddof
    mean = mean_of(honest)
    if dev == "sign":
        return mean, mean.sign()
    norm = torch.linalg.vector_norm(mean)
    return mean, torch.where(norm > 0, mean / norm, 0)


@attack_strategy("opt_alie")
def opt_alie(
    honest: Tensor, aggregate: Aggregate, *, evaluations: Evaluations = 16, sign: Sign = -1, ddof: Ddof = 1
) -> Tensor:
    """Return mean + sign z std (`alie`), with z tuned against the rule (after Shejwalkar and Houmansadr 2021).

    mean and std are the mean and the standard deviation of each coordinate of the honest updates. z >= 0 is chosen by
    `line_search`, so that the attack moves the result of the aggregation rule as far as possible from the honest mean.

    Args:
        honest: updates of the h honest workers, [h, d].
        aggregate: function that maps the update [d] that all attackers send to the result [d] of the aggregation rule.
        evaluations: number of calls of the rule, >= 2.
        sign: direction of the deviation, -1 or 1.
        ddof: 0 or 1. The variance is a sum of squares divided by h - ddof.

    Returns the update [d] that all attackers send. Raises ExperimentError unless h > ddof, or if `fedsim.attack` is
    called without `aggregate`. Cost: two passes over the honest updates, and `evaluations` calls of the rule on the
    updates [h + b, d] of h honest workers and b attackers.

    >>> honest = torch.tensor([[1.0], [2.0], [3.0]])
    >>> fedsim.attack(honest, "opt_alie", 1, aggregate=lambda rows: fedsim.aggregate(rows, "median"))
    tensor([[1.]])
    """
    mean, std = mean_and_std(honest, ddof)
    return _farthest(mean, mean, std.mul_(sign), honest, aggregate, evaluations)


@attack_strategy("opt_ipm")
def opt_ipm(honest: Tensor, aggregate: Aggregate, *, evaluations: Evaluations = 16) -> Tensor:
    """Return -eps times the honest mean (`ipm`), with eps tuned against the rule (Shejwalkar and Houmansadr 2021).

    eps >= 0 is chosen by `line_search`, so that the attack moves the result of the aggregation rule as far as possible
    from the mean of the honest updates.

    Args:
        honest: updates of the h honest workers, [h, d].
        aggregate: function that maps the update [d] that all attackers send to the result [d] of the aggregation rule.
        evaluations: number of calls of the rule, >= 2.

    Returns the update [d] that all attackers send. Raises ExperimentError if `fedsim.attack` is called without
    `aggregate`. Cost: one pass over the honest updates, and `evaluations` calls of the rule on the updates [h + b, d]
    of h honest workers and b attackers.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), "opt_ipm", 1, aggregate=fedsim.aggregate, evaluations=4)
    tensor([[-8.]])
    """
    mean = mean_of(honest)
    return _farthest(mean, torch.zeros_like(mean), -mean, honest, aggregate, evaluations)


def _farthest(
    mean: Tensor, start: Tensor, direction: Tensor, honest: Tensor, aggregate: Aggregate, evaluations: int
) -> Tensor:
    """Return the update start + x * direction [d], with x >= 0 tuned against the aggregation rule.

    x is chosen by `line_search` with `evaluations` calls of `aggregate`, so that the result of the rule is as far as
    possible from `mean` if all attackers send this update.
    """

    def row(x: float) -> Tensor:
        return start.add(direction, alpha=x).to(honest.dtype)  # with the dtype in which the update is sent

    def distance(x: float) -> float:
        result = aggregate(row(x))
        return torch.linalg.vector_norm(result.to(mean.dtype) - mean).item()

    return row(line_search(distance, evaluations))


def line_search(height: Callable[[float], float], evaluations: int) -> float:
    """Search for the x >= 0 with the largest `height(x)`, and return the best x that was tried.

    The search tries 0, then 1, 2, 4, ... as long as the height increases, and then uses golden-section search around
    the best x. It finds the maximum of a function that rises and then falls (or only falls), and a local maximum of
    other functions. A height that is not finite counts as minus infinity. Of equal heights, the first one is chosen.

    >>> round(fedsim.byzantine.crafted.line_search(lambda x: -abs(x - 3), 40), 3)
    3.0
    """

    def finite_height(x: float) -> float:
        value = height(x)
        return value if math.isfinite(value) else -math.inf

    low, best, high = 0.0, 0.0, 1.0
    top, doubling = finite_height(best), True
    for _ in range(evaluations - 1):
        larger_gap = max(high - best, low - best, key=abs)  # larger of the two intervals beside the best x
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
