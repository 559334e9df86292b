"""Attacks that know the honest rows, and stay close enough to them to pass for one of them.

In all of them every Byzantine row is the same. They are computed in float64 and then rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedsim.byzantine.statistics import centred_blocks, mean_and_std, mean_of
from fedsim.byzantine.strategy import attack_strategy
from fedsim.errors import ExperimentError

Sign = Literal[-1, 1]
Ddof = Literal[0, 1]
Deviation = Literal["unit", "sign", "std"]


@attack_strategy("alie")
@dataclass(frozen=True)
class ALittleIsEnough:
    """A little is enough: mean + sign z std of the honest rows, per coordinate (Baruch et al. 2019).

    Where z is not given it is `z_max(n, f)` of the n = h + f workers of this round, f of them Byzantine; that is
    negative where so many honest workers would have to be outdone that the attacker has to keep to their side of the
    mean. It is 0 for some n and f (10 and 2, 8 and 2, 5 and 1): the rows are the mean, and a warning says so.
    std divides by h - ddof. Raises ExperimentError unless h > ddof, and where n and f leave no z_max.
    Honest rows [h, d], result [d]. Cost: one pass over [h, d].
    """

    z: float | None = None
    sign: Sign = -1
    ddof: Ddof = 1

    def __call__(self, honest: Tensor, n_byzantine: int) -> Tensor:
        """One row [d] for all attackers."""
        mean, std = mean_and_std(honest, self.ddof)
        z = z_max(len(honest) + n_byzantine, n_byzantine) if self.z is None else self.z
        return mean.add_(std, alpha=self.sign * z)

    def weakness(self, n: int, f: int) -> str | None:
        """That the default of z makes this no attack with f Byzantine workers among n; else None."""
        if self.z is not None or not _has_z_max(n, f) or z_max(n, f):
            return None
        return f"z = 0 for n = {n}, f = {f}: this attack does nothing; set attack.z, e.g. 1.5"


def z_max(n: int, f: int) -> float:
    """Phi^-1((n - f - s) / (n - f)) with s = floor(n / 2 + 1) - f: alie's factor for f Byzantine workers among n.

    s is how many honest workers the attackers need on their side for a majority; about s of them lie further out than
    z_max standard deviations. Raises ExperimentError unless 0 < s < n - f, without which there is no such number.
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

    Cost: one pass over [h, d].
    """
    return mean_of(honest).mul_(-eps)


@attack_strategy("min_max")
def min_max(honest: Tensor, *, dev: Deviation = "unit") -> Tensor:
    """mean - g dev, the largest g that keeps it as near to every honest row as these are to each other.

    The greatest distance from an honest row may be as large as the greatest between two honest rows. dev = "unit" is
    mean / |mean|, "sign" the signs of the mean, "std" the standard deviation per coordinate; where it is zero, the rows
    are the mean. Shejwalkar and Houmansadr 2021. Cost: one product [h, d] x [d, h] in float64.

    g is exact: |x_i - mean + g dev|^2 is a quadratic of g for every i, and the least of their larger roots is taken.
    """
    mean, deviation = _DEVIATIONS[dev](honest)
    h = len(honest)
    gram, slopes = mean.new_zeros(h, h), mean.new_zeros(h)
    for columns, centred in centred_blocks(honest, mean):
        gram.addmm_(centred, centred.T)
        slopes.addmv_(centred, deviation[columns])
    squares = gram.diagonal()
    room = ((squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * gram).max() - squares).clamp_(min=0)
    curvature = deviation.square().sum()
    if curvature == 0:
        return mean
    # Of curvature g^2 + 2 slope g = room, the root >= 0, in the form in which nothing cancels.
    root = (slopes.square() + curvature * room).sqrt()
    roots = torch.where(slopes > 0, room / (slopes + root), (root - slopes) / curvature)
    return mean - roots.min() * deviation


@attack_strategy("min_sum")
def min_sum(honest: Tensor, *, dev: Deviation = "unit") -> Tensor:
    """mean - g dev, the largest g that keeps it as near to all honest rows together as one of these is.

    The sum of squared distances from the honest rows may be as large as the largest such sum of an honest row. `dev` as
    in min_max. Shejwalkar and Houmansadr 2021. Cost: two passes over [h, d].

    g is exact: around the mean those sums are sum_i |x_i - mean|^2 plus h g^2 |dev|^2 for the attacker and plus
    h |x_k - mean|^2 for honest row k, so g = max_k |x_k - mean| / |dev|.
    """
    mean, deviation = _DEVIATIONS[dev](honest)
    squares = mean.new_zeros(len(honest))
    for _, centred in centred_blocks(honest, mean):
        squares += centred.square_().sum(1)
    curvature = deviation.square().sum()
    if curvature == 0:
        return mean
    return mean - (squares.max() / curvature).sqrt() * deviation


def _unit(honest: Tensor) -> tuple[Tensor, Tensor]:
    mean = mean_of(honest)
    norm = torch.linalg.vector_norm(mean)
    return mean, mean / norm if norm > 0 else torch.zeros_like(mean)


def _sign(honest: Tensor) -> tuple[Tensor, Tensor]:
    mean = mean_of(honest)
    return mean, mean.sign()


def _std(honest: Tensor) -> tuple[Tensor, Tensor]:
    return mean_and_std(honest, ddof=0)  # only its direction matters, which ddof does not change


# Each gives the mean of the honest rows, and the deviation from it.
_DEVIATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"unit": _unit, "sign": _sign, "std": _std}
