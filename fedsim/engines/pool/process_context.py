"""A process as the code that it runs sees it: its index in the group, its heartbeats, the barrier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedsim.engines.pool.barrier import (
    HEARTBEATS,
    HOLDING,
    NO_WORKER,
    NOTHING,
    ROUND,
    SEVERAL_WORKERS,
    WAITING,
    WORKER,
    AbortedError,
    Barrier,
    HeartbeatTable,
)


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
        """The context of a process without a group."""
        table = cls.monitored or HeartbeatTable(1, shared=False)
        table.write(0, WORKER, NO_WORKER)
        return cls(0, 1, table, Barrier(table, 0, timeout=0.0))

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
    def holding(self, what: int) -> Iterator[None]:
        """Note that a lock is held, or a shared row written. The note stays if a death ends the block."""
        self.table.write(self.index, HOLDING, what)
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
