"""Which ranks of a group are alive, and which have failed. The ranks report to their store of keys and values."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fedsim.errors import plural

PULSES = 20  # at least, within a timeout
SLOWEST = 1.0  # seconds from one to the next
PATIENCE = 3.0  # seconds to find out which rank is gone
AT_ONCE = 0.5  # seconds within which a dead process of this host is found
GRACE = 5.0  # seconds for a rank to end by itself after another one has ended
LOOK = 0.02  # seconds between two checks for missing ranks
TERMINATED = "a rank was terminated"
END = "end"  # key of the reason why the first rank ended


def always() -> bool:
    return True


def never() -> bool:
    return False


@dataclass(frozen=True)
class StoreView:
    """The last answer of the store.

    Attributes:
        answers: number of answers so far.
        cause: why the first rank ended, if any has.
        pulses: ticks, heartbeats, and whether it waits, of each other rank.
    """

    answers: int
    cause: str | None
    pulses: dict[int, tuple[int, int, bool]]


class Watchdog:
    """Publishes the pulse of this rank in the store, and reads those of the others.

    A pulse is `ticks heartbeats waits`: ticks count while the process lives, heartbeats while it works.

    If the process of the store is stopped, a call to the store never returns. So one thread makes all these calls, and
    no other thread waits for it: without an answer, the store is silent. A second thread ends the process if a rank has
    ended, or the store is silent, and this rank does not end by itself.

    Args:
        keeper: the process of the store, as errors name it: `rank 0`.
        heartbeats: returns the number of steps of this rank.
        timeout: seconds without a tick, or without a heartbeat of any rank, after which a rank counts as lost.

    Attributes:
        on_duty: whether the other ranks depend on this one now, as they do during a run; only then the second thread
            ends the process.
    """

    def __init__(
        self, store: dist.Store, keeper: str, rank: int, count: int, heartbeats: Callable[[], int], timeout: float
    ) -> None:
        self.interval, self.keeper, self.on_duty = min(SLOWEST, timeout / PULSES), keeper, False
        self._store, self._rank, self._timeout = store, rank, timeout
        self._heartbeats, self._ticks, self._waits = heartbeats, 0, never
        self._others = [other for other in range(count) if other != rank]
        self._seen, self._asked, self._note = StoreView(0, None, {}), 0, ""
        self._broken = False  # whether the last call to the store failed
        self._stop, self._wake, self._answered = threading.Event(), threading.Event(), threading.Condition()
        self._threads = [
            threading.Thread(target=each, name="fedsim-watchdog", daemon=True) for each in (self._exchange, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float = GRACE) -> bool:
        """End the threads. Returns whether they have ended in time; a call to a stopped store never returns."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    @contextlib.contextmanager
    def waiting(self, now: Callable[[], bool] = always) -> Iterator[HeartbeatMonitor]:
        """In the block, this rank waits for others as soon as `now()` is true; their silence counts from then on."""
        self._waits = now
        try:
            yield HeartbeatMonitor(self, self._others, self._timeout)
        finally:
            self._waits = never

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others."""
        return self._waits()

    def seen(self) -> StoreView:
        """The last answer of the store, at most one interval old while it answers."""
        return self._seen

    def note(self, cause: str) -> str:
        """Publish why this rank ends; returns the cause of the first rank that has ended."""
        self._note = cause
        return self.said() or cause

    def said(self) -> str | None:
        """Why the first rank has ended, if any has. Takes a second if the store does not answer."""
        return self._ask().cause

    def missing(self, processes: dict[int, tuple[str, int]]) -> list[int]:
        """The ranks that are gone; takes some seconds for those on other hosts.

        Args:
            processes: host and process of each rank.
        """
        host = processes[self._rank][0]
        near = {rank: pid for rank, (where, pid) in processes.items() if where == host}
        deadline = time.monotonic() + AT_ONCE  # connections end a moment before their process
        while not (dead := [rank for rank, pid in near.items() if not _lives(pid)]) and time.monotonic() < deadline:
            time.sleep(AT_ONCE / 50)
        if dead or len(near) == len(processes):
            return dead
        before = self._ask()
        time.sleep(PATIENCE)
        after = self._ask()
        if before.answers == after.answers:  # the store does not say
            return []
        return [
            rank for rank, pulse in after.pulses.items() if rank in before.pulses and pulse[0] == before.pulses[rank][0]
        ]

    def _ask(self) -> StoreView:
        """The answer of the store to a question now, or its last answer if it takes more than a second."""
        with self._answered:
            asked = self._asked  # an open question may have been asked too early
            self._wake.set()
            self._answered.wait_for(lambda: self._seen.answers > asked or self._broken, timeout=SLOWEST)
        return self._seen

    def _exchange(self) -> None:
        """The thread that calls the store."""
        while not self._stop.is_set():
            self._wake.clear()
            self._asked += 1
            try:
                self._publish()
                seen, self._broken = StoreView(self._asked, self._read_end(), self._read_pulses()), False
            except RuntimeError:  # its process has ended
                seen, self._broken = self._seen, True
            with self._answered:
                self._seen = seen
                self._answered.notify_all()
            self._wake.wait(self.interval)

    def _read_end(self) -> str | None:
        if self._note:
            return self._store.compare_set(END, "", self._note).decode()
        return self._store.get(END).decode() if self._store.check([END]) else None

    def _read_pulses(self) -> dict[int, tuple[int, int, bool]]:
        """The pulses of the ranks that have joined."""
        keys = {other: _key(other) for other in self._others}
        if not all(other in self._seen.pulses for other in keys):
            keys = {other: key for other, key in keys.items() if self._store.check([key])}
        values = (
            self._store.multi_get([*keys.values()])
            if self._store.has_extended_api()  # type: ignore[attr-defined]
            else map(self._store.get, keys.values())
        )
        found = {}
        for other, value in zip(keys, values, strict=True):
            ticks, heartbeats, waits = map(int, value.decode().split())
            found[other] = ticks, heartbeats, bool(waits)
        return found

    def _watch(self) -> None:
        """The thread that ends the process."""
        silences, waited = HeartbeatMonitor(self, [], self._timeout), 0.0
        while not self._stop.wait(self.interval):
            cause = silences.look()
            if self._broken:
                cause = cause or f"{self.keeper} is gone"
            waited = waited + self.interval if cause and self.on_duty else 0.0
            if waited > GRACE:
                print(f"error: {cause}", file=sys.stderr, flush=True)
                os._exit(1)

    def _publish(self) -> None:
        self._ticks += 1
        self._store.set(_key(self._rank), f"{self._ticks} {self._heartbeats()} {int(self.waits)}")


class HeartbeatMonitor:
    """Measures how long the store and the other ranks have been silent. Call `look` once an interval."""

    def __init__(self, watchdog: Watchdog, others: list[int], timeout: float) -> None:
        self._watchdog, self._timeout = watchdog, timeout
        self._since: dict[int, list[float]] = {other: [0.0, 0.0] for other in others}  # seconds without tick, heartbeat
        self._before: dict[int, tuple[int, int, bool]] = {}
        self._answers, self._unanswered = -1, 0.0  # of the store, and seconds since the last one
        self._looked = time.monotonic()

    def look(self) -> str | None:
        """Why a rank has ended, or which rank has been silent for too long; None if all is well."""
        seen, now = self._watchdog.seen(), time.monotonic()
        seconds = min(2 * self._watchdog.interval, now - self._looked)  # this process may have been suspended
        self._looked = now
        if seen.cause:
            return seen.cause
        self._unanswered += seconds
        if seen.answers == self._answers:
            if self._unanswered > self._timeout:
                return f"{self._watchdog.keeper} gave no sign of life for {self._timeout:g} s (distributed.timeout)"
            return None  # nothing is known about the other ranks
        seconds = min(2 * self._watchdog.interval, self._unanswered)
        self._answers, self._unanswered = seen.answers, 0.0
        return self._too_long(seen.pulses, seconds)

    def _too_long(self, pulses: dict[int, tuple[int, int, bool]], seconds: float) -> str | None:
        """Missing steps count from the time when this rank waits for them."""
        for rank, since in self._since.items():
            for place, counts in ((0, True), (1, self._watchdog.waits)):
                known = rank in pulses and rank in self._before
                same = counts and known and self._before[rank][place] == pulses[rank][place]
                since[place] = since[place] + seconds if same else 0.0
        self._before = pulses
        gone = [rank for rank, (without_tick, _) in self._since.items() if without_tick > self._timeout]
        if gone:
            return f"{ranks(gone)} gave no sign of life for {self._timeout:g} s (distributed.timeout)"
        if self._since and all(without_heartbeat > self._timeout for _, without_heartbeat in self._since.values()):
            busy = [rank for rank, (*_, waits) in pulses.items() if not waits] or list(pulses)
            return (
                f"{ranks(busy)} made no step for {self._timeout:g} s; a step that takes longer needs a larger "
                "distributed.timeout"
            )
        return None


def ranks(numbers: list[int]) -> str:
    """`rank 1`, `ranks 1, 2`."""
    return f"{plural(len(numbers), 'rank').partition(' ')[2]} {', '.join(map(str, numbers))}"


def wait_for_all(store: dist.Store, count: int, timeout: float) -> list[int]:
    """Wait until every rank has published a pulse. Returns the ranks that have not in time."""
    missing, deadline = list(range(count)), time.monotonic() + timeout
    while (missing := [rank for rank in missing if not store.check([_key(rank)])]) and time.monotonic() < deadline:
        time.sleep(LOOK)
    return missing


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # dead, though not yet reaped
    return True
