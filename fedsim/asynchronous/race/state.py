"""State that racing processes share in addition to the server: locks, slot statuses, and lost-update counters."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from fedsim.engines.pool.process_context import LINE
from fedsim.engines.pool.shared_memory import memory_file, share
from fedsim.errors import ExperimentError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Locks:
    """Numbered locks, shared by all processes to which this object is sent.

    Each lock is a byte-range lock on an unnamed file (`fcntl.lockf`). The kernel releases a lock when its owner dies,
    whereas a `multiprocessing` lock stays locked forever if its owner is killed. Acquiring and releasing a free lock
    takes about 4 microseconds (a semaphore takes 0.2).

    Locks are owned by processes, not by threads. `acquire` takes several locks in ascending order, to avoid deadlocks.

    Attributes:
        taken: number of locks that this process acquired.
        waited: number of these locks for which this process had to wait.
        seconds: total time for which this process waited for locks.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if fcntl is None:
            raise ExperimentError(
                'mode = "race": needs byte-range locks (fcntl), which this system does not support; use mode = "clock"'
            )
        if descriptor is None:
            descriptor = memory_file(0)
        if descriptor is None:  # a system without memory files
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set the counters `taken`, `waited` and `seconds` to zero."""
        self.taken, self.waited, self.seconds = 0, 0, 0.0

    def acquire(self, numbers: Sequence[int]) -> None:
        """Acquire the locks with these numbers; wait while another process holds one of them."""
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
        """Release the locks with these numbers; locks that this process does not hold are ignored."""
        for number in numbers:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def __reduce__(self) -> tuple[Callable[..., Locks], tuple[Any]]:
        return _received, (DupFd(self._descriptor),)


def _received(duplicate: Any) -> Locks:
    return Locks(duplicate.detach())


COORDINATES = 64  # length of a lost-update counter

WRITES_BEGUN, WRITES_ENDED, ADDED, STATUS = range(4)  # columns of `RaceState.slots`
IDLE, BUSY, FINISHED, HELD_BACK = range(4)  # values of STATUS; in the last two, the slot's round is over


class RaceState:
    """State that the processes of a race share during a round. A slot is the number of one of n concurrent workers.

    Attributes:
        loss_counters: counters that detect lost updates, float64 [n, COORDINATES] on the model's device. Each update
            adds 1 to one or two rows, with the same kind of operation as on the model. If an addition is missing at the
            end, another process has overwritten it.
        slots: int64 [n, LINE]. For each slot, the number of begun and of ended writes to the model, the number of
            additions to `loss_counters`, and the slot's status. Only the slot's process writes these numbers.
        events: int64 [1], number of starts and arrivals of work items, counted under the server's lock.
        locks: the locks of the server and of the slots.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.loss_counters = torch.zeros(slots, COORDINATES, dtype=torch.double, device=device)
        self.slots = torch.zeros(slots, LINE, dtype=torch.int64)
        self.events = torch.zeros(1, dtype=torch.int64)
        self.locks = Locks()
        share([self.loss_counters, self.slots, self.events])

    def clear(self) -> None:
        """Set all counters and statuses to zero before a round."""
        for tensor in (self.loss_counters, self.slots, self.events):
            tensor.zero_()

    def column(self, column: int) -> np.ndarray:
        """Return a column of `slots` as a NumPy view, int64 [n]: one number for each slot."""
        return self.slots.numpy()[:, column]

    def add(self, slot: int, counters: Sequence[int] = (0,)) -> None:
        """Count an update by `slot`: add 1 to the rows `counters` of `loss_counters`."""
        for counter in counters:
            self.loss_counters[counter].add_(1.0)
        self.slots.numpy()[slot, ADDED] += len(counters)

    def lost(self) -> float:
        """Return the number of lost updates, estimated as the mean number of overwritten additions to `loss_counters`.

        The mean is over the COORDINATES columns of the counters.
        """
        return int(self.column(ADDED).sum()) - float(self.loss_counters.sum()) / COORDINATES


@dataclass
class Measures:
    """Measurements of a race, from one process or summed over several processes.

    Attributes:
        updates: number of results that the policy took.
        overlapped: number of gradients for which another process wrote to the global row during the computation.
        locks_taken, locks_waited, lock_seconds: the attributes taken, waited and seconds of `Locks`.
        held_back: number of times that a worker's round ended early, because all other workers had finished or were
            also waiting.
        seconds: duration in the slowest process.
    """

    updates: int = 0
    overlapped: int = 0
    locks_taken: int = 0
    locks_waited: int = 0
    lock_seconds: float = 0.0
    held_back: int = 0
    seconds: float = 0.0

    def add(self, measures: Measures) -> None:
        """Add the measurements of another process or run to this object. `seconds` becomes the maximum of both."""
        longest = max(self.seconds, measures.seconds)
        for measure in fields(self):
            setattr(self, measure.name, getattr(self, measure.name) + getattr(measures, measure.name))
        self.seconds = longest
