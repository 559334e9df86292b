"""A process of a pool as the code that it runs sees it: its index in the group, its heartbeats, the barrier.

A lock of `multiprocessing.Barrier` stays taken if its owner is killed, and its peers then hang past their timeout. This
barrier has no locks. Each process has a line of counters in shared memory that only it writes: it increments its own
arrivals, then polls those of the others. The parent, which detects deaths and silence by the heartbeats, sets a flag
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

from fedsim.engines.pool.shared_memory import share

LINE = 16  # int64 a process: 128 bytes, so that no two processes write to one cache line
ARRIVALS, HEARTBEATS, WORKER, ROUND, WAITING, HOLDING = range(6)  # places in a process's line
NO_WORKER = -1
SEVERAL_WORKERS = -2
NOTHING, LOCK, SHARED_ROW = range(3)  # values of HOLDING: a process holds a lock, or writes to a row without one

CONSEQUENCES = {
    LOCK: " while it held a lock: what that protects may be half written",
    SHARED_ROW: " in the middle of a write to the shared model, which may be half written",
}

SPINS = 100  # polls, about 10 microseconds, before yielding the processor
YIELDS = 500  # before sleeping
SLEEP = 0.0002  # seconds
MIN_LOOKS = 10  # within a timeout


class AbortedError(RuntimeError):
    """The parent has aborted the call, because another process failed."""


class HeartbeatTable:
    """Shared counters of a group of processes: one line for each, written by its owner, and the abort flag.

    A line holds arrivals at the barrier, heartbeats, the current worker and round, whether the process waits, and what
    it holds. Can be sent to another process while that is started.

    Args:
        count: number of processes.
        shared: whether other processes use the table; only then it lies in shared memory.
    """

    def __init__(self, count: int, *, shared: bool = True) -> None:
        cells = torch.zeros(LINE * (count + 1), dtype=torch.long)
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

    def read(self, index: int, place: int) -> int:
        return self._cells[LINE * index + place]

    def write(self, index: int, place: int, value: int) -> None:
        self._cells[LINE * index + place] = value

    def heartbeat(self, index: int) -> None:
        """Count a heartbeat of process `index`, which calls this itself. Raises AbortedError after `abort`."""
        self._cells[LINE * index + HEARTBEATS] += 1
        if self.aborted:
            raise AbortedError("aborted")

    def begin_work(self, index: int) -> None:
        """Note that process `index` begins a new task."""
        self.write(index, WORKER, NO_WORKER)
        self.write(index, ROUND, 0)

    def progress(self, index: int) -> tuple[int, int]:
        """Return the number of barriers that a process has crossed, and whether it waits for other processes."""
        return self.read(index, ARRIVALS), self.read(index, WAITING)

    def single_worker(self, index: int) -> int | None:
        """Return the worker that a process trains; None if it trains none, or several together."""
        worker = self.read(index, WORKER)
        return worker if worker >= 0 else None

    def consequence(self, index: int) -> str:
        """Describe the data that may be corrupt after the death of a process, as the end of an error message."""
        return CONSEQUENCES.get(self.read(index, HOLDING), "")

    def worker(self, index: int) -> str | None:
        """`worker 3 in round 2` or `a stack of workers in round 2`; None between workers."""
        worker, round = self.read(index, WORKER), self.read(index, ROUND)
        if worker == NO_WORKER:
            return None
        if worker == SEVERAL_WORKERS:
            return f"a stack of workers in round {round}"
        return f"worker {worker} in round {round}" if round else f"worker {worker}"

    def activity(self, index: int) -> str:
        """What a process is doing, as part of a sentence: `working on worker 3 in round 2`."""
        worker, round = self.worker(index), self.read(index, ROUND)
        if worker:
            return f"working on {worker}"
        return f"between workers, last in round {round}" if round else "before the first worker"

    def abort(self) -> None:
        """Make every process that waits, now or later, raise AbortedError."""
        self._cells[LINE * self.count] = 1

    @property
    def aborted(self) -> bool:
        return bool(self._cells[LINE * self.count])


class HeartbeatTimeout:
    """Measures how long a process has sent no heartbeat. Call `too_long` at least every `interval` seconds.

    At most `interval` seconds count between two calls: a suspended program must not take its own suspension for the
    silence of its peers.
    """

    def __init__(self, table: HeartbeatTable, index: int, timeout: float) -> None:
        self.interval = min(1.0, timeout / MIN_LOOKS)
        self._table, self._index, self._timeout = table, index, timeout
        self._count, self._looked, self._seconds = table.read(index, HEARTBEATS), time.monotonic(), 0.0

    def too_long(self) -> bool:
        """Whether the process has been silent for longer than the timeout."""
        now, count = time.monotonic(), self._table.read(self._index, HEARTBEATS)
        self._seconds = self._seconds + min(self.interval, now - self._looked) if count == self._count else 0.0
        self._count, self._looked = count, now
        return self._seconds > self._timeout


class Barrier:
    """Blocks process `index` until all processes of the table have arrived.

    What a process wrote to shared memory before `wait` is visible to all after it.
    """

    def __init__(self, table: HeartbeatTable, index: int) -> None:
        self._table, self._index = table, index
        self._crossings = table.read(index, ARRIVALS)
        self._peers = [peer for peer in range(table.count) if peer != index]
        self._fence_lock = threading.Lock()

    def wait(self) -> None:
        """Block until every process of the group has called `wait` as often as this one.

        Raises AbortedError if the parent aborts, as it does if a peer dies or hangs.
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
        """Order memory accesses before and after, on processors that reorder them (x86 does not).

        Nothing moves down past the release of a lock, and nothing moves up past an acquire.
        """
        for _ in range(2):
            with self._fence_lock:
                pass


@dataclass
class ProcessContext:
    """The index of one process in a group of `count`, which determines its share of rows, columns and batches.

    Attributes:
        table: the heartbeats of the group.
        send: sends a picklable object to the parent while a call goes on; see `ProcessPool.begin`.
        state: values by name that a call keeps for later calls.
        monitored: the table of a process without a group that a parent monitors, as in the jobs of a comparison.
    """

    monitored: ClassVar[HeartbeatTable | None] = None

    index: int
    count: int
    table: HeartbeatTable
    barrier: Barrier
    send: Callable[[Any], object] = lambda content: None
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def alone(cls) -> ProcessContext:
        """Return the context of a process without a group."""
        table = cls.monitored or HeartbeatTable(1, shared=False)
        table.write(0, WORKER, NO_WORKER)
        return cls(0, 1, table, Barrier(table, 0))

    def heartbeat(self) -> None:
        """Send a heartbeat. Raises AbortedError if the parent has aborted the call."""
        self.table.heartbeat(self.index)

    @property
    def heartbeats(self) -> int:
        """Number of heartbeats so far."""
        return self.table.read(self.index, HEARTBEATS)

    @contextlib.contextmanager
    def working_on(self, worker: int, round: int) -> Iterator[None]:
        """Note the current worker. The note stays if an exception or a death ends the block."""
        self.table.write(self.index, WORKER, worker)
        self.table.write(self.index, ROUND, round)
        yield
        self.table.write(self.index, WORKER, NO_WORKER)

    def working_on_several(self, round: int) -> contextlib.AbstractContextManager[None]:
        """Note that workers are trained together."""
        return self.working_on(SEVERAL_WORKERS, round)

    @contextlib.contextmanager
    def holding(self, held: int) -> Iterator[None]:
        """Note that a lock is held, or a shared row written. The note stays if a death ends the block."""
        self.table.write(self.index, HOLDING, held)
        yield
        self.table.write(self.index, HOLDING, NOTHING)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this process waits for others. Raises AbortedError if the parent has aborted the call."""
        self.table.write(self.index, WAITING, 1)
        yield
        self.table.write(self.index, WAITING, 0)
        if self.table.aborted:
            raise AbortedError("aborted")
