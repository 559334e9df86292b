"""The memory allocator of the C library, which PyTorch uses for tensors on a CPU.

By default glibc gives freed memory back to the kernel soon, and the kernel zeroes each page when it is used again. A
training step allocates and frees the same tensors each time: one round on MNIST took a million page faults and up to a
third of its time for that.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
LARGEST_IN_HEAP = 32 << 20  # bytes, the largest value that glibc accepts: larger blocks are mapped one by one
KEPT = 64 << 20  # bytes of freed memory at the top of the heap that a process keeps
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # a user's own choice


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process reuse freed memory; True if glibc does so from now on, False with another C library.

    Does nothing if the user has set one of glibc's own variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name in os.environ for name in VARIABLES):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
