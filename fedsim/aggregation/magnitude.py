"""Squares of very large and very small numbers: when they leave the range of a dtype, and by what to scale them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

MARGIN = 24  # powers of two: sums of a few thousand squares that are in range are in range themselves
MOST = 1_000  # 2^MOST and 2^-MOST are ordinary numbers


def in_range(squares: Tensor) -> Tensor:
    """Whether each of these sums of squares is neither near overflow nor so small that digits may have been lost."""
    low, high = limits(squares.dtype)
    return (squares > low) & (squares < high)


@functools.cache
def limits(dtype: torch.dtype) -> tuple[float, float]:
    """Between what sums of squares of this dtype are in range; see `in_range`."""
    reach = _reach(dtype)
    return 2.0 ** (-reach * 15 // 16), 2.0 ** (reach - MARGIN)


def unit_for(peak: float, terms: int, dtype: torch.dtype) -> float:
    """A power of two u by which numbers up to `peak` are to be divided so that sums of squares are in range.

    They get as large as they may, so that what is small beside the peak keeps its digits: in float64 what is smaller by
    some 290 orders of magnitude. Where the peak is zero or not finite u is 1.
    """
    if not 0 < peak < math.inf:
        return 1.0
    exponent = math.frexp(peak)[1] + math.frexp(math.sqrt(terms))[1] - (_reach(dtype) // 2 - MARGIN // 2)
    return 2.0 ** max(-MOST, min(MOST, exponent))


def power_of_two(value: float) -> float:
    """The power of two by which to multiply `value` to make it about 1, as nearly as there is one; 1 for zero."""
    return 2.0 ** max(-MOST, min(MOST, -math.frexp(value)[1])) if 0 < value < math.inf else 1.0


def _reach(dtype: torch.dtype) -> int:
    """The power of two from which on a dtype has no numbers: 1024 of float64, 128 of float32."""
    return math.frexp(torch.finfo(dtype).max)[1]
