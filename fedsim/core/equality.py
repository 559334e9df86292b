"""Compare results that may differ by the rounding errors of float sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

SAME = 1e-12  # numbers whose relative difference is at most this are equal up to rounding


def same(first: float, second: float) -> bool:
    """Whether two results are equal up to rounding, such as 0.7888888888888889 and 0.788888888888889.

    Results are compared here and in `levels` only, so that tables, ranks, figures and choices agree on what is equal.
    """
    return math.isclose(first, second, rel_tol=SAME)


def levels(values: Sequence[float]) -> list[int]:
    """Return the level of each value: 0 for the highest value, 1 for the next lower one, and so on.

    Values that are equal up to rounding share a level.

    >>> levels([0.5, (0.7 + 0.1) / 2, 0.4, -math.inf])
    [0, 1, 1, 2]
    """
    descending = sorted(range(len(values)), key=lambda index: -values[index])
    result, level = [0] * len(values), 0
    for higher, index in itertools.pairwise(descending):
        level += not same(values[higher], values[index])
        result[index] = level
    return result
