"""Blocks of columns, and sums over columns in double precision.

All functions work on blocks of columns. On a CPU a block stays in the caches, and is wide enough that calls cost less
than arithmetic. On another device each block costs kernel launches, so there are as few blocks as its memory allows: a
rule takes up to WORKING bytes for each number of its input, and at most SHARE of the device's memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.threads import alone_if_few
from fedsim.system.devices import to_device, total_memory_of, wide_dtype

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]  # over processes that each have other columns

CPU = torch.device("cpu")
BLOCK = 16_384  # least columns of a process; in smaller blocks the calls cost more than the arithmetic
BLOCKS = 64  # most blocks of a row
FEWEST, MOST = 256, 8_192  # columns of a small block within a process
NUMBERS = 2**19  # most numbers of a small block with more than FEWEST columns: 4 MiB in double precision
SAMPLED = 512  # columns of a sample
RUN = 16  # adjacent columns in a sample: one cache line of float32
WORKING = 64  # bytes for each number of a block on a GPU: wide and sorted copies, positions, memory of the sort
SHARE = 1 / 8  # of a device's memory for one block
LINE = 64  # on a GPU, blocks begin at multiples of so many columns


def column_blocks(d: int, index: int = 0, count: int = 1, *, n: int = 1, device: torch.device = CPU) -> Iterator[slice]:
    """Yield the blocks of columns that process `index` of `count` aggregates.

    The blocks of all processes cover range(d).

    On a CPU the blocks depend on d alone, so every engine does the same arithmetic and gets the same bits. On another
    device each process has one block, or as few blocks of `n` rows as the device's memory allows.

    >>> list(fedsim.aggregation.column_blocks(40_000))
    [slice(0, 16384, None), slice(16384, 32768, None), slice(32768, 40000, None)]
    """
    if device.type == "cpu":
        size = max(BLOCK, math.ceil(d / BLOCKS / BLOCK) * BLOCK)
    else:
        size = min(math.ceil(d / count / LINE) * LINE, most_columns(n, device)) or 1
    for start in range(index * size, d, count * size):
        yield slice(start, min(start + size, d))


@functools.cache
def most_columns(n: int, device: torch.device) -> int:
    """Return the most columns of a block of n rows on a device other than the CPU, a multiple of LINE."""
    values = min(SHARE * total_memory_of(device) / WORKING, 2**62)  # the memory may be infinite
    return max(LINE, int(values) // max(1, n) // LINE * LINE)


def block_size(updates: Tensor) -> int:
    """Columns of a small block of rows [n, d]."""
    if updates.device.type != "cpu":
        return most_columns(len(updates), updates.device)
    return min(MOST, max(FEWEST, NUMBERS // max(1, len(updates))))


def small_blocks(updates: Tensor) -> Iterator[slice]:
    """Blocks of columns of rows [n, d] of `block_size` each."""
    d, size = updates.shape[1], block_size(updates)
    for start in range(0, d, size):
        yield slice(start, min(start + size, d))


def wide_blocks(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Small blocks of columns, each with a copy [n, columns] in double precision (float32 on devices without it).

    The caller may change the copy. The next copy uses the same memory, which is in the cache by then.
    """
    n, d = updates.shape
    widest = min(d, block_size(updates))
    buffer = torch.empty(n, widest, dtype=wide_dtype(updates.device), device=updates.device)
    by_numpy = updates.device.type == "cpu" and updates.dtype != torch.bfloat16
    for block in small_blocks(updates):
        width = block.stop - block.start
        wide = buffer if width == widest else buffer[:, :width]
        if by_numpy:  # a tenth faster, and never in several threads
            np.copyto(wide.numpy(), updates[:, block].numpy())
        else:
            wide.copy_(updates[:, block])
        yield block, wide


def sampled_columns(updates: Tensor) -> Tensor:
    """SAMPLED columns in evenly spread runs, [n, SAMPLED]; all columns if there are fewer."""
    n, d = updates.shape
    runs = SAMPLED // RUN
    if d <= SAMPLED:
        return updates
    return updates[:, : d // runs * runs].unflatten(1, (runs, d // runs))[:, :, :RUN].reshape(n, SAMPLED)


def map_columns(updates: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function`, from a block [n, columns] in float32 or wider to [columns], to all blocks; returns [d]."""
    result = updates.new_empty(updates.shape[1])
    with alone_if_few(len(updates)):
        for block in small_blocks(updates):
            result[block] = function(at_least_float32(updates[:, block])).to(result.dtype)
    return result


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32 if their dtype is narrower, since sums and means in half precision lose too many digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def keep_own(values: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """Return the `Reduce` of a process that has all columns: returns `values`."""
    return values


def squared_norms(updates: Tensor) -> Tensor:
    """|x_k|^2, [n], in double precision if the device has it."""
    return squared_distances_to(updates, None)


def squared_distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """|x_k - point|^2, [n], for a point [d] (None: zero), in double precision if the device has it."""
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    sums = total.numpy() if total.device.type == "cpu" else None
    with np.errstate(all="ignore"), alone_if_few(len(updates)):  # overflow gives infinity
        for block, rows in wide_blocks(updates):
            if point is not None:
                rows.sub_(point[block])
            if sums is None:
                total += rows.square().sum(1)
            else:  # n dot products read the rows once, and are too short for several threads
                values = rows.numpy()
                sums += np.matmul(values[:, None], values[:, :, None])[:, 0, 0]
    return total


def norms(updates: Tensor) -> Tensor:
    """|x_k|, float64 [n] on the CPU; infinite if the square overflows."""
    return distances_to(updates, None)


def distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """|x_k - point|, float64 [n] on the CPU, for a point [d] (None: zero); infinite if the square overflows."""
    return squared_distances_to(updates, point).cpu().double().sqrt()


def products_with(updates: Tensor, vector: Tensor) -> Tensor:
    """Inner products [n] of the rows with `vector` [d], in double precision if the device has it."""
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    with alone_if_few(len(updates)):
        for block, rows in wide_blocks(updates):
            total += rows @ vector[block].to(rows.dtype)
    return total


def combine(coefficients: Tensor, updates: Tensor) -> Tensor:
    """Return coefficients [n] @ updates [n, d]: [d]. Rows with coefficient 0 are left out, so they may hold NaN."""
    narrow = updates.dtype in (torch.float16, torch.bfloat16)
    factors = coefficients.to(torch.float32 if narrow else updates.dtype)
    if not narrow and 1 < len(factors) == int(coefficients.count_nonzero()):
        return to_device(factors, updates.device) @ updates
    used = coefficients.nonzero().flatten()
    if len(used) == 1 and not narrow:
        return updates[int(used[0])] * float(coefficients[used[0]])
    if not narrow and updates.device.type == "cpu" and math.isfinite((result := factors @ updates).sum()):
        return result
    factors, used = (to_device(values, updates.device) for values in (factors[used], used))
    return map_columns(updates, lambda block: factors @ block[used])  # 0 times infinity would be NaN


def all_finite(values: Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    return math.isfinite(values.sum()) or bool(values.isfinite().all())  # a sum of finite numbers may overflow


def bad_rows(updates: Tensor) -> list[int]:
    """Return the rows that hold a NaN or an infinity."""
    sums = updates.sum(1)
    if math.isfinite(sums.sum()):
        return []
    suspects = (~sums.isfinite()).nonzero().flatten().tolist()  # a sum of finite numbers may overflow
    return [row for row in suspects if not bool(updates[row].isfinite().all())]
