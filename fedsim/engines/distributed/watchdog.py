"""Which ranks of a group are alive, and which have failed. The ranks report through the store at which they met."""

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

PULSES = 20  # at least, within the timeout
SLOWEST = 1.0  # seconds from one to the next
PATIENCE = 3.0  # seconds to find out who is gone, when somebody is
AT_ONCE = 0.5  # seconds within which that shows of processes of this host
GRACE = 5.0  # seconds for a rank to end by itself, once another one has ended
LOOK = 0.02  # seconds between two looks for somebody who has still to come
TERMINATED = "a rank was terminated"
END = "end"  # key: why the first rank ended that did


def always() -> bool:
    return True


def never() -> bool:
    return False


@dataclass(frozen=True)
class Seen:
    """What the store said last.

    Attributes:
        answers: how often the store has answered so far.
        said: why the first rank that ended did so, if any has.
        pulses: of the other ranks: ticks, beats, and whether they wait for somebody.
    """

    answers: int
    said: str | None
    pulses: dict[int, tuple[int, int, bool]]


class Watchdog:
    """Publishes this rank's signs of life in the store, and reads those of the others there.

    A pulse is `ticks beats waits`: ticks go on as long as the process lives, beats as its work does.

    The process that keeps the store may be stopped, and then every call to the store waits for ever. So one thread
    makes all these calls, and nobody waits for it: if it gets no answer, the keeper of the store is silent. A second
    thread ends the process if a rank has ended, or the store is silent, and this rank does not end by itself.

    Args:
        keeper: who keeps the store, as errors name it: `rank 0`.
        beats: how many steps this rank has made.
        timeout: seconds without a tick, or without a beat of anybody, after which somebody counts as lost.

    Attributes:
        on_duty: whether the other ranks depend on this one now, as they do while they meet, and during a run; only then
            the second thread ends the process.
    """

    def __init__(
        self, store: dist.Store, keeper: str, rank: int, count: int, beats: Callable[[], int], timeout: float
    ) -> None:
        self.interval, self.keeper, self.on_duty = min(SLOWEST, timeout / PULSES), keeper, True
        self._store, self._rank, self._timeout = store, rank, timeout
        self._beats, self._ticks, self._waits = beats, 0, never
        self._others = [other for other in range(count) if other != rank]
        self._seen, self._asked, self._note = Seen(0, None, {}), 0, ""
        self._broken = False  # whether the last call to the store failed
        self._stop, self._wake, self._answered = threading.Event(), threading.Event(), threading.Condition()
        self._threads = [
            threading.Thread(target=each, name="fedsim-watchdog", daemon=True) for each in (self._exchange, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(2 * self.interval)

    @contextlib.contextmanager
    def waiting(self, now: Callable[[], bool] = always) -> Iterator[HeartbeatMonitor]:
        """While this rank waits for others, or will as soon as `now` says so; their silence counts from then on."""
        self._waits = now
        try:
            yield HeartbeatMonitor(self, self._others, self._timeout)
        finally:
            self._waits = never

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others."""
        return self._waits()

    def seen(self) -> Seen:
        """What the store said last, which is one interval ago or less, as long as it answers."""
        return self._seen

    def note(self, cause: str) -> str:
        """Leave word why this rank ends; what the first of all ranks has said."""
        self._note = cause
        return self.said() or cause

    def said(self) -> str | None:
        """What the first rank that ended has said by now, if any has. Takes a second if the store does not answer."""
        return self._ask().said

    def missing(self, processes: dict[int, tuple[str, int]]) -> list[int]:
        """The ranks that are gone; `processes` has host and process of each. Takes some seconds for those elsewhere."""
        host = processes[self._rank][0]
        near = {rank: pid for rank, (where, pid) in processes.items() if where == host}
        deadline = time.monotonic() + AT_ONCE  # its connections end a moment before a process does
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

    def _ask(self) -> Seen:
        """What the store says to a question that is asked now, or said last if it does not answer within a second."""
        with self._answered:
            asked = self._asked  # a question that is open may have been asked too early
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
                seen, self._broken = Seen(self._asked, self._read_end(), self._read_pulses()), False
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
        """Of those ranks that have come."""
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
            ticks, beats, waits = map(int, value.decode().split())
            found[other] = ticks, beats, bool(waits)
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
        self._store.set(_key(self._rank), f"{self._ticks} {self._beats()} {int(self.waits)}")


class HeartbeatMonitor:
    """How long the store and the other ranks have given no sign of life, as far as somebody was there to look."""

    def __init__(self, watchdog: Watchdog, others: list[int], timeout: float) -> None:
        self._watchdog, self._timeout = watchdog, timeout
        self._since: dict[int, list[float]] = {other: [0.0, 0.0] for other in others}  # seconds without tick, and beat
        self._before: dict[int, tuple[int, int, bool]] = {}
        self._answers, self._unanswered = -1, 0.0  # of the store, and seconds without another one
        self._looked = time.monotonic()

    def look(self) -> str | None:
        """To be called once an interval; says why a rank has ended, or who has been silent for too long, if any has."""
        seen, now = self._watchdog.seen(), time.monotonic()
        seconds, self._looked = min(2 * self._watchdog.interval, now - self._looked), now  # suspended, it did not look
        if seen.said:
            return seen.said
        self._unanswered += seconds
        if seen.answers == self._answers:
            if self._unanswered > self._timeout:
                return f"{self._watchdog.keeper} gave no sign of life for {self._timeout:g} s (distributed.timeout)"
            return None  # of the other ranks nothing is known
        seconds = min(2 * self._watchdog.interval, self._unanswered)
        self._answers, self._unanswered = seen.answers, 0.0
        return self._too_long(seen.pulses, seconds)

    def _too_long(self, pulses: dict[int, tuple[int, int, bool]], seconds: float) -> str | None:
        """That nobody makes a step counts from when this rank waits for it."""
        for rank, since in self._since.items():
            for place, counts in ((0, True), (1, self._watchdog.waits)):
                known = rank in pulses and rank in self._before
                same = counts and known and self._before[rank][place] == pulses[rank][place]
                since[place] = since[place] + seconds if same else 0.0
        self._before = pulses
        gone = [rank for rank, (without_tick, _) in self._since.items() if without_tick > self._timeout]
        if gone:
            return f"{ranks(gone)} gave no sign of life for {self._timeout:g} s (distributed.timeout)"
        if self._since and all(without_beat > self._timeout for _, without_beat in self._since.values()):
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
    """Wait until every rank has published. Returns the ranks that have not in time."""
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
