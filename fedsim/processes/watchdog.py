"""Detection of failed ranks. Each rank regularly writes a heartbeat to a key-value store that all ranks share."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from fedsim.errors import plural

PULSES = 20  # minimum number of heartbeats within a timeout
SLOWEST = 0.5  # maximum seconds between two heartbeats; less than rank 0 waits before it exits after an error
STILL = 2  # intervals without a tick after which a rank counts as ended, once a connection was lost
GRACE = 5.0  # seconds for a rank to exit by itself after another rank has ended
ANSWER = 1.0  # maximum seconds to wait for an answer of the store
LOOK = 0.02  # seconds between two checks for an answer
TERMINATED = "a rank was terminated"
END = "end"  # store key of the reason why the first rank ended

Pulses = dict[int, tuple[int, int, bool]]


class Watchdog(threading.Thread):
    """Thread that tells the other ranks that this rank is alive, and detects when another rank fails.

    Each rank writes heartbeats (counters) to a shared key-value store.

    Args:
        store: key-value store of the ranks.
        keeper: name of the process that runs the store, for error messages, such as "rank 0".
        rank, count: index of this rank, and number of ranks.
        steps: function that returns how many training steps this rank has made.
        timeout: seconds without a heartbeat or without progress after which a rank counts as failed.

    Attributes:
        waits: whether this rank waits for other ranks; set by the caller.
        on_duty: whether a run is in progress. If another rank fails during a run, the thread ends the process.
        cause: why the first rank failed; None without a failure.
        pulses: latest heartbeat of each rank that has joined.
    """

    def __init__(
        self, store: dist.Store, keeper: str, rank: int, count: int, steps: Callable[[], int], timeout: float
    ) -> None:
        super().__init__(name="fedsim-watchdog", daemon=True)
        self.interval, self.waits, self.on_duty = min(SLOWEST, timeout / PULSES), False, False
        self.cause: str | None = None
        self.pulses: Pulses = {}
        self._store, self._keeper, self._rank, self._count = store, keeper, rank, count
        self._steps, self._timeout, self._note = steps, timeout, ""
        self._asked = self._answered = self._ticks = 0
        # Number of intervals without a tick, by rank, and without a step of any rank.
        self._silent, self._idle = dict.fromkeys(range(count), 0), 0
        self._leaving, self._wake = threading.Event(), threading.Event()

    def end(self, seconds: float = GRACE) -> bool:
        """Stop the thread, and return whether it stopped within `seconds`."""
        self._leaving.set()
        self._wake.set()
        self.join(seconds)
        return not self.is_alive()

    def silences(self) -> Callable[[], str | None]:
        """Return a function that detects failures while this rank waits. Call the function once per `interval`.

        The function returns an error message if another rank or the store has failed, and None otherwise.
        """
        answered, looks = self._answered, 0

        def look() -> str | None:
            nonlocal answered, looks
            answered, looks = self._answered, looks + 1 if self._answered == answered else 0
            return self.cause or (self._silence(self._keeper) if self._too_long(looks) else None)

        return look

    def say(self, cause: str) -> str:
        """Tell the other ranks why this rank ends. Return the cause that a rank reported first."""
        self._note = cause
        self._ask()
        return self.cause or cause

    def find_cause(self) -> str | None:
        """Return why another rank has ended, or which ranks no longer respond; None if all ranks are alive."""
        self._ask()
        before, answered = self.pulses, self._answered
        for _ in range(STILL):
            if self.cause is None:
                time.sleep(self.interval)
                self._ask()
        gone = [rank for rank, pulse in self.pulses.items() if before.get(rank) == pulse]
        if self.cause is None and gone and self._answered > answered:
            return f"{ranks(gone)} of {self._count} ended without an error message"
        return self.cause

    def _ask(self) -> None:
        """Ask the thread to exchange heartbeats now, and wait at most one second until it has done so."""
        asked, deadline = self._asked, time.monotonic() + ANSWER
        self._wake.set()
        while self._answered <= asked and time.monotonic() < deadline:
            time.sleep(LOOK)

    def run(self) -> None:
        waited = 0.0
        while not self._leaving.is_set():
            self._wake.clear()
            self._asked += 1
            try:
                self.cause = self._exchange() or self.cause
            except RuntimeError:
                self.cause = self.cause or f"{self._keeper} ended without an error message"
            self._answered = self._asked
            waited = waited + self.interval if self.cause and self.on_duty else 0.0
            if waited > GRACE:
                print(f"error: {self.cause}", file=sys.stderr, flush=True)
                os._exit(1)
            self._wake.wait(self.interval)

    def _exchange(self) -> str | None:
        """Write this rank's heartbeat to the store, and read the heartbeats of all ranks.

        Returns an error message that says why a rank has failed; None without a failure.
        """
        store, before = self._store, self.pulses
        self._ticks += 1
        store.set(_key(self._rank), f"{self._ticks} {self._steps()} {int(self.waits)}")
        if self._note:
            return store.compare_set(END, "", self._note).decode()
        if store.check([END]):
            return store.get(END).decode()
        keys = {rank: _key(rank) for rank in range(self._count) if rank in before or store.check([_key(rank)])}
        extended = store.has_extended_api()  # type: ignore[attr-defined]
        values = store.multi_get([*keys.values()]) if extended else map(store.get, keys.values())
        self.pulses = {}
        for rank, value in zip(keys, values, strict=True):
            ticks, steps, waits = map(int, value.decode().split())
            self.pulses[rank] = ticks, steps, bool(waits)
        return self._judge(before, self.pulses)

    def _judge(self, before: Pulses, now: Pulses) -> str | None:
        for rank, pulse in now.items():
            self._silent[rank] = self._silent[rank] + 1 if before.get(rank) == pulse else 0
        steps = [{rank: pulse[1] for rank, pulse in pulses.items()} for pulses in (before, now)]
        waiting = {rank for rank, (*_, waits) in now.items() if waits}
        self._idle = self._idle + 1 if waiting and steps[0] == steps[1] else 0
        if gone := [rank for rank, looks in self._silent.items() if self._too_long(looks)]:
            return self._silence(ranks(gone))
        if self._too_long(self._idle):
            return (
                f"{ranks([rank for rank in now if rank not in waiting] or [*now])} made no step for "
                f"{self._timeout:g} s; if a step takes longer, increase distributed.timeout"
            )
        return None

    def _too_long(self, intervals: int) -> bool:
        return intervals * self.interval > self._timeout

    def _silence(self, name: str) -> str:
        return f"{name} sent no heartbeat for {self._timeout:g} s (distributed.timeout)"


def ranks(numbers: list[int]) -> str:
    """Format rank numbers for an error message, such as "rank 1" or "ranks 1, 2"."""
    return f"{plural(len(numbers), 'rank').partition(' ')[2]} {', '.join(map(str, numbers))}"


def wait_for_all(store: dist.Store, count: int, timeout: float) -> list[int]:
    """Wait until all ranks have connected. Return the ranks that have not done so within `timeout` seconds."""
    missing, deadline = list(range(count)), time.monotonic() + timeout
    while (missing := [rank for rank in missing if not store.check([_key(rank)])]) and time.monotonic() < deadline:
        time.sleep(LOOK)
    return missing


def _key(rank: int) -> str:
    return f"pulse/{rank}"
