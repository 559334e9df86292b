"""Who of a group of ranks is alive, and who has failed: told through the store at which they met."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


class Vigil:
    """A thread that publishes this rank's signs of life, and a look at those of the others.

    A pulse is `ticks beats waits`: ticks go on as long as the process lives, beats as its work does.

    Args:
        beats: how many steps this rank has made.
        timeout: seconds without a tick, or without a beat of anybody, after which somebody counts as lost.

    Attributes:
        on_duty: whether a run is under way, of which the other ranks are a part: where one of them has ended, and this
            one goes on with whatever it does (hangs, perhaps), the thread ends the process.
    """

    on_duty = False

    def __init__(self, store: dist.Store, rank: int, count: int, beats: Callable[[], int], timeout: float) -> None:
        self.interval = min(SLOWEST, timeout / PULSES)
        self._store, self._rank, self._count, self._timeout = store, rank, count, timeout
        self._beats, self._ticks, self._waits = beats, 0, never
        self._others = [other for other in range(count) if other != rank]
        self._stop = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._go_on, name="fedsim-vigil", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(2 * self.interval)

    @contextlib.contextmanager
    def waiting(self, now: Callable[[], bool] = always) -> Iterator[Silences]:
        """While this rank waits for others, or will as soon as `now` says so; their silence counts from then on."""
        self._waits = now
        try:
            yield Silences(self, self._others, self._timeout)
        finally:
            self._waits = never

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others."""
        return self._waits()

    def pulses(self) -> dict[int, tuple[int, int, bool]]:
        """The others' latest: ticks, beats, and whether they wait for somebody."""
        keys = [_key(other) for other in self._others]
        values = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
        found = {}
        for other, value in zip(self._others, values, strict=True):
            ticks, beats, waits = map(int, value.decode().split())
            found[other] = ticks, beats, bool(waits)
        return found

    def note(self, cause: str) -> str:
        """Leave word why this rank ends; what the first of all ranks has said."""
        with contextlib.suppress(RuntimeError):
            return self._store.compare_set(END, "", cause).decode()
        return cause

    def said(self) -> str | None:
        """What the first rank that ended has said, if any has."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([END]):
                return self._store.get(END).decode()
        return None

    def missing(self, processes: dict[int, tuple[str, int]]) -> list[int]:
        """The ranks that are gone; `processes` has host and process of each. Takes some seconds for those elsewhere."""
        host = processes[self._rank][0]
        near = {rank: pid for rank, (where, pid) in processes.items() if where == host}
        deadline = time.monotonic() + AT_ONCE  # its connections end a moment before a process does
        while not (dead := [rank for rank, pid in near.items() if not _lives(pid)]) and time.monotonic() < deadline:
            time.sleep(AT_ONCE / 50)
        if dead or len(near) == len(processes):
            return dead
        with contextlib.suppress(RuntimeError):
            before = self.pulses()
            time.sleep(PATIENCE)
            return [rank for rank, pulse in self.pulses().items() if pulse[0] == before[rank][0]]
        return []

    def _go_on(self) -> None:
        waited = 0.0
        while not self._stop.wait(self.interval):
            try:
                self._publish()
                cause = self._store.get(END).decode() if self._store.check([END]) else None
            except RuntimeError:
                cause = "the rank that kept the ranks' meeting place is gone"
            waited = waited + self.interval if cause and self.on_duty else 0.0
            if waited > GRACE:
                print(f"error: {cause}", file=sys.stderr, flush=True)
                os._exit(1)

    def _publish(self) -> None:
        self._ticks += 1
        self._store.set(_key(self._rank), f"{self._ticks} {self._beats()} {int(self.waits)}")


class Silences:
    """How long the other ranks have given no sign of life, as far as somebody was there to look."""

    def __init__(self, vigil: Vigil, others: list[int], timeout: float) -> None:
        self._vigil, self._timeout = vigil, timeout
        self._since: dict[int, list[float]] = {other: [0.0, 0.0] for other in others}  # seconds without tick, and beat
        self._before: dict[int, tuple[int, int, bool]] = {}
        self._looked = time.monotonic()

    def look(self) -> str | None:
        """To be called once an interval; says why a rank has ended, or who has been silent for too long, if any has."""
        return self._vigil.said() or self._too_long()

    def _too_long(self) -> str | None:
        """That nobody makes a step counts from when this rank waits for it."""
        now, pulses = time.monotonic(), self._vigil.pulses()
        seconds = min(2 * self._vigil.interval, now - self._looked)  # who was suspended has not been looking
        for rank, pulse in pulses.items():
            for place, counts in ((0, True), (1, self._vigil.waits)):
                same = counts and rank in self._before and self._before[rank][place] == pulse[place]
                self._since[rank][place] = self._since[rank][place] + seconds if same else 0.0
        self._before, self._looked = pulses, now
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
    """Wait until every rank has published; those who have not in time."""
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
