"""Squared distances of updates on a GPU, in float32 with a proven error bound, for rules that select updates.

Consumer GPUs compute float64 at 1/32 or 1/64 of the speed of float32. Distances in float32 usually suffice to decide
which updates a rule selects. Otherwise, a few distances are computed in float64, or all of them.

Error bound: let y_i be update x_i minus the centre c, rounded to float32, u = 2^-24 and k = TERMS.

1. An inner product of k columns in float32 has an error of at most k u / (1 - k u) times the product of the two norms,
   in any order of summation, with or without fused operations (Higham, "Accuracy and Stability of Numerical
   Algorithms", section 3.1). By the Cauchy-Schwarz inequality, this also holds for a sum of such inner products.
   Therefore, the error of |y_i - y_j|^2 is at most k u / (1 - k u) (|y_i| + |y_j|)^2.
2. Rounding x_i - c to y_i changes the squared distance by at most 2.01 u (|y_i| + |y_j|)^2.
3. Errors of sums in float64, and inputs below 2^-126 that a GPU may replace by zero, add less than
   u (|y_i| + |y_j|)^2 for d <= 2^32. The norms |y_i| are computed from the inner products, which adds 0.01 u. SPARE
   covers 2 and 3.
4. Where float32 underflows, each column changes an inner product by at most 2^-125.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import on_host, small_blocks, total_of
from fedsim.system.devices import to_device
from fedsim.system.precision import full_precision

TERMS = 256  # columns of a product in float32; more increase the error bound, fewer take more memory
SPARE = 4  # roundings in the error bound, in addition to one for each of the TERMS columns
UNIT = 2.0**-24  # maximum relative rounding error of float32
BOUND = (TERMS + SPARE) * UNIT / (1 - (TERMS + SPARE) * UNIT)  # error of |x_i - x_j|^2 relative to (|y_i| + |y_j|)^2
UNDERFLOW = 2.0**-125  # maximum error of an inner product for each column, where float32 underflows
MARGIN = 4e-12  # relative margin for rounding errors of scores in float64, and for scores that count as equal
FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # compute capabilities of GPUs with at least half the speed
WORTHWHILE = 2**28  # minimum n * n * d; on other GPUs, fewer float64 multiplications take less than three milliseconds
MOST_ROWS = 4 * TERMS  # for more updates, the products of TERMS columns take too much memory

Scores = Callable[[Tensor], Tensor]


class RoughDistances:
    """Approximate squared distances between all pairs of n updates.

    Args:
        squares: approximate squared distances, float64 [n, n], symmetric, 0 on the diagonal.
        errors: maximum errors of `squares`, [n, n], symmetric, 0 on the diagonal.
        measure: function that returns the exact squared distances [k] of k pairs of updates, from the positions of
            their first and of their second updates.
    """

    def __init__(
        self, squares: np.ndarray, errors: np.ndarray, measure: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> None:
        self._squares, self._errors, self._measure = squares, errors, measure

    def deciding(self, scores_of: Scores, count: int) -> Tensor | None:
        """Return squared distances [n, n], precise enough to find the `count` smallest scores.

        At most 2n pairs are measured in float64. Equal updates have equal distances. Returns None if more pairs would
        have to be measured.

        Args:
            scores_of: function that maps squared distances [n, n] to scores, [n], or [n, n] if the score at (i, j)
                depends on the distance of i and j only. No score may decrease if a distance increases.
            count: number of scores to select, in each line of a matrix.
        """
        each = np.arange(len(self._squares))
        if not self._undecided(scores_of, count, each).any():
            return torch.from_numpy(self._squares)
        first_equal = (self._squares <= self._errors).argmax(1)  # if the error bound allows that updates are equal
        undecided = self._undecided(scores_of, count, first_equal)
        rows, columns = (undecided if undecided.ndim == 2 else undecided[:, None] | undecided).nonzero()
        needed = np.zeros(self._squares.shape, dtype=bool)
        needed[first_equal[rows], first_equal[columns]] = True
        needed[first_equal, each] = True
        first, second = np.triu(needed | needed.T, 1).nonzero()
        if len(first) > 2 * len(each):
            return None
        squares = self._squares.copy()
        squares[first, second] = squares[second, first] = self._measure(first, second)
        if squares[first_equal, each].any():  # different updates
            return None
        return torch.from_numpy(squares[np.ix_(first_equal, first_equal)])

    def _undecided(self, scores_of: Scores, count: int, first_equal: np.ndarray) -> np.ndarray:
        """Return a mask of the scores of which the error bounds do not show whether they are selected.

        `first_equal`: position of the first update that is equal to each update, [n].
        """
        equal = np.ix_(first_equal, first_equal)
        squares, errors = self._squares[equal], self._errors[equal]
        bounds = squares, np.maximum(squares - errors, 0), squares + errors
        scores, low, high = (scores_of(torch.from_numpy(values)).numpy() for values in bounds)
        high = high * (1 + MARGIN)
        order = scores.argsort(axis=-1, kind="stable")
        selected = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(selected, order[..., :count], True, axis=-1)
        of_last = first_equal == first_equal[order[..., count - 1]][..., None]  # equal to the last selected update
        undecided = np.zeros(scores.shape, dtype=bool)
        for inside, outside in ((selected & ~of_last, ~selected), (selected, ~selected & ~of_last)):
            undecided |= inside & (high >= np.where(outside, low, np.inf).min(-1, keepdims=True))
            undecided |= outside & (low <= np.where(inside, high, -np.inf).max(-1, keepdims=True))
        return undecided


def pay_off(updates: Tensor) -> bool:
    """Whether to try distances in float32 for `updates` [n, d] first."""
    n, d = updates.shape
    if not updates.is_cuda or updates.dtype != torch.float32 or n > MOST_ROWS or d > 2**32 or n * n * d < WORTHWHILE:
        return False
    return torch.cuda.get_device_capability(updates.device) not in FAST_FLOAT64


def rough_distances(updates: Tensor, centre: Tensor) -> RoughDistances | None:
    """Return the distances of all pairs of updates, computed on a GPU. Returns None if float32 numbers overflow.

    Args:
        updates: updates of the n workers, float32 [n, d].
        centre: position of the update that is subtracted, int64 [1].
    """
    products = on_host(_products(updates, centre))[0].numpy()
    if not np.isfinite(products).all():
        return None

    def measure(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return on_host(_squared_differences(updates, first, second))[0].numpy()

    return RoughDistances(*with_errors(products, updates.shape[1]), measure)


def with_errors(products: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Return squared distances [n, n] and their maximum errors [n, n].

    `products`: inner products of all pairs of updates with `d` values, after the centre is subtracted, computed by
    `_products`, [n, n].
    """
    squared_norms = products.diagonal()
    norms = np.sqrt(squared_norms + d * UNDERFLOW)
    errors = BOUND * (norms + norms[:, None]) ** 2 + 4 * d * UNDERFLOW
    squares = np.maximum(squared_norms + squared_norms[:, None] - (products + products.T), 0)
    for matrix in (squares, errors):
        np.fill_diagonal(matrix, 0)
    return squares, errors


def _products(updates: Tensor, centre: Tensor) -> Tensor:
    """Return the inner products [n, n] of all pairs of updates minus the centre, on their device.

    Products of TERMS columns are float32, and their sums float64.
    """
    n, parts = len(updates), []
    with full_precision(updates.device, convolutions=False), torch.autocast(updates.device.type, enabled=False):
        for block in small_blocks(updates):
            part = updates[:, block]
            width, count = part.shape[1], -(-part.shape[1] // TERMS)
            rows = part.new_empty(n, count * TERMS)
            torch.sub(part, part.index_select(0, centre), out=rows[:, :width])
            rows[:, width:] = 0
            stack = rows.view(n, count, TERMS).transpose(0, 1)
            parts.append(torch.bmm(stack, stack.transpose(1, 2)).sum(0, dtype=torch.double))
    return total_of(parts)


def _squared_differences(updates: Tensor, first: np.ndarray, second: np.ndarray) -> Tensor:
    """Return the squared distances [k] of k pairs of updates in float64, on their device."""
    pairs, parts = to_device(torch.from_numpy(np.stack([first, second])), updates.device), []
    for block in small_blocks(updates):
        away = updates[:, block].index_select(0, pairs[0]).double()
        away -= updates[:, block].index_select(0, pairs[1])
        parts.append(away.square_().sum(1))
    return total_of(parts)
