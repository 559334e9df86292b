"""Attacks tuned against the rule in use: the factor that moves its result farthest from the honest mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsim.byzantine.base import Aggregate, attack_strategy
from fedsim.byzantine.crafted import Ddof, Sign
from fedsim.byzantine.statistics import mean_and_std, mean_of

Evaluations = Annotated[int, Field(ge=2)]

GOLDEN = (3 - 5**0.5) / 2  # the smaller part of a golden section


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
    """The x >= 0 with the greatest `height` of those that are tried; of equal heights the first.

    It tries 0, then 1, 2, 4, ... while the height increases, then golden sections around the best x. It finds the top
    of a height that rises and then falls, also if it falls at once; for other heights a local top. A height that is not
    finite counts as the lowest.

    >>> round(fedsim.byzantine.optimal.line_search(lambda x: -abs(x - 3), 40), 3)
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
