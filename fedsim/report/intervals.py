"""Means over few repetitions, with their confidence intervals."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean of `n` values, give or take `half`; a single value leaves that open."""

    mean: float
    half: float | None
    n: int

    @property
    def spans_zero(self) -> bool:
        return self.half is not None and abs(self.mean) <= self.half


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The mean of values and half the width of its 95 percent interval; None where there is no value.

    half = t(0.975; n-1) s / sqrt(n), with s the standard deviation (ddof 1) and t Student's quantile: exact for values
    that are normally distributed.
    """
    n = len(values)
    if not n:
        return None
    if n == 1:
        return Interval(values[0], None, 1)
    return Interval(statistics.fmean(values), student_t(n - 1) * statistics.stdev(values) / math.sqrt(n), n)


@functools.cache
def student_t(dof: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence for Student's distribution with `dof` >= 1 degrees of freedom.

    By bisection on the angle arctan(t / sqrt(dof)), on which the probability depends smoothly; exact to about 1e-12.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, dof) < confidence else (low, middle)
    return math.sqrt(dof) * math.tan((low + high) / 2)


def _central_probability(angle: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(angle)): for whole degrees of freedom a finite sum (Abramowitz and Stegun 1964, 26.7.3-4).

    Odd: (2 / pi) (angle + sin (cos + 2/3 cos^3 + 2/3 4/5 cos^5 + ...)); even: sin (1 + 1/2 cos^2 + 1/2 3/4 cos^4
    + ...); the last power is dof - 2.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, dof - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
