"""Settings of the C libraries that PyTorch uses on a CPU: the threads of OpenMP and the memory allocator.

OpenMP threads spin by default while they wait: on a busy machine, two threads of one process took ten times as long as
one. PyTorch reads the wait policy when it is imported, so `fedsim/__init__.py` sets it first. Child processes inherit
it.

The allocator of glibc gives freed memory back to the kernel soon, and the kernel zeroes each page when it is used
again. A training step allocates and frees the same tensors each time: one round on MNIST took a million page faults and
up to a third of its time for that.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings

POLICY = "OMP_WAIT_POLICY"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
LARGEST_IN_HEAP = 32 << 20  # bytes, the largest value that glibc accepts: larger blocks are mapped one by one
KEPT = 64 << 20  # bytes of freed memory at the top of the heap that a process keeps
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # a user's own choice

_torch_was_imported_first = False


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait, unless the user has chosen a policy."""
    global _torch_was_imported_first
    _torch_was_imported_first = "torch" in sys.modules and POLICY not in os.environ
    os.environ.setdefault(POLICY, "PASSIVE")


def warn_if_threads_spin(threads: int) -> None:
    """Warn if several threads are requested and PyTorch was imported before the policy was set."""
    from fedsim.errors import FedsimWarning  # here, so that `import fedsim` stays fast

    if threads > 1 and _torch_was_imported_first:
        warnings.warn(
            f"threads_per_process = {threads}: PyTorch was imported before fedsim, so its threads spin while they "
            f"wait, which is slow on a busy machine; import fedsim first, or set {POLICY}=PASSIVE",
            FedsimWarning,
            stacklevel=2,
        )


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process reuse freed memory; True if glibc does so from now on, False with another C library.

    Does nothing if the user has set one of glibc's own variables.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name in os.environ for name in VARIABLES):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
