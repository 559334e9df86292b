"""Settings of the C libraries that PyTorch uses on a CPU: the threads of OpenMP and the memory allocator.

By default, OpenMP threads spin while they wait. On a busy machine, a process with two spinning threads was ten times
slower than a process with one thread. PyTorch reads the wait policy when it is imported, so `fedsim/__init__.py` sets
the policy first. Child processes inherit the policy.

glibc soon returns freed memory to the kernel, which zeroes each page when it is used again. Every training step
allocates and frees the same tensors, so one round on MNIST caused a million page faults and spent up to a third of its
time on them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings

POLICY = "OMP_WAIT_POLICY"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
LARGEST_IN_HEAP = 32 << 20  # bytes; the largest value that glibc accepts; larger blocks are mapped individually
KEPT = 64 << 20  # bytes of freed memory that a process keeps at the top of the heap
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # settings made by the user

_torch_was_imported_first = False


def wait_passively() -> None:
    """Let OpenMP threads sleep instead of spin while they wait, unless the user has set OMP_WAIT_POLICY."""
    global _torch_was_imported_first
    _torch_was_imported_first = "torch" in sys.modules and POLICY not in os.environ
    os.environ.setdefault(POLICY, "PASSIVE")


def warn_if_threads_spin(threads: int) -> None:
    """Warn if several threads are requested and PyTorch was imported before `wait_passively` was called."""
    from fedsim.errors import FedsimWarning  # imported here to keep `import fedsim` fast

    if threads > 1 and _torch_was_imported_first:
        warnings.warn(
            f"threads_per_process = {threads}: PyTorch was imported before fedsim, so its threads spin while they "
            f"wait, which is slow on a busy machine; import fedsim first, or set {POLICY}=PASSIVE",
            FedsimWarning,
            stacklevel=2,
        )


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep and reuse freed memory. Return whether this succeeded, which requires glibc.

    Does nothing if the user has set one of the glibc variables for this purpose.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name in os.environ for name in VARIABLES):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
