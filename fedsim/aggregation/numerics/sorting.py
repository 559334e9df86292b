"""Order statistics of each column: sorted values, the median, and the mean of the values nearest a point.

On a CPU, the columns of matrices with few rows are sorted by a sorting network. Each of its comparators computes the
minimum and the maximum of two rows, for all columns at once. With more rows, NumPy sorts one column after another.
Other devices use PyTorch's sort.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import map_columns

COMPARATORS = 90  # with more comparators NumPy is faster; 16 rows need 63, 20 rows need 97, or 81 for the median alone
BY_NUMPY = (torch.float32, torch.float64)  # NumPy's sort of short columns is vectorised, PyTorch's is not


def map_sorted_columns(
    updates: Tensor, function: Callable[[Tensor, Tensor], Tensor], needed: Iterable[int] | None = None
) -> Tensor:
    """Sort each column of `updates` [n, d], and apply `function` to one block of columns after another. Returns [d].

    Args:
        updates: updates of the n workers, [n, d].
        function: maps the sorted values [m, columns] and the unsorted block [n, columns] to [columns].
        needed: which m of the n sorted values `function` needs, as positions in ascending order. None: all.
    """
    positions = tuple(range(len(updates)) if needed is None else needed)
    return map_columns(updates, lambda block: function(sorted_columns(block, positions), block))


def sorted_columns(block: Tensor, needed: tuple[int, ...]) -> Tensor:
    """Sort each column of `block` [n, columns] in ascending order, NaN last.

    Returns the values at the m `needed` positions, as a new tensor [m, columns].
    """
    if block.device.type != "cpu" or block.dtype not in BY_NUMPY:
        return _some(block.t().sort(dim=1).values.t(), needed)
    values = block.detach().numpy()
    if len(values) <= COMPARATORS and len(network(len(values), needed)[0]) <= COMPARATORS:
        ascending = _by_network(values, needed)
        with np.errstate(all="ignore"):
            if math.isfinite(ascending[0].sum()):
                return torch.from_numpy(ascending)
    columns = np.array(values.T, order="C", copy=True)  # always copies, even if the block is column-major
    columns.sort(axis=1)
    return _some(torch.from_numpy(columns).t(), needed)


def _some(ascending: Tensor, needed: tuple[int, ...]) -> Tensor:
    """Return the rows of `ascending` at the `needed` positions."""
    side_by_side = needed[-1] - needed[0] == len(needed) - 1
    return ascending[needed[0] : needed[-1] + 1] if side_by_side else ascending[list(needed)]


# Indices of the two rows to compare, and of the rows to which the minimum and maximum are written (None: not needed).
Comparator = tuple[int, int, int | None, int | None]


@functools.lru_cache(maxsize=256)
def network(n: int, needed: tuple[int, ...]) -> tuple[tuple[Comparator, ...], list[int]]:
    """Return a sorting network: a fixed list of comparisons that sorts n values (merge exchange, Batcher 1968).

    Comparisons that do not affect the `needed` sorted positions are omitted. The second result contains, for each
    needed position, the index of the row in which the network leaves its value.
    """
    pairs, wanted = [], set(needed)
    for low, high in reversed(list(_merge_exchange(n))):
        if low in wanted or high in wanted:
            pairs.append((low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    comparators: list[Comparator] = []
    at, free = list(range(n)), n
    for low, high, lesser, greater in reversed(pairs):
        first, second = at[low], at[high]
        if lesser and greater:
            at[low], free = free, first
        comparators.append((first, second, at[low] if lesser else None, second if greater else None))
    return tuple(comparators), [at[position] for position in needed]


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of positions that the sorting network compares. The smaller value goes to the first position."""
    top = 1 << max(0, (n - 1).bit_length() - 1)
    run = top if n > 1 else 0
    while run:  # values at a distance of 2 * run are sorted already
        apart, step, start = run, top, 0
        while True:
            yield from ((position, position + apart) for position in range(n - apart) if position & run == start)
            if step == run:
                break
            apart, step, start = step - run, step // 2, run
        run //= 2


def _by_network(values: np.ndarray, needed: tuple[int, ...]) -> np.ndarray:
    """Sort each column of `values` [n, columns] with a sorting network.

    Returns the sorted values at the m `needed` positions, [m, columns]. A column that contains NaN becomes NaN.
    """
    n, columns = values.shape
    room = np.empty((n + 1, columns), dtype=values.dtype)
    room[:n] = values
    rows = list(room)
    comparators, positions = network(n, needed)
    for first, second, lesser, greater in comparators:
        if lesser is not None:
            np.minimum(rows[first], rows[second], out=rows[lesser])
        if greater is not None:
            np.maximum(rows[first], rows[second], out=rows[greater])
    return room[positions]


def middle_positions(n: int) -> range:
    """Return the positions of the median among n sorted values: one position for odd n, two for even n."""
    return range((n - 1) // 2, n // 2 + 1)


def middle(ascending: Tensor) -> Tensor:
    """Return the median [columns] of sorted values [m, columns]: the mean of the two middle values for even m."""
    positions = middle_positions(len(ascending))
    if ascending.device.type != "cpu":
        return ascending[positions[0] : positions[-1] + 1].mean(0)  # one launch
    return (ascending[positions[0]] + ascending[positions[-1]]) / 2


def mean_nearest(ascending: Tensor, block: Tensor, centre: Tensor, keep: int) -> Tensor:
    """Return the mean [columns] of the `keep` values nearest the centre, separately for each column.

    Of equally near values, those in the first rows are chosen.

    Args:
        ascending: sorted values of `block`, [n, columns]. They are overwritten.
        block: values, [n, columns].
        centre: centre of each column, [columns].
        keep: number of values to average.
    """
    n = len(ascending)
    if keep == n:
        return ascending.mean(0)
    if block.device.type != "cpu":  # a search for ties would have to wait for the device
        return _mean_of_first(block, centre, keep)
    away = (ascending - centre).abs_()
    # The nearest values are adjacent. `reach` is the smallest distance of the farthest value over all starts of a run.
    reach = torch.maximum(away[: n - keep + 1], away[keep - 1 :]).amin(0)
    far = away.gt_(reach)  # 1.0 or 0.0, which is faster than bool
    result = ascending.addcmul_(ascending, far, value=-1).sum(0) / keep
    tied = ((far.sum(0) != n - keep) | ~result.isfinite()).nonzero().flatten()
    if len(tied):  # rare, unless rows repeat or are not finite
        result[tied] = _mean_of_first(block[:, tied], centre[tied], keep)
    return result


def _mean_of_first(values: Tensor, centre: Tensor, keep: int) -> Tensor:
    """Return the mean of the `keep` values nearest the centre, separately for each column, by sorting the distances."""
    order = (values - centre).abs_().argsort(dim=0, stable=True)[:keep]
    return values.gather(0, order).mean(0)
