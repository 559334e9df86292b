"""Means with their 95 percent intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean of `n` values, and the half width of its interval; infinite for one value, which tells no spread."""

    mean: float
    half_width: float
    n: int

    def includes(self, value: float) -> bool:
        """Whether the interval includes a value; that of a single value includes itself alone."""
        return abs(self.mean - value) <= (self.half_width if self.n > 1 else 0.0)

    def text(self, *, sign: bool = False, decimals: int = 4) -> str:
        """`0.9412 ± 0.0031`."""
        mean = f"{self.mean:+.{decimals}f}" if sign else f"{self.mean:.{decimals}f}"
        return mean if self.n == 1 else f"{mean} ± {self.half_width:.{decimals}f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of independent values, with the interval mean ± t s / sqrt(n) (Student 1908); None of no values.

    s is the standard deviation with n - 1, t the quantile of Student's distribution with n - 1 degrees of freedom.
    """
    if not len(values):
        return None
    _, half_width = mean_and_half_width(np.asarray(values, dtype=float)[:, None])
    return Estimate(fmean(values), float(half_width[0]), len(values))  # the same mean in whatever order


def mean_and_half_width(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for each column of values [n, columns]: means [columns] and half widths [columns]."""
    n = len(values)
    if n == 1:
        return values[0], np.full(values.shape[1], math.inf)
    spread = values.std(axis=0, ddof=1)
    return values.mean(axis=0), student_quantile(n - 1) * spread / math.sqrt(n)


def student_quantile(degrees_of_freedom: int) -> float:
    """t such that a Student-distributed value lies within ±t with probability CONFIDENCE."""
    from scipy.special import stdtrit  # imported here, and not all of scipy.stats, which takes a second

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
