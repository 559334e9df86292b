"""Means with 95 % confidence intervals, quantiles of statistical distributions, and number formatting."""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedsim.core.equality import SAME

CONFIDENCE = 0.95
FEWEST_FOR_BAND = 4  # minimum number of values for an interval in a chart; with fewer it is too wide
LOG_FROM = 20  # a chart's x axis is logarithmic if its longest line is this many times its shortest
DIGITS = 12  # significant digits kept before rounding; errors of float sums are smaller
EXACT = decimal.Context(prec=350, rounding=decimal.ROUND_HALF_UP)  # enough digits for every float


@dataclass(frozen=True)
class Estimate:
    """Mean of independent values with a 95 % confidence interval.

    Attributes:
        mean: mean of `values`.
        half_width: half-width of the confidence interval, infinite for a single value.
        values: the values.
    """

    mean: float
    half_width: float
    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """The number of values."""
        return len(self.values)

    def includes(self, value: float) -> bool:
        """Whether the confidence interval contains `value`."""
        return abs(self.mean - value) <= (self.half_width if self.n > 1 else 0.0)

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of Student's t test of the mean against 0, or None for a single value."""
        if self.n == 1:
            return None
        if not self.half_width:
            return 0.0 if self.mean else 1.0
        freedom = self.n - 1
        t = self.mean / self.half_width * student_quantile(freedom, CONFIDENCE)
        return beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))

    def spread(self, decimals: int = 4, *, sign: bool = False) -> str:
        """Format the confidence interval without the mean, such as `± 0.0031`.

        Two values are listed instead, because their interval would be very wide. For a single value, the text is empty.
        With `sign`, positive values get a plus sign.
        """
        if self.n == 2:
            return f"({', '.join(fixed(value, decimals, sign=sign) for value in self.values)})"
        return f"± {fixed(self.half_width, decimals)}" if self.n > 2 else ""

    def text(self, decimals: int = 4, *, sign: bool = False) -> str:
        """Format the mean and its interval: `0.9412 ± 0.0031`, or `0.9412 (0.9400, 0.9424)` for two values."""
        return f"{fixed(self.mean, decimals, sign=sign)} {self.spread(decimals, sign=sign)}".rstrip()

    def amount(self) -> str:
        """Format the mean and its interval with decimals that fit the mean's magnitude, for example for seconds."""
        return self.text(decimals_of(self.mean))


def decimals_of(amount: float) -> int:
    """Return the number of decimals to show for `amount`: 0 if |amount| >= 1000, 1 if |amount| >= 10, otherwise 2."""
    return 0 if abs(amount) >= 1000 else 1 if abs(amount) >= 10 else 2


def fixed(value: float, decimals: int = 4, *, sign: bool = False) -> str:
    """Format a number with a fixed number of decimals, and with a plus sign if `sign` is true and the number positive.

    Halves are rounded away from zero: 0.82345 becomes 0.8235."""
    if not math.isfinite(value):
        return str(value)
    rounded = decimal.Decimal(f"{value:.{DIGITS}g}").quantize(decimal.Decimal(1).scaleb(-decimals), context=EXACT)
    return f"{rounded:{'+' if sign else ''}f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent values with its confidence interval, or None if there are no values.

    The interval is mean ± t s / sqrt(n) (Student 1908). Here s is the sample standard deviation (divisor n - 1), and t
    is a quantile of Student's t distribution with n - 1 degrees of freedom.
    """
    if not len(values):
        return None
    _, half_width = mean_and_half_width(np.asarray(values, dtype=float)[:, None])
    mean = fmean(values)  # independent of the order
    if abs(mean) < SAME * max(map(abs, values)):  # the values cancel, and only their rounding errors are left
        mean = 0.0
    return Estimate(mean, float(half_width[0]), tuple(map(float, values)))


def mean_and_half_width(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the half-width of the 95 % interval of each column of `values` [n, columns]."""
    n = len(values)
    if n == 1:
        return values[0], np.full(values.shape[1], math.inf)
    spread = values.std(axis=0, ddof=1)
    return values.mean(axis=0), student_quantile(n - 1, CONFIDENCE) * spread / math.sqrt(n)


def on_common_grid(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate n curves (x, y) at common x values. Return these x values [points] and the y values [n, points].

    x is ascending in each curve. The common x values are those of all curves, in the range that every curve covers.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    common = points[(points >= first) & (points <= last)]
    return common, np.array([np.interp(common, x, y) for x, y in curves])


EPSILON = 1e-16
TINY = 1e-300  # replaces 0 in a continued fraction
GRID = np.linspace(-9.0, 9.0, 4001)  # of a standard normal variable, whose density outside is negligible


@functools.cache
def student_quantile(degrees_of_freedom: int, confidence: float = 0.95) -> float:
    """Return t such that a Student-distributed value lies within ±t with probability `confidence`.

    >>> round(student_quantile(2), 4)
    4.3027
    """

    def outside(t: float) -> float:
        return beta_share(degrees_of_freedom / 2, 0.5, degrees_of_freedom / (degrees_of_freedom + t * t))

    return _solve(lambda t: 1 - confidence - outside(t))


def chi_square_tail(x: float, degrees_of_freedom: int) -> float:
    """Return the probability that a chi-square variable exceeds x >= 0 (Abramowitz and Stegun 26.4.4 and 26.4.5).

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
    """Return the probability that an F(`numerator`, `denominator`)-distributed variable exceeds x >= 0.

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
    """Return r such that the range of `candidates` standard normal values is at most r with probability `confidence`.

    The range is the maximum minus the minimum of these values.

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
    """Return the regularised incomplete beta function I_x(a, b), computed as a continued fraction (DLMF 8.17.22).

    >>> round(beta_share(2, 3, 0.5), 4)
    0.6875
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly here
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
    """Return the positive root of an increasing function, found by bisection."""
    low, high = 0.0, 1.0
    while increasing(high) < 0:
        high *= 2
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
