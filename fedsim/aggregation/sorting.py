"""Order statistics of each column: its values sorted, its median, the mean of those nearest a point.

On a CPU few rows are sorted by a network of comparators, each of which takes the lesser and the greater of two rows for
all columns of a block at once; more rows by NumPy, a column at a time. Other devices use PyTorch's sort.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.columns import map_columns

COMPARATORS = 90  # beyond which NumPy's sort is faster: 16 rows have 63 of them, 20 have 97, or 81 for the median alone
BY_NUMPY = (torch.float32, torch.float64)  # its sort of short runs is vectorised, PyTorch's is not
ROOM = 0.16  # of the size of the updates, for what is being sorted on a CPU
NARROWEST = 1_024  # columns at once, all the same: a comparator takes half a microsecond to call


def map_sorted_columns(
    updates: Tensor, function: Callable[[Tensor, Tensor], Tensor], needed: Iterable[int] | None = None
) -> Tensor:
    """[d], where `function` makes [columns] of the sorted values [m, columns] and the block [n, columns] itself.

    `needed` are the m places, of n in ascending order, that the function wants; None: all of them.
    """
    n, d = updates.shape
    places = tuple(range(n) if needed is None else needed)
    widening = max(1, 4 // updates.element_size())  # narrow numbers are sorted as float32
    rows = (n + 1 + len(places)) * widening + (n * widening if widening > 1 else 0)
    columns = max(NARROWEST, int(d * ROOM * n / rows))
    return map_columns(updates, lambda block: of_sorted_columns(block, function, places), columns)


def of_sorted_columns(
    block: Tensor, function: Callable[[Tensor, Tensor], Tensor], needed: Iterable[int] | None = None
) -> Tensor:
    """[columns], the same of one block [n, columns]."""
    return function(sorted_columns(block, tuple(range(len(block)) if needed is None else needed)), block)


def sorted_columns(block: Tensor, needed: tuple[int, ...]) -> Tensor:
    """What of each column's values in ascending order, NaN last, is at the m `needed` places.

    Makes a new tensor [m, columns] of the block [n, columns].
    """
    if block.device.type != "cpu" or block.dtype not in BY_NUMPY:
        return _some(block.t().sort(dim=1).values.t(), needed)
    values = block.detach().numpy()
    if len(values) <= COMPARATORS and len(network(len(values), needed)[0]) <= COMPARATORS:
        ascending = _by_network(values, needed)
        with np.errstate(all="ignore"):
            if math.isfinite(ascending[0].sum()):  # comparators spread a NaN all over its column
                return torch.from_numpy(ascending)
    columns = np.array(values.T, order="C", copy=True)  # a copy even of what lies in order already
    columns.sort(axis=1)
    return _some(torch.from_numpy(columns).t(), needed)


def _some(ascending: Tensor, needed: tuple[int, ...]) -> Tensor:
    """Views, as far as that can be, of what is at the `needed` places."""
    side_by_side = needed[-1] - needed[0] == len(needed) - 1
    return ascending[needed[0] : needed[-1] + 1] if side_by_side else ascending[list(needed)]


class Comparator(NamedTuple):
    """Where the two rows are that it compares, and where it puts the lesser and the greater; None: nobody needs it."""

    one: int
    other: int
    lesser: int | None
    greater: int | None


@functools.lru_cache(maxsize=256)
def network(n: int, needed: tuple[int, ...]) -> tuple[tuple[Comparator, ...], list[int]]:
    """Comparators, in order, for n rows and one more that is free; and where the `needed` ones, sorted, are at the end.

    Merge exchange (Batcher 1968; Knuth, The Art of Computer Programming 3, algorithm 5.2.2M), without the comparators
    whose outcome goes nowhere. No row is ever copied: the lesser one goes where a row is free.
    """
    pairs, wanted = [], set(needed)
    for low, high in reversed(list(_merge_exchange(n))):
        if low in wanted or high in wanted:
            pairs.append((low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    comparators, at, free = [], list(range(n)), n
    for low, high, lesser, greater in reversed(pairs):
        one, other = at[low], at[high]
        if lesser and greater:
            at[low], free = free, one
        comparators.append(Comparator(one, other, at[low] if lesser else None, other if greater else None))
    return tuple(comparators), [at[place] for place in needed]


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of places; of each the lesser value goes to the first."""
    top = 1 << max(0, (n - 1).bit_length() - 1)
    run = top if n > 1 else 0
    while run:  # what lies 2 `run` apart is sorted by now
        apart, step, start = run, top, 0
        while True:
            yield from ((place, place + apart) for place in range(n - apart) if place & run == start)
            if step == run:
                break
            apart, step, start = step - run, step // 2, run
        run //= 2


def _by_network(values: np.ndarray, needed: tuple[int, ...]) -> np.ndarray:
    """What of the sorted columns of `values` [n, columns] is at the `needed` places, [m, columns]; any order of NaN."""
    n, columns = values.shape
    room = np.empty((n + 1, columns), dtype=values.dtype)
    room[:n] = values
    rows = list(room)
    comparators, places = network(n, needed)
    for one, other, lesser, greater in comparators:
        if lesser is not None:
            np.minimum(rows[one], rows[other], out=rows[lesser])
        if greater is not None:
            np.maximum(rows[one], rows[other], out=rows[greater])
    return room[places]


def middle_places(n: int) -> range:
    """Where the median of n sorted values is: between two of them for even n."""
    return range((n - 1) // 2, n // 2 + 1)


def middle(ascending: Tensor) -> Tensor:
    """The median of each column [columns] of sorted values [m, columns]: between the two middle ones for even m."""
    places = middle_places(len(ascending))
    return (ascending[places[0]] + ascending[places[-1]]) / 2


def mean_nearest(ascending: Tensor, block: Tensor, centre: Tensor, keep: int) -> Tensor:
    """Per column the mean of the `keep` values nearest `centre` [columns]; of equally near ones the first rows count.

    `ascending` [n, columns] are the sorted values of `block` [n, columns], and are not left as they were.
    """
    n = len(ascending)
    if keep == n:
        return ascending.mean(0)
    if block.device.type != "cpu":  # to find out which columns have ties would wait for the device
        return _mean_of_first(block, centre, keep)
    away = (ascending - centre).abs_()
    # The nearest values lie side by side; how far the farthest of them is, for each place where they may begin.
    reach = torch.maximum(away[: n - keep + 1], away[keep - 1 :]).amin(0)
    far = away.gt_(reach)  # 1 or 0, which is faster than true or false
    result = ascending.addcmul_(ascending, far, value=-1).sum(0) / keep
    tied = ((far.sum(0) != n - keep) | ~result.isfinite()).nonzero().flatten()
    if len(tied):  # rare, unless rows repeat or are not finite: now it matters which row a value comes from
        result[tied] = _mean_of_first(block[:, tied], centre[tied], keep)
    return result


def _mean_of_first(values: Tensor, centre: Tensor, keep: int) -> Tensor:
    """The result of `mean_nearest`, by a stable sort of the values' distances from the centre."""
    order = (values - centre).abs_().argsort(dim=0, stable=True)[:keep]
    return values.gather(0, order).mean(0)
