"""Locks between processes that nobody takes to the grave.

A lock of `multiprocessing` stays taken when its owner is killed, and whoever wants it then waits for ever. These are
locks of byte ranges of a file without a name: the kernel lets go of them with the process that has them. Taking and
giving back a free one took about 4 microseconds (a semaphore: 0.2).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from fedsim.errors import ExperimentError
from fedsim.system.sharing import memory_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Locks:
    """Locks that are known by number, between the processes that this object is sent to.

    A process has a lock, not a thread; who takes several takes them in ascending order, so that nobody waits in a ring.

    Attributes:
        taken, waited, seconds: how many were taken in this process, how many of them another one had just then, and
            how long those were waited for.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if fcntl is None:
            raise ExperimentError('mode = "race": needs locks of byte ranges (fcntl), which this system has not')
        if descriptor is None:
            descriptor = memory_file(0)
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        self._descriptor = descriptor
        self.start_count()

    def start_count(self) -> None:
        """Count anew."""
        self.taken, self.waited, self.seconds = 0, 0, 0.0

    def take(self, numbers: Sequence[int]) -> None:
        """Take these locks, lowest number first, and wait for those that another process has."""
        for number in sorted(numbers):
            self.taken += 1
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except OSError:  # somebody else has it
                self.waited += 1
                start = time.perf_counter()
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, number)
                self.seconds += time.perf_counter() - start

    def give_back(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        """Let go of the file, and so of every lock that this process has."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> tuple[Callable[..., Locks], tuple[Any]]:
        return _received, (DupFd(self._descriptor),)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def _received(duplicate: Any) -> Locks:
    return Locks(duplicate.detach())
