"""A barrier for processes that may die.

`multiprocessing.Barrier` is built on locks, and a lock stays taken when its owner is killed: the peers of a process
that dies inside `wait()` then hang past their timeout. Here nobody holds anything. Each process has a line of counters
in shared memory that only it writes; crossing the barrier means: count up one's own arrivals, then watch the others'
until all have come as far. The parent process, which sees deaths, raises a flag that everybody who waits looks at.
"""

from __future__ import annotations

import os
import threading
import time

from fedsim.engines.pool.shared_memory import Counters

LINE = 16  # int64 a process: 128 bytes, so that no two processes write to one cache line
ARRIVALS, BEATS, WORKER, ROUND, WAITING, HOLDING = range(6)  # places in a process's line
NOBODY = -1  # in place of a worker
SEVERAL = -2  # the same, where many are worked on at a time
NOTHING, LOCK, PEN = range(3)  # what it holds: a lock, or the pen, writing what others read and write without one

SPINS = 100  # looks at a peer's counter before the processor is offered to others, about 10 microseconds
YIELDS = 500  # offers before sleeping
SLEEP = 0.0002  # seconds
LOOKS = 10  # for signs of life of a peer, at the least, before its silence has lasted too long


class AbortedError(RuntimeError):
    """The parent called everything off, because another process failed."""


class DeadlineError(RuntimeError):
    """A peer did not come, and showed no sign of life, for as long as one waits."""


class HeartbeatTable:
    """Shared counters of a group of processes: one line each, that only its owner writes, and the parent's flag.

    Besides arrivals at the barrier a line holds beats (signs of life, counted up as work goes on), what the process
    is working on, whether it waits for another, and what it holds, so that the parent can say so when it dies. Can be
    sent to another process while that is started.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._counters = Counters(LINE * (count + 1))
        self._cells = self._counters.cells
        for index in range(count):
            self.write(index, WORKER, NOBODY)

    def __getstate__(self) -> tuple[int, Counters]:
        return self.count, self._counters

    def __setstate__(self, state: tuple[int, Counters]) -> None:
        self.count, self._counters = state
        self._cells = self._counters.cells

    def read(self, index: int, place: int) -> int:
        return self._cells[LINE * index + place]

    def write(self, index: int, place: int, value: int) -> None:
        self._cells[LINE * index + place] = value

    def heartbeat(self, index: int) -> None:
        """A sign of life of process `index`; called by itself alone. Raises AbortedError when work is called off."""
        self._cells[LINE * index + BEATS] += 1
        if self.aborted:
            raise AbortedError("called off")

    def abort(self) -> None:
        """Make everybody who waits, now or later, raise AbortedError."""
        self._cells[LINE * self.count] = 1

    @property
    def aborted(self) -> bool:
        return bool(self._cells[LINE * self.count])


class HeartbeatTimeout:
    """How long a process has given no sign of life, as far as somebody was there to look.

    Look at least every `interval` seconds, of which a timeout is many: more than that never counts between two looks.
    A program that was suspended has not been looking, and its peers, suspended with it, need time to go on.
    """

    def __init__(self, board: HeartbeatTable, index: int, timeout: float) -> None:
        self.interval = min(1.0, timeout / LOOKS)
        self._board, self._index, self._timeout = board, index, timeout
        self._beats, self._looked, self._seconds = board.read(index, BEATS), time.monotonic(), 0.0

    def too_long(self) -> bool:
        """Look, and say whether it has been silent for longer than the timeout."""
        now, beats = time.monotonic(), self._board.read(self._index, BEATS)
        self._seconds = self._seconds + min(self.interval, now - self._looked) if beats == self._beats else 0.0
        self._beats, self._looked = beats, now
        return self._seconds > self._timeout


class Barrier:
    """Where process `index` of a board's group waits until all of them have come.

    What a process wrote to shared memory before `wait` is seen by all after it.
    """

    def __init__(self, board: HeartbeatTable, index: int, timeout: float) -> None:
        self._board, self._index, self._timeout = board, index, timeout
        self._crossings = board.read(index, ARRIVALS)
        self._peers = [peer for peer in range(board.count) if peer != index]
        self._fence_lock = threading.Lock()

    def wait(self) -> None:
        """Block until every process of the group has called `wait` as often as this one.

        Raises AbortedError when the parent calls it off, and DeadlineError when a missing peer gives no sign of life
        for `timeout` seconds.
        """
        self._crossings += 1
        self._fence()
        self._board.write(self._index, ARRIVALS, self._crossings)
        for peer in self._peers:
            if self._board.read(peer, ARRIVALS) < self._crossings:
                self._watch(peer)
        self._fence()

    def _watch(self, peer: int) -> None:
        """Wait for one peer: spin, then yield the processor, then sleep."""
        board, goal = self._board, self._crossings
        for _ in range(SPINS):
            if board.read(peer, ARRIVALS) >= goal:
                return
        looks, silence = 0, HeartbeatTimeout(board, peer, self._timeout)
        while board.read(peer, ARRIVALS) < goal:
            if board.aborted:
                raise AbortedError("called off")
            looks += 1
            if looks < YIELDS:
                _yield_processor()
                continue
            time.sleep(SLEEP)
            if silence.too_long():
                raise DeadlineError(f"process {peer} has not come and has made no step for {self._timeout:g} s")

    def _fence(self) -> None:
        """Order memory accesses before and after, on processors that would reorder them (x86 would not).

        Taking and releasing a lock twice does: nothing moves down past a release, nothing moves up past an acquire.
        """
        for _ in range(2):
            with self._fence_lock:
                pass


def _yield_processor() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)
