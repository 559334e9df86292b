"""Context of one process in a pool: its index in the team, its heartbeats and the barrier.

The lock of a `multiprocessing.Barrier` is never released if its owner is killed, and the other processes then hang
beyond their timeout. The barrier of this module uses no locks between processes. Each process has its own counters in
shared memory, which only this process writes. At the barrier, it increments its counter of arrivals, then polls the
counters of the other processes. The parent detects dead and silent processes by their heartbeats, and then sets a flag
that ends the wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fedsim.errors import called
from fedsim.processes.shared_memory import share

LINE = 16  # int64 counters per process: 128 bytes, so that no two processes write to the same cache line
ARRIVALS, HEARTBEATS, WORKER, ROUND, WAITING, HOLDING = range(6)  # positions of the counters in a process's line
NO_WORKER = -1
SEVERAL_WORKERS = -2
NOTHING, LOCK, SHARED_ROW = range(3)  # values of HOLDING: nothing, a lock, or a lock-free write to the shared model

CONSEQUENCES = {
    LOCK: " while it held a lock; the data that this lock protects may be half written",
    SHARED_ROW: " during a write to the shared model, which may be half written",
}

SPINS = 100  # polls, about 10 microseconds, before yielding the processor
YIELDS = 500  # yields before sleeping
SLEEP = 0.0002  # seconds between two polls after that
MIN_LOOKS = 10  # minimum number of heartbeat checks within a timeout


class AbortedError(RuntimeError):
    """Error that ends the current call of a process in a pool, because another process has failed."""


class HeartbeatTable:
    """Table in shared memory that shows what each process of a team is doing, and whether it is alive.

    Args:
        count: number of processes.
        shared: whether the table is in shared memory, so that other processes can use it.
    """

    def __init__(self, count: int, *, shared: bool = True) -> None:
        cells = torch.zeros(LINE * (count + 1), dtype=torch.long, device="cpu")
        if shared:
            share([cells])
        self.__setstate__((count, cells))
        for index in range(count):
            self.begin_work(index)

    def __getstate__(self) -> tuple[int, torch.Tensor]:
        return self.count, self._tensor

    def __setstate__(self, state: tuple[int, torch.Tensor]) -> None:
        self.count, self._tensor = state
        self._cells = self._tensor.numpy().data  # a memoryview, faster than a tensor for single cells

    def read(self, index: int, cell: int) -> int:
        return self._cells[LINE * index + cell]

    def write(self, index: int, cell: int, value: int) -> None:
        self._cells[LINE * index + cell] = value

    def heartbeat(self, index: int) -> None:
        """Count a heartbeat of the calling process `index`. Raises AbortedError if `abort` has been called."""
        self._cells[LINE * index + HEARTBEATS] += 1
        if self.aborted:
            raise AbortedError("aborted")

    def begin_work(self, index: int) -> None:
        """Forget the current worker and round of process `index`, at the start of a task."""
        self.write(index, WORKER, NO_WORKER)
        self.write(index, ROUND, 0)

    def progress(self, index: int) -> tuple[int, int]:
        """Return how often process `index` has arrived at the barrier, and whether it is waiting there (1 or 0)."""
        return self.read(index, ARRIVALS), self.read(index, WAITING)

    def single_worker(self, index: int) -> int | None:
        """Return the ID of the worker that process `index` trains; None if it trains none or several."""
        worker = self.read(index, WORKER)
        return worker if worker >= 0 else None

    def consequence(self, index: int) -> str:
        """Return which data the death of process `index` may have corrupted, as text for an error message.

        The text is empty if the process was not writing to shared data.
        """
        return CONSEQUENCES.get(self.read(index, HOLDING), "")

    def worker(self, index: int) -> str | None:
        """Return what process `index` trains, for an error message; None if it trains no worker.

        Examples: "worker 3 in round 2", "a stack of workers in round 2".
        """
        worker, round = self.read(index, WORKER), self.read(index, ROUND)
        if worker == NO_WORKER:
            return None
        if worker == SEVERAL_WORKERS:
            return f"a stack of workers in round {round}"
        return f"worker {called(worker)}" + f" in round {round}" * (round > 0)

    def activity(self, index: int) -> str:
        """Return what process `index` is doing, for an error message, such as "working on worker 3 in round 2"."""
        worker, round = self.worker(index), self.read(index, ROUND)
        if worker:
            return f"working on {worker}"
        return f"between workers, last in round {round}" if round else "before the first worker"

    def abort(self) -> None:
        """Abort the current call: every process soon raises AbortedError."""
        self._cells[LINE * self.count] = 1

    @property
    def aborted(self) -> bool:
        return bool(self._cells[LINE * self.count])


class HeartbeatTimeout:
    """Timer that detects when a process has sent no heartbeat for too long. Call `too_long` repeatedly.

    Time in which this program is suspended does not count.

    Args:
        table: heartbeats of the team.
        index: process to observe.
        timeout: maximum number of seconds without a heartbeat.
    """

    def __init__(self, table: HeartbeatTable, index: int, timeout: float) -> None:
        self.interval = min(1.0, timeout / MIN_LOOKS)
        self._table, self._index, self._timeout = table, index, timeout
        self._count, self._looked, self._seconds = table.read(index, HEARTBEATS), time.monotonic(), 0.0

    def too_long(self) -> bool:
        """Whether the process has sent no heartbeat for longer than the timeout."""
        now, count = time.monotonic(), self._table.read(self._index, HEARTBEATS)
        self._seconds = self._seconds + min(self.interval, now - self._looked) if count == self._count else 0.0
        self._count, self._looked = count, now
        return self._seconds > self._timeout


class Barrier:
    """Barrier at which process `index` waits for the other processes of its team.

    What a process wrote to shared memory before the barrier is visible to all processes after it.
    """

    def __init__(self, table: HeartbeatTable, index: int) -> None:
        self._table, self._index = table, index
        self._crossings = table.read(index, ARRIVALS)
        self._peers = [peer for peer in range(table.count) if peer != index]
        self._fence_lock = threading.Lock()

    def wait(self) -> None:
        """Wait until all processes of the team have called this method.

        Raises AbortedError if another process has died or hangs.
        """
        self._crossings += 1
        self._fence()
        self._table.write(self._index, ARRIVALS, self._crossings)
        for peer in self._peers:
            looks = 0
            while self._table.read(peer, ARRIVALS) < self._crossings:  # spin, then yield the processor, then sleep
                looks += 1
                if looks > SPINS:
                    self._pause(looks)
        self._fence()

    def _pause(self, looks: int) -> None:
        if self._table.aborted:
            raise AbortedError("aborted")
        if looks > SPINS + YIELDS:
            time.sleep(SLEEP)
        else:
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)

    def _fence(self) -> None:
        """Make all writes to shared memory visible to other processes (a memory barrier)."""
        for _ in range(2):
            with self._fence_lock:
                pass


@dataclass
class ProcessContext:
    """Connection of one process to the other processes of its team.

    Attributes:
        monitored: heartbeat table of a process that has no team but is monitored by its parent; None otherwise.
        index, count: index of the process, and number of processes in the team.
        table: heartbeats of the team.
        barrier: barrier of the team.
        send: function that sends a picklable object to the parent during a call; see `ProcessPool.begin`.
        state: values, by name, that one call stores for later calls.
    """

    monitored: ClassVar[HeartbeatTable | None] = None

    index: int
    table: HeartbeatTable
    send: Callable[[Any], object] = lambda content: None
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count, self.barrier = self.table.count, Barrier(self.table, self.index)

    @classmethod
    def alone(cls) -> ProcessContext:
        """Return the context of a process without a team."""
        table = cls.monitored or HeartbeatTable(1, shared=False)
        table.write(0, WORKER, NO_WORKER)
        return cls(0, table)

    def heartbeat(self) -> None:
        """Send a heartbeat. Raises AbortedError if the parent has aborted the call."""
        self.table.heartbeat(self.index)

    @contextlib.contextmanager
    def working_on(self, worker: int, round: int) -> Iterator[None]:
        """Return a context manager in which error messages say that this process trains `worker` in `round`."""
        self.table.write(self.index, WORKER, worker)
        self.table.write(self.index, ROUND, round)
        yield
        self.table.write(self.index, WORKER, NO_WORKER)

    def working_on_several(self, round: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which error messages say that this process trains several workers in `round`."""
        return self.working_on(SEVERAL_WORKERS, round)

    @contextlib.contextmanager
    def holding(self, held: int) -> Iterator[None]:
        """Return a context manager in which this process is recorded as holding a lock or writing to shared data.

        Error messages use this record if the process dies.

        Args:
            held: what the process holds: the constant LOCK or SHARED_ROW.
        """
        self.table.write(self.index, HOLDING, held)
        yield
        self.table.write(self.index, HOLDING, NOTHING)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context manager in which this process is recorded as waiting for other processes.

        At the end of the block, AbortedError is raised if the parent has aborted the call.
        """
        self.table.write(self.index, WAITING, 1)
        yield
        self.table.write(self.index, WAITING, 0)
        if self.table.aborted:
            raise AbortedError("aborted")
