"""Locks between processes that the kernel releases when their owner dies.

A lock of `multiprocessing` stays locked when its owner is killed, and the next process waits for it forever. These are
locks of byte ranges of an unnamed file (`fcntl.lockf`), which the kernel releases with the process. To take and release
a free one takes about 4 microseconds (a semaphore: 0.2).
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from fedsim.engines.pool.shared_memory import memory_file
from fedsim.errors import ExperimentError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Locks:
    """Numbered locks that all processes share to which this object is sent.

    A process owns a lock, not a thread. `acquire` takes several locks in ascending order, so it cannot deadlock.

    Attributes:
        taken, waited, seconds: number of locks that this process took, how many of them another process held at that
            time, and how long this process waited for those.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if fcntl is None:
            raise ExperimentError('mode = "race": needs locks of byte ranges (fcntl), which this system does not have')
        if descriptor is None:
            descriptor = memory_file(0)
        if descriptor is None:  # a system without memory files
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.reset_counts()

    def reset_counts(self) -> None:
        self.taken, self.waited, self.seconds = 0, 0, 0.0

    def acquire(self, numbers: Sequence[int]) -> None:
        """Take these locks; wait if another process holds one."""
        for number in sorted(numbers):
            self.taken += 1
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except OSError:  # another process holds it
                self.waited += 1
                start = time.perf_counter()
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, number)
                self.seconds += time.perf_counter() - start

    def release(self, numbers: Sequence[int]) -> None:
        """Release these locks; a lock that this process does not hold is left as it is."""
        for number in numbers:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def __reduce__(self) -> tuple[Callable[..., Locks], tuple[Any]]:
        return _received, (DupFd(self._descriptor),)


def _received(duplicate: Any) -> Locks:
    return Locks(duplicate.detach())
