"""State that racing processes share in addition to the server: locks, slot statuses, and lost-update counters."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fedsim.errors import ExperimentError
from fedsim.processes.messages import shared_file
from fedsim.processes.process_context import LINE
from fedsim.processes.shared_memory import memory_file, share

if sys.platform == "win32":
    fcntl: Any = None
else:
    import fcntl


class Locks:
    """Numbered locks between processes. If a process is killed, its locks are released.

    `acquire` acquires several locks in ascending order, to avoid deadlocks. The locks do not work between threads of
    one process.

    Attributes:
        taken: number of locks that this process acquired.
        waited: number of locks for which this process had to wait.
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
        """Acquire the locks with these numbers. Waits while another process holds one of them."""
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
        """Release the locks with these numbers, if this process holds them."""
        for number in numbers:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def __reduce__(self) -> tuple[Callable[..., Locks], tuple[Any]]:
        return _received, (shared_file(self._descriptor),)


def _received(duplicate: Any) -> Locks:
    return Locks(duplicate.detach())


COORDINATES = 64  # length of a lost-update counter

WRITES_BEGUN, WRITES_ENDED, ADDED, STATUS = range(4)  # columns of `RaceState.slots`
IDLE, BUSY, FINISHED, HELD_BACK = range(4)  # values of STATUS; in the last two, the slot's round is over


class RaceState:
    """Locks and counters that the processes of a race (asynchronous training in real time) share, for n workers.

    Attributes:
        loss_counters: counters that detect lost updates, float64 [n, COORDINATES]. With every update, 1 is added to all
            values of a counter. If a sum is too small at the end, another process has overwritten some additions.
        slots: int64 [n, LINE]. The first columns contain for each worker the number of begun updates, the number of
            ended updates, the number of additions to `loss_counters`, and the worker's status.
        events: int64 [1], number of starts and arrivals so far.
        locks: the locks of the server and of the workers.
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
        """Return a view of one column of `slots`, with one value per worker, int64 [n]."""
        return self.slots.numpy()[:, column]

    def add(self, slot: int, counters: Sequence[int] = (0,)) -> None:
        """Add 1 to each of `counters` (indices of rows of `loss_counters`) for an update by the worker in `slot`."""
        for counter in counters:
            self.loss_counters[counter].add_(1.0)
        self.slots.numpy()[slot, ADDED] += len(counters)

    def lost(self) -> float:
        """Return an estimate of how many updates were lost because another process has overwritten them."""
        return int(self.column(ADDED).sum()) - float(self.loss_counters.sum()) / COORDINATES


@dataclass
class Measures:
    """Measurements of a race (asynchronous training in real time).

    Attributes:
        updates: number of results that were used.
        overlapped: number of gradients during whose forward and backward pass another process was writing to the global
            model.
        locks_taken, locks_waited, lock_seconds: number of acquired locks, number of locks for which a process had to
            wait, and total waiting time.
        held_back: number of times that a worker's round ended early, because no worker could make progress.
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
