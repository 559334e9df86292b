"""Blocks of columns of a matrix [n, d], and sums over columns in double precision.

All functions work on blocks of columns. On a CPU a block fits into the caches, but is wide enough that function calls
cost less than arithmetic. On a GPU each block costs kernel launches, so there are as few blocks as the memory allows:
a rule needs up to WORKING bytes per input value, and may use at most the fraction SHARE of the device's memory.
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

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]  # over processes that have different columns

CPU = torch.device("cpu")
BLOCK = 16_384  # minimum columns of a block; in smaller blocks the calls cost more than the arithmetic
BLOCKS = 64  # maximum number of blocks of a row
FEWEST, MOST = 256, 8_192  # minimum and maximum columns of a small block within a process
NUMBERS = 2**19  # maximum numbers in a small block with more than FEWEST columns: 4 MiB in double precision
SAMPLED = 512  # number of columns in a sample
RUN = 16  # adjacent columns in a sample: one cache line of float32
WORKING = 64  # bytes for each number of a block on a GPU: wide and sorted copies, positions, memory of the sort
SHARE = 1 / 8  # maximum fraction of a device's memory that one block may use
LINE = 64  # on a GPU, blocks begin at multiples of this number of columns


def column_blocks(d: int, index: int = 0, count: int = 1, *, n: int = 1, device: torch.device = CPU) -> Iterator[slice]:
    """Yield the column slices that process number `index` of `count` processes aggregates, for d columns in total.

    The slices of all processes together cover range(d). On a GPU, slices are as large as the memory allows for `n`
    updates.

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
    """Return how many columns of n updates can be processed at once, limited by the memory of a GPU."""
    values = min(SHARE * total_memory_of(device) / WORKING, 2**62)  # total_memory_of may return infinity
    return max(LINE, int(values) // max(1, n) // LINE * LINE)


def block_size(updates: Tensor) -> int:
    """Return how many columns of `updates` [n, d] to process at once, limited by CPU cache or GPU memory."""
    if updates.device.type != "cpu":
        return most_columns(len(updates), updates.device)
    return min(MOST, max(FEWEST, NUMBERS // max(1, len(updates))))


def small_blocks(updates: Tensor) -> Iterator[slice]:
    """Yield slices of columns that together cover `updates` [n, d], each small enough to process at once."""
    d, size = updates.shape[1], block_size(updates)
    for start in range(0, d, size):
        yield slice(start, min(start + size, d))


def wide_blocks(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield small blocks of columns of `updates` [n, d], as pairs (slice, copy [n, columns] in double precision).

    On devices without double precision, the copy is float32. The caller may change it. The next iteration overwrites
    it.
    """
    n, d = updates.shape
    widest = min(d, block_size(updates))
    buffer = torch.empty(n, widest, dtype=wide_dtype(updates.device), device=updates.device)
    by_numpy = updates.device.type == "cpu" and updates.dtype != torch.bfloat16
    for block in small_blocks(updates):
        width = block.stop - block.start
        wide = buffer if width == widest else buffer[:, :width]
        if by_numpy:  # 10 percent faster than PyTorch, and always single-threaded
            np.copyto(wide.numpy(), updates[:, block].numpy())
        else:
            wide.copy_(updates[:, block])
        yield block, wide


def sampled_columns(updates: Tensor) -> Tensor:
    """Return a sample of 512 columns of `updates` [n, d]: short runs at equal distances. All columns if d <= 512."""
    n, d = updates.shape
    runs = SAMPLED // RUN
    if d <= SAMPLED:
        return updates
    return updates[:, : d // runs * runs].unflatten(1, (runs, d // runs))[:, :, :RUN].reshape(n, SAMPLED)


def map_columns(updates: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to the updates [n, d], one block of columns after another. Returns [d].

    `function` maps a block [n, columns], in float32 or float64, to [columns].
    """
    result = updates.new_empty(updates.shape[1])
    with alone_if_few(len(updates)):
        for block in small_blocks(updates):
            result[block] = function(at_least_float32(updates[:, block])).to(result.dtype)
    return result


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half-precision values to float32. Other values are returned unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def keep_own(values: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """Return `values` unchanged. In a single process, there is nothing to combine."""
    return values


def squared_norms(updates: Tensor) -> Tensor:
    """Return the squared norms [n] of n updates, in double precision if the device supports it."""
    return squared_distances_to(updates, None)


def squared_distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """Return the squared distances [n] of n updates from a point [d] (None: zero).

    The result is in double precision if the device supports it.
    """
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    sums = total.numpy() if total.device.type == "cpu" else None
    with np.errstate(all="ignore"), alone_if_few(len(updates)):  # overflow gives infinity
        for block, rows in wide_blocks(updates):
            if point is not None:
                rows.sub_(point[block])
            if sums is None:
                total += rows.square().sum(1)
            else:  # n dot products read the rows once, in one thread
                values = rows.numpy()
                sums += np.matmul(values[:, None], values[:, :, None])[:, 0, 0]
    return total


def norms(updates: Tensor) -> Tensor:
    """Return the norms of n updates, float64 [n] on the CPU. A norm is infinite if its square overflows."""
    return distances_to(updates, None)


def distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """Return the distances of n updates from a point [d] (None: zero), float64 [n] on the CPU.

    A distance is infinite if its square overflows.
    """
    return squared_distances_to(updates, point).cpu().double().sqrt()


def products_with(updates: Tensor, vector: Tensor) -> Tensor:
    """Return the inner products [n] of n updates with `vector` [d], in double precision if the device supports it."""
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    with alone_if_few(len(updates)):
        for block, rows in wide_blocks(updates):
            total += rows @ vector[block].to(rows.dtype)
    return total


def combine(coefficients: Tensor, updates: Tensor) -> Tensor:
    """Return the linear combination coefficients [n] @ updates [n, d], a vector [d].

    Updates with coefficient 0 are skipped, so they may contain NaN.
    """
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
    """Whether `values` contains neither NaN nor infinity."""
    return math.isfinite(values.sum()) or bool(values.isfinite().all())  # a sum of finite numbers may overflow


def bad_rows(updates: Tensor) -> list[int]:
    """Return the positions of the updates that contain NaN or infinity."""
    sums = updates.sum(1)
    if math.isfinite(sums.sum()):
        return []
    suspects = (~sums.isfinite()).nonzero().flatten().tolist()  # a sum of finite numbers may overflow
    return [row for row in suspects if not bool(updates[row].isfinite().all())]
