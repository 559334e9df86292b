"""Blocks of columns of a matrix [n, d], and sums over columns in double precision.

All functions work on blocks of columns. On a CPU a block fits into the caches, but is wide enough that function calls
cost less than arithmetic. On a GPU each block costs kernel launches, so there are as few blocks as the memory allows:
a rule needs up to WORKING bytes per input value, and may use at most the fraction SHARE of the device's memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
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
SHARE = 1 / 8  # maximum fraction of a device's memory that the blocks of all processes may use at a time
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
        size = min(math.ceil(d / count / LINE) * LINE, most_columns(n * count, device)) or 1
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
        return most_columns(updates.shape[0], updates.device)
    return min(MOST, max(FEWEST, NUMBERS // max(1, updates.shape[0])))


def small_blocks(updates: Tensor) -> Iterator[slice]:
    """Yield slices of columns that together cover `updates` [n, d], each small enough to process at once.

    On a GPU there is at least one slice, which is empty for d = 0.
    """
    d, size = updates.shape[1], block_size(updates)
    for start in range(0, d if updates.device.type == "cpu" else max(1, d), size):
        yield slice(start, min(start + size, d))


def wide_blocks(updates: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield small blocks of columns of `updates` [n, d], as pairs (slice, copy [n, columns] in double precision).

    The updates must be on a CPU. The caller may change the copy. The next iteration overwrites it.
    """
    n, d = updates.shape
    widest = min(d, block_size(updates))
    buffer = torch.empty(n, widest, dtype=torch.double)
    for block in small_blocks(updates):
        width = block.stop - block.start
        wide = buffer if width == widest else buffer[:, :width]
        if updates.dtype != torch.bfloat16:  # 10 percent faster than PyTorch, and always single-threaded
            np.copyto(wide.numpy(), updates[:, block].numpy())
        else:
            wide.copy_(updates[:, block])
        yield block, wide


def sampled_columns(updates: Tensor) -> Tensor:
    """Return 512 columns of `updates` [n, d]: 32 runs of 16 neighbouring columns at equal distances, [n, 32, 16].

    If d <= 512, the result contains all columns, [n, 1, d].
    """
    d, runs = updates.shape[1], SAMPLED // RUN
    if d <= SAMPLED:
        return updates.unsqueeze(1)
    return updates[:, : d // runs * runs].unflatten(1, (runs, d // runs))[:, :, :RUN]


def map_columns(updates: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to the updates [n, d], one block of columns after another. Returns [d].

    `function` maps a block [n, columns], in float32 or float64, to a new tensor [columns].
    """
    if updates.device.type != "cpu" and updates.shape[1] <= block_size(updates):  # one block: copying costs a launch
        return function(at_least_float32(updates)).to(updates.dtype)
    result = updates.new_empty(updates.shape[1])
    with alone_if_few(len(updates)):
        for block in small_blocks(updates):
            result[block] = function(at_least_float32(updates[:, block])).to(result.dtype)
    return result


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half-precision values to float32. Other values are returned unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def keep_own(values: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """Return `values` unchanged, as the argument `reduce` of a process that has all columns."""
    return values


def squared_norms(updates: Tensor) -> Tensor:
    """Return the squared norms of n updates, float64 [n] on the CPU."""
    return squared_distances_to(updates, None) if updates.device.type == "cpu" else norms(updates).square()


def squared_distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """Return the squared distances of n updates from a point [d] (None: zero), in double precision, on a CPU."""
    total = torch.zeros(len(updates), dtype=torch.double)
    sums = total.numpy()
    with np.errstate(all="ignore"), alone_if_few(len(updates)):  # overflow gives infinity
        for block, rows in wide_blocks(updates):
            if point is not None:
                rows.sub_(point[block])
            values = rows.numpy()  # n dot products read the rows once, in one thread
            sums += np.matmul(values[:, None], values[:, :, None])[:, 0, 0]
    return total


def norms(updates: Tensor) -> Tensor:
    """Return the norms of n updates, float64 [n] on the CPU. A norm is infinite if its square overflows."""
    return distances_to(updates, None)


def distances_to(updates: Tensor, point: Tensor | None) -> Tensor:
    """Return the distances of n updates from a point [d] (None: zero), float64 [n] on the CPU.

    A distance is infinite if its square overflows.
    """
    return on_host(distances_on_device(updates, point))[0]


def distances_on_device(updates: Tensor, point: Tensor | None) -> Tensor:
    """Return the distances [n] of n updates from a point [d] (None: zero), on their device, without waiting for it.

    Differences and sums are in double precision if the device supports it, so that rules select the same updates on
    every device.
    """
    if updates.device.type == "cpu":
        return squared_distances_to(updates, point).sqrt()
    wide, parts = wide_dtype(updates.device), []
    for block in small_blocks(updates):
        rows = updates[:, block]
        rows = rows if point is None else rows - point[block].to(wide)
        parts.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide))
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)


def products_with(updates: Tensor, vector: Tensor) -> Tensor:
    """Return the inner products [n] of n updates with `vector` [d], on their device, without waiting for it.

    Sums are in double precision if the device supports it.
    """
    if updates.device.type != "cpu":
        wide = wide_dtype(updates.device)
        return total_of(updates[:, block].to(wide) @ vector[block].to(wide) for block in small_blocks(updates))
    total = torch.zeros(len(updates), dtype=torch.double)
    with alone_if_few(len(updates)):
        for block, rows in wide_blocks(updates):
            total += rows @ vector[block].to(rows.dtype)
    return total


def total_of(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor. A single tensor needs no kernel launch."""
    return functools.reduce(torch.add, parts)


class NonfiniteError(Exception):
    """Raised inside `reading` if a rule reads NaN or infinity from a GPU, or numbers that have overflowed."""


class Reading(threading.local):
    """What the current thread has read from a GPU in a block `with reading()`.

    Attributes:
        checks: whether NonfiniteError is raised if a number is not finite.
        has_read: whether the numbers that were read depend on all values of the updates.
    """

    checks = has_read = False


_reading = Reading()


@contextlib.contextmanager
def reading() -> Iterator[Reading]:
    """Raise NonfiniteError in this block if a rule reads numbers from a GPU that are not finite.

    Most rules read a distance or a norm of every update on the host. These numbers are finite only if all updates are,
    so no separate check has to wait for the GPU. The block provides a `Reading`.
    """
    before = _reading.checks, _reading.has_read
    _reading.checks, _reading.has_read = True, False
    try:
        yield _reading
    finally:
        _reading.checks, _reading.has_read = before


def on_host(*values: Tensor) -> list[Tensor]:
    """Copy tensors to the CPU, in float64. The host waits for a GPU only once.

    Together, the tensors must depend on all values of the updates, such as their norms (see `reading`).

    Raises NonfiniteError inside `reading` if a number is not finite.
    """
    if values[0].device.type == "cpu":
        return [value.double() for value in values]
    if len(values) == 1:
        copies = [values[0].cpu().double()]
    else:
        flat = torch.cat([value.flatten() for value in values]).cpu().double()
        parts = flat.split([value.numel() for value in values])
        copies = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
    if _reading.checks:
        if not all(np.isfinite(copy.numpy()).all() for copy in copies):
            raise NonfiniteError
        _reading.has_read = True
    return copies


def combine(coefficients: Tensor, updates: Tensor) -> Tensor:
    """Return the linear combination coefficients [n] @ updates [n, d], a vector [d].

    Updates with coefficient 0 are skipped, so they may contain NaN.
    """
    if updates.device.type != "cpu":
        return _combine_on_device(coefficients.detach().cpu().numpy(), updates)
    narrow = updates.dtype in (torch.float16, torch.bfloat16)
    factors = coefficients.to(torch.float32 if narrow else updates.dtype)
    if not narrow and 1 < len(factors) == int(coefficients.count_nonzero()):
        return factors @ updates
    used = coefficients.nonzero().flatten()
    if len(used) == 1 and not narrow:
        return updates[int(used[0])] * float(coefficients[used[0]])
    if not narrow and math.isfinite((result := factors @ updates).sum()):
        return result
    return map_columns(updates, lambda block: factors[used] @ block[used])  # 0 times infinity would be NaN


def _combine_on_device(coefficients: np.ndarray, updates: Tensor) -> Tensor:
    """Compute the result of `combine` on a GPU, with one or two kernel launches and without waiting for the GPU."""
    (used,) = coefficients.nonzero()
    if len(used) <= 1:
        return updates[used[0]] * float(coefficients[used[0]]) if len(used) else updates.new_zeros(updates.shape[1])
    first, last, index = used[0], used[-1] + 1, None
    if last - first > len(used):
        if _reading.has_read and 2 * len(used) >= last - first:  # the skipped updates are finite, so 0 times them is 0
            used = np.arange(first, last)
        else:
            index = to_device(torch.from_numpy(used), updates.device)
    factors, weights = coefficients[used], None
    if factors[0] != 1 / len(used) or (factors != factors[0]).any():
        dtype = torch.promote_types(updates.dtype, torch.float32)
        weights = to_device(torch.from_numpy(factors).to(dtype), updates.device)

    def of_block(block: Tensor) -> Tensor:
        rows = block[first:last] if index is None else block.index_select(0, index)
        return rows.mean(0) if weights is None else weights @ rows

    return map_columns(updates, of_block)


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
