"""Means with their 95 percent intervals, and numbers as text."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedsim.core.distributions import student_quantile

CONFIDENCE = 0.95
FEWEST_FOR_BAND = 4  # values from which charts show an interval; that of fewer is too wide
LOG_FROM = 20  # ratio of the longest line of a chart to the shortest from which its x axis is logarithmic
DIGITS = 12  # digits of a number before it is rounded; the error of a float sum is smaller
EXACT = decimal.Context(prec=350, rounding=decimal.ROUND_HALF_UP)  # for every float and its decimals


@dataclass(frozen=True)
class Estimate:
    """A mean of `values`, and the half width of its interval, which is infinite for one value."""

    mean: float
    half_width: float
    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    def includes(self, value: float) -> bool:
        """Whether the interval includes a value; the interval of a single value includes only that value."""
        return abs(self.mean - value) <= (self.half_width if self.n > 1 else 0.0)

    def spread(self, decimals: int = 4, *, sign: bool = False) -> str:
        """The text beside the mean: `± 0.0031`; both of two values, since their interval is wide; "" for one."""
        if self.n == 2:
            return f"({', '.join(fixed(value, decimals, sign=sign) for value in self.values)})"
        return f"± {fixed(self.half_width, decimals)}" if self.n > 2 else ""

    def text(self, decimals: int = 4, *, sign: bool = False) -> str:
        """`0.9412 ± 0.0031`; of two values `0.9412 (0.9400, 0.9424)`."""
        return f"{fixed(self.mean, decimals, sign=sign)} {self.spread(decimals, sign=sign)}".rstrip()

    def amount(self) -> str:
        """The text of a mean that may be of any size, such as virtual seconds."""
        return self.text(decimals_of(self.mean))


def decimals_of(amount: float) -> int:
    """How many decimals an amount of any size is shown with."""
    return 0 if abs(amount) >= 1000 else 1 if abs(amount) >= 10 else 2


def fixed(value: float, decimals: int = 4, *, sign: bool = False) -> str:
    """A number to so many decimals, a half away from zero: 0.82345 is 0.8235 in every table and picture.

    `f"{value:.4f}"` would round the float's binary value, so that equal means from different sums may differ.
    """
    if not math.isfinite(value):
        return str(value)
    rounded = decimal.Decimal(f"{value:.{DIGITS}g}").quantize(decimal.Decimal(1).scaleb(-decimals), context=EXACT)
    return f"{rounded:{'+' if sign else ''}f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of independent values, with the interval mean ± t s / sqrt(n) (Student 1908); None of no values.

    s is the standard deviation with n - 1, t the quantile of Student's distribution with n - 1 degrees of freedom.
    """
    if not len(values):
        return None
    _, half_width = mean_and_half_width(np.asarray(values, dtype=float)[:, None])
    return Estimate(fmean(values), float(half_width[0]), tuple(map(float, values)))  # fmean ignores the order


def mean_and_half_width(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for each column of values [n, columns]: means [columns] and half widths [columns]."""
    n = len(values)
    if n == 1:
        return values[0], np.full(values.shape[1], math.inf)
    spread = values.std(axis=0, ddof=1)
    return values.mean(axis=0), student_quantile(n - 1, CONFIDENCE) * spread / math.sqrt(n)


def on_common_grid(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate n curves (x ascending, y) at the x of all of them: x [points], values [n, points].

    From the latest first x to the earliest last x, where all curves are known.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    common = every[(every >= first) & (every <= last)]
    return common, np.array([np.interp(common, x, y) for x, y in curves])
