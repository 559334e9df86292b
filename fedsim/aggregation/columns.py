"""Columns: how long rows are cut, and what sums over them give.

Everything here goes over blocks of columns. On a CPU a block stays in cache, so that what a rule needs beyond its input
is a small part of it, however long the rows are. Other devices get as few blocks as their memory allows, because each
block costs kernel launches; there a rule takes up to WORKING bytes for each number of its input, and at most SHARE of
the device's memory. A copy in float64 of 100 rows of 1,663,370 numbers is 1.3 GB.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.magnitude import in_range
from fedsim.system.devices import to_device, total_memory_of, wide_dtype

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]  # over processes of which each has other columns

CPU = torch.device("cpu")
BLOCK = 16_384  # columns at least that a process takes: in smaller blocks the calls cost more than the arithmetic
BLOCKS = 64  # at most, so that the number of calls stays small however long a row is
FEWEST, MOST = 256, 4_096  # columns that are worked on at once within a process
SAMPLED = 512  # columns that stand for all
RUN = 16  # of them side by side: a line of the cache, in float32
WORKING = 64  # bytes for each number of a block off the CPU: wide or sorted copies, positions, the own memory of a sort
SHARE = 1 / 8  # of the memory of a device, for one block
LINE = 64  # columns: the blocks of several processes on one device begin at multiples of that


def column_blocks(d: int, index: int = 0, count: int = 1, *, n: int = 1, device: torch.device = CPU) -> Iterator[slice]:
    """The blocks of columns that process `index` of `count` aggregates; together they cover range(d).

    On a CPU the cuts depend on d alone, never on who computes them, so that every engine does the same arithmetic on
    the same blocks and gets the same bits. On another device each process has one block, or as few as the device's
    memory allows for `n` rows.
    """
    if device.type == "cpu":
        size = max(BLOCK, math.ceil(d / BLOCKS / BLOCK) * BLOCK)
    else:
        size = min(math.ceil(d / count / LINE) * LINE, most_columns(n, device)) or 1
    for start in range(index * size, d, count * size):
        yield slice(start, min(start + size, d))


@functools.cache
def most_columns(n: int, device: torch.device) -> int:
    """Columns of n rows that a device other than the CPU works on at once, a multiple of LINE."""
    values = min(SHARE * total_memory_of(device) / WORKING, 2**62)  # the memory may be infinite
    return max(LINE, int(values) // max(1, n) // LINE * LINE)


def block_size(updates: Tensor, columns: int | None = None) -> int:
    """Columns of a small block of rows [n, d].

    On a CPU at least FEWEST, and so few that the block fits in cache; `columns` takes the place of a twelfth of them
    all. On another device `most_columns`.
    """
    n, d = updates.shape
    if updates.device.type != "cpu":
        return most_columns(n, updates.device)
    return min(MOST, max(FEWEST, d // 12 if columns is None else columns))


def small_blocks(updates: Tensor, columns: int | None = None) -> Iterator[slice]:
    """Blocks of columns of rows [n, d]; see `block_size`.

    On a CPU a copy of one in float64 is at most a sixth of the rows in float32.
    """
    d, size = updates.shape[1], block_size(updates, columns)
    for start in range(0, d, size):
        yield slice(start, min(start + size, d))


def wide_blocks(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Small blocks of columns, each with a copy of the rows there [n, columns], in double precision where there is one.

    The copy may be changed; the next one takes its place, in memory that is in cache by then.
    """
    n, d = updates.shape
    widest = min(d, block_size(updates))
    room = torch.empty(n, widest, dtype=wide_dtype(updates.device), device=updates.device)
    # NumPy takes two thirds of the time of PyTorch for many short runs of numbers, but does not share them out.
    by_numpy = room.device.type == "cpu" and updates.dtype != torch.bfloat16 and torch.get_num_threads() == 1
    source, target = (updates.detach().numpy(), room.numpy()) if by_numpy else (updates, room)
    for block in small_blocks(updates):
        width = block.stop - block.start
        if by_numpy:
            target[:, :width] = source[:, block]
        else:
            target[:, :width].copy_(source[:, block])
        yield block, room if width == widest else room[:, :width]


def sampled_columns(updates: Tensor) -> Tensor:
    """Some of the columns, from everywhere: a few that lie side by side cost as much time as one of them."""
    n, d = updates.shape
    runs = SAMPLED // RUN
    if d <= SAMPLED:
        return updates
    return updates[:, : d // runs * runs].unflatten(1, (runs, d // runs))[:, :, :RUN].reshape(n, SAMPLED)


def map_columns(updates: Tensor, function: Callable[[Tensor], Tensor], columns: int | None = None) -> Tensor:
    """[d], where `function` makes [columns] of a block [n, columns], which it gets in float32 at least.

    On a CPU there are not many more `columns` in a block than said, where that is said.
    """
    result = updates.new_empty(updates.shape[1])
    for block in small_blocks(updates, columns):
        result[block] = function(widened(updates[:, block])).to(result.dtype)
    return result


def widened(values: Tensor) -> Tensor:
    """The same in float32 where they are narrower: sums and means of half precision lose too much."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def own_columns(values: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """The `Reduce` of a process that has all columns: nothing to be done."""
    return values


def squared_norms(updates: Tensor) -> Tensor:
    """[n], in double precision where the device has it."""
    return squared_distances_to(updates, None)


def squared_distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """[n] squared distances of the rows from `point` [d] (None: from zero), in double precision where there is one."""
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    sums = total.numpy() if total.device.type == "cpu" else None
    with np.errstate(all="ignore"):  # what overflows is dealt with by those who ask
        for block, rows in wide_blocks(updates):
            if point is not None:
                rows.sub_(point[block])
            if sums is None:
                total += rows.square().sum(1)
            else:  # one dot product after another reads the rows only once, and is too short to be shared out
                values = rows.numpy()
                sums += np.matmul(values[:, None], values[:, :, None])[:, 0, 0]
    return total


def norms(updates: Tensor) -> Tensor:
    """|x_k|, [n]; see `distances_to`."""
    return distances_to(updates, None)


def distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """|x_k - point|, [n], of the rows from `point` [d] (None: from zero), float64 on the CPU.

    Right also where the squares leave the range of float64; infinite where the distance itself does.
    """
    squares = squared_distances_to(updates, point).cpu()
    distances = squares.double().sqrt()
    if all(values.element_size() < squares.element_size() for values in (updates, point) if values is not None):
        return distances  # the squares of narrower numbers are all in range
    for row in (~in_range(squares)).nonzero().flatten().tolist():  # zero, as a rule, and then soon done
        distances[row] = _scaled_distance(updates[row], point, squares.dtype)
    return distances


def distances_beyond(updates: Tensor, point: Tensor | None, reach: float) -> Tensor:
    """`distances_to`; on a CPU 0 for rows that are surely nearer than `reach`: faster where these are most of them.

    A pass in the updates' own precision tells which those are, unless a few columns say that it is not worth while.
    """
    if updates.device.type != "cpu":  # each of those passes would wait for the device
        return distances_to(updates, point)
    n, d = updates.shape
    lost = math.sqrt(d * torch.finfo(updates.dtype).tiny)  # where squares are too small for that precision
    others: list[int] = []
    for rough in (_guessed_distances, _rough_distances):
        others = [row for row, about in enumerate(rough(updates, point).tolist()) if not 2 * (about + lost) < reach]
        if len(others) > n // 4:
            return distances_to(updates, point)
    distances = torch.zeros(n, dtype=torch.double)
    for row in others:
        distances[row] = distances_to(updates[row : row + 1], point)[0]
    return distances


def _guessed_distances(updates: Tensor, point: Tensor | None) -> Tensor:
    """[n], as some of the columns let them be guessed."""
    step = max(1, updates.shape[1] // 64)
    some = updates[:, ::step]
    return torch.linalg.vector_norm(some if point is None else some - point[::step], dim=1) * math.sqrt(step)


def _rough_distances(updates: Tensor, point: Tensor | None) -> Tensor:
    """[n], to a few digits; what overflows on the way is infinite or no number."""
    if point is None:
        return torch.linalg.vector_norm(updates, dim=1)
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    for block in small_blocks(updates):
        total += torch.linalg.vector_norm(updates[:, block] - point[block], dim=1).to(total.dtype).square()
    return total.sqrt()


def joined_lengths(lengths: Tensor, reduce: Reduce) -> Tensor:
    """The lengths [n] of rows of which this process has some columns, given their lengths there.

    Right also where squares leave the range of float64.
    """
    longest = reduce(lengths.clone(), "max")
    ordinary = (longest > 0) & longest.isfinite()
    parts = torch.where(ordinary, lengths / longest, 0.0)
    return torch.where(ordinary, longest * reduce(parts.square(), "sum").sqrt(), longest)


def _scaled_distance(row: Tensor, point: Tensor | None, wide: torch.dtype) -> float:
    half = row.to(wide) / 2 if point is None else row.to(wide) / 2 - point.to(wide) / 2
    peak = float(half.abs().max()) if len(half) else 0.0
    if not 0 < peak < math.inf:
        return peak
    norm = float(torch.linalg.vector_norm(half / peak).double())
    return norm * peak * 2


def products_with(updates: Tensor, vector: Tensor) -> Tensor:
    """[n] inner products of the rows with `vector` [d], in double precision where there is one."""
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    for block, rows in wide_blocks(updates):
        total += rows @ vector[block].to(rows.dtype)
    return total


def combine(coefficients: Tensor, updates: Tensor) -> Tensor:
    """coefficients [n] @ updates [n, d] -> [d]; a row with coefficient 0 does not count, even if it is not finite."""
    used = coefficients.numpy().nonzero()[0]
    narrow = updates.dtype in (torch.float16, torch.bfloat16)
    working = working_dtype(coefficients, torch.float32 if narrow else updates.dtype, updates.device)
    some = torch.from_numpy(used)
    if working != updates.dtype:
        exact, some = (to_device(values, updates.device) for values in (coefficients[some].to(working), some))
        return map_columns(updates, lambda block: exact @ block[some].to(working))
    if len(used) == 1:
        return updates[int(used[0])] * float(coefficients[used[0]])
    coefficients = coefficients.to(updates.dtype)
    if len(used) == len(updates):
        return to_device(coefficients, updates.device) @ updates
    if updates.device.type == "cpu" and math.isfinite((result := coefficients @ updates).sum()):
        return result
    exact, some = (to_device(values, updates.device) for values in (coefficients[some], some))
    return map_columns(updates, lambda block: exact @ block[some])  # 0 times infinity is not a number


def working_dtype(coefficients: Tensor, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In what to multiply rows of `dtype` by these coefficients: a wider one where that cannot hold them.

    What makes a huge row an ordinary one may be too small for float32 itself.
    """
    sizes = np.abs(coefficients.numpy())
    return wide_dtype(device) if ((sizes > 0) & (sizes < torch.finfo(dtype).tiny)).any() else dtype


def all_finite(row: Tensor) -> bool:
    """Whether no number of `row` [d] is NaN or an infinity."""
    return math.isfinite(row.sum()) or bool(row.isfinite().all())  # a sum of finite numbers may overflow


def bad_rows(updates: Tensor) -> list[int]:
    """The rows that hold a NaN or an infinity."""
    sums = updates.sum(1)
    if math.isfinite(sums.sum()):
        return []
    suspects = (~sums.isfinite()).nonzero().flatten().tolist()  # a sum of finite numbers may overflow
    return [row for row in suspects if not bool(updates[row].isfinite().all())]
