"""Quantiles and tail probabilities for the statistics of comparisons, in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

EPSILON = 1e-16
TINY = 1e-300  # in place of 0 in a continued fraction
GRID = np.linspace(-9.0, 9.0, 4001)  # of a normal variable; beyond, its density is below 1e-18


@functools.cache
def student_quantile(degrees_of_freedom: int, confidence: float = 0.95) -> float:
    """t such that a Student-distributed value lies within ±t with this probability.

    >>> round(student_quantile(2), 4)
    4.3027
    """

    def outside(t: float) -> float:
        return beta_share(degrees_of_freedom / 2, 0.5, degrees_of_freedom / (degrees_of_freedom + t * t))

    return _solve(lambda t: 1 - confidence - outside(t))


def chi_square_tail(x: float, degrees_of_freedom: int) -> float:
    """The probability of a value above x >= 0 (Abramowitz and Stegun 26.4.4 and 26.4.5).

    >>> round(chi_square_tail(3.841, 1), 3)
    0.05
    """
    odd = degrees_of_freedom % 2
    total, term = 0.0, 1.0 if not odd else math.sqrt(2 * x / math.pi)
    for index in range(degrees_of_freedom // 2):
        total += term
        term *= x / (2 * index + 2 + odd)
    return (math.erfc(math.sqrt(x / 2)) if odd else 0.0) + math.exp(-x / 2) * total


def f_tail(x: float, numerator: int, denominator: int) -> float:
    """The probability of a value above x >= 0, of Fisher's distribution with these degrees of freedom.

    >>> round(f_tail(4.2565, 2, 9), 4)
    0.05
    """
    return (
        0.0
        if x == math.inf
        else beta_share(denominator / 2, numerator / 2, denominator / (denominator + numerator * x))
    )


@functools.cache
def studentized_range_quantile(candidates: int, confidence: float = 0.95) -> float:
    """The quantile of the range of so many standard normal values: of the studentized range, with known variance.

    >>> round(studentized_range_quantile(3), 3)
    3.314
    """
    density = np.exp(-GRID * GRID / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-z / math.sqrt(2)) / 2 for z in GRID])

    def within(q: float) -> float:
        shifted = np.array([math.erfc(-(z - q) / math.sqrt(2)) / 2 for z in GRID])
        heights = candidates * density * (below - shifted) ** (candidates - 1)
        return float(heights.sum() * (GRID[1] - GRID[0]))

    return _solve(lambda q: within(q) - confidence)


def beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22).

    >>> round(beta_share(2, 3, 0.5), 4)
    0.6875
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - beta_share(b, a, 1 - x)
    log_factor = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / _not_zero(1 + term * d), _not_zero(1 + term / c)
            fraction *= c * d
        if abs(c * d - 1) < EPSILON * 10:
            break
    return math.exp(log_factor) * fraction / a


def _not_zero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def _solve(increasing: Callable[[float], float]) -> float:
    """The positive x at which an increasing function is 0, by bisection."""
    low, high = 0.0, 1.0
    while increasing(high) < 0:
        high *= 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
