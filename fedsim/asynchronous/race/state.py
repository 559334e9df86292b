"""What racing processes share beside the server: locks, the status of each slot, and counters of lost updates."""

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

    The kernel releases a lock when its owner dies. A lock of `multiprocessing` stays locked when its owner is killed,
    and the next process waits for it forever. These are locks of byte ranges of an unnamed file (`fcntl.lockf`). To
    take and release a free one takes about 4 microseconds (a semaphore: 0.2).

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
        """Acquire these locks. Wait while another process holds one of them."""
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
        """Release those of these locks that this process holds."""
        for number in numbers:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def __reduce__(self) -> tuple[Callable[..., Locks], tuple[Any]]:
        return _received, (DupFd(self._descriptor),)


def _received(duplicate: Any) -> Locks:
    return Locks(duplicate.detach())


COORDINATES = 64  # of a loss counter

WRITES_BEGUN, WRITES_ENDED, ADDED, STATUS = range(4)  # columns of `RaceState.slots`
IDLE, BUSY, FINISHED, HELD_BACK = range(4)  # values of STATUS; the last two end a round


class RaceState:
    """The state that processes share in one round of a race with n slots.

    Attributes:
        loss_counters: float64 [n, COORDINATES] on the model's device. Each update adds 1 to one or two rows, by an
            operation like that on the model. A missing 1 was overwritten by another process.
        slots: int64 [n, LINE], for each slot the number of writes to the model that it began and ended, the number of
            additions to loss counters, and its status. Only the process of a slot writes its row.
        events: int64 [1], number of started and arrived work items, counted under the server's lock.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.loss_counters = torch.zeros(slots, COORDINATES, dtype=torch.double, device=device)
        self.slots = torch.zeros(slots, LINE, dtype=torch.int64)
        self.events = torch.zeros(1, dtype=torch.int64)
        self.locks = Locks()
        share([self.loss_counters, self.slots, self.events])

    def clear(self) -> None:
        """Set all to zero before a round."""
        for tensor in (self.loss_counters, self.slots, self.events):
            tensor.zero_()

    def column(self, column: int) -> np.ndarray:
        """Return a live view of a column of `slots`, [n]."""
        return self.slots.numpy()[:, column]

    def add(self, slot: int, counters: Sequence[int] = (0,)) -> None:
        """Add 1 to these loss counters, for an update by `slot`."""
        for counter in counters:
            self.loss_counters[counter].add_(1.0)
        self.slots.numpy()[slot, ADDED] += len(counters)

    def lost(self) -> float:
        """Number of overwritten additions, as a mean over the coordinates."""
        return int(self.column(ADDED).sum()) - float(self.loss_counters.sum()) / COORDINATES


@dataclass
class Measures:
    """Measurements of a race: of one process, or summed over several.

    Attributes:
        updates: number of work items whose result the policy took.
        overlapped: number of gradients during which another process wrote the row that they were computed at.
        locks_taken, locks_waited, lock_seconds: see `Locks`.
        held_back: number of times that a worker ended its round early because no other worker could let it start.
        seconds: the longest time of a process.
    """

    updates: int = 0
    overlapped: int = 0
    locks_taken: int = 0
    locks_waited: int = 0
    lock_seconds: float = 0.0
    held_back: int = 0
    seconds: float = 0.0

    def add(self, measures: Measures) -> None:
        """Add the measurements of another process or run."""
        longest = max(self.seconds, measures.seconds)
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(measures, count.name))
        self.seconds = longest
