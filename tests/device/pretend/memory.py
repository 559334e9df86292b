"""Memory of the GPU: what is in use, and what the memory pools of graphs keep."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import torch

Pool = tuple[int, int]  # as of torch.cuda.graph_pool_handle


class Memory:
    """PyTorch's memory allocator, which frees memory at once, except in pools that captures have a reference to.

    Attributes:
        limit: largest number of bytes in use or kept.
        pool: pool of the current capture, or (0, 0).
        new_pools: iterator over unused pools.
        underway: pools of captures that have not ended as they should.
        references: number of captures that have a reference to a pool.
        sizes, free: number of bytes of each pool, and how many of these are not in use.
    """

    def __init__(self) -> None:
        self.limit, self.pool, self.underway = math.inf, (0, 0), list[Pool]()
        self.new_pools = ((0, number) for number in itertools.count(1))
        self.references, self.sizes, self.free = Counter[Pool](), Counter[Pool](), Counter[Pool]()

    def begin(self, pool: Pool) -> None:
        assert pool not in self.underway, "already recording to mempool_id"
        assert self.references.get(pool) != 0, "the pool has been released"
        self.references[pool] += 1
        self.underway.append(pool)
        self.pool = pool

    def end(self, device: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: Pool) -> None:
        assert self.references[pool] > 0, "the pool has been released"
        self.references[pool] -= 1
        if not self.references[pool]:
            self.sizes[pool] -= self.free.pop(pool, 0)


class Block:
    """Memory in use, until this object is deleted."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory, self._pool, self._nbytes = memory, memory.pool, nbytes
        memory.sizes[self._pool] += nbytes
        if memory.sizes.total() > memory.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")

    def __del__(self) -> None:
        kept = self._memory.references[self._pool]
        counter, change = (self._memory.free, self._nbytes) if kept else (self._memory.sizes, -self._nbytes)
        counter[self._pool] += change
