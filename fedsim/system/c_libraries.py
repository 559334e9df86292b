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
FREED = 31 << 20  # bytes; glibc adopts the size of a freed block as a threshold if it is at most 32 MB

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
def keep_freed_memory() -> None:
    """Let glibc keep and reuse up to 62 MB of freed memory, as it does after a tensor of 31 MB has been freed.

    When a memory-mapped block is freed, glibc permanently raises the thresholds that decide what is returned to the
    system. This function therefore allocates such a block, and frees it without touching it. The function has no effect
    if the user has set the thresholds, or if the C library is not glibc.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]
        library.free(library.malloc(FREED))


def return_freed_memory() -> None:
    """Let glibc return all freed memory to the system, before this process forks others, which would keep it."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
