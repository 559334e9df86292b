"""Attacks that know the honest rows and stay close to them. All attackers send the same row, computed in float64."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.byzantine.statistics import blocks_of, mean_and_std, mean_of
from fedsim.errors import ExperimentError

Sign = Literal[-1, 1]
Ddof = Literal[0, 1]
Deviation = Literal["unit", "sign", "std"]
Bound = Literal["max", "min"]


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
        """The row [d] of all attackers."""
        mean, std = mean_and_std(honest, self.ddof)
        z = z_max(len(honest) + n_byzantine, n_byzantine) if self.z is None else self.z
        return mean.add_(std, alpha=self.sign * z)

    def weakness(self, n: int, f: int) -> str | None:
        """A line if the default z is 0 for f Byzantine workers among n; else None."""
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
