"""Which ranks of a group are alive, and which have failed. The ranks report to their store of keys and values."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from fedsim.errors import plural

PULSES = 20  # at least, within a timeout
SLOWEST = 0.5  # seconds from one to the next; less than the first rank lingers after an error
STILL = 2  # intervals without a tick after which a rank has ended, if a connection was lost
GRACE = 5.0  # seconds for a rank to end by itself after another one has ended
ANSWER = 1.0  # seconds to wait for an answer of the store
LOOK = 0.02  # seconds between two checks of an answer
TERMINATED = "a rank was terminated"
END = "end"  # key of the reason why the first rank ended

Pulses = dict[int, tuple[int, int, bool]]


class Watchdog(threading.Thread):
    """Publishes the pulse of this rank in the store, reads those of the others, and judges who has failed.

    A pulse is `ticks steps waits`: ticks count while the process lives, steps while it works. PyTorch's time-outs do
    not replace it: they count a rank that works for long as lost, and a call to the store of a stopped process never
    returns. So a thread makes these calls, and the main thread never waits for it without a limit.

    Args:
        keeper: the process of the store, as errors name it: `rank 0`.
        steps: returns the number of steps of this rank.
        timeout: seconds without a tick, or without a step of any rank while one waits, after which a rank counts as
            lost.

    Attributes:
        waits: whether this rank waits for others; set by the caller.
        on_duty: whether the other ranks depend on this one, as they do during a run; only then the thread ends the
            process if another rank has failed and this one does not end by itself.
        cause: why the first rank has ended, or which rank has been silent for too long; None if all is well.
        pulses: ticks, steps, and whether it waits, of each rank that has joined.
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
        self._silent, self._idle = dict.fromkeys(range(count), 0), 0  # intervals without a tick, without any step
        self._leaving, self._wake = threading.Event(), threading.Event()

    def end(self, seconds: float = GRACE) -> bool:
        """End the thread. Returns whether it has ended in time; a call to a stopped store never returns."""
        self._leaving.set()
        self._wake.set()
        self.join(seconds)
        return not self.is_alive()

    def silences(self) -> Callable[[], str | None]:
        """Return a function to be called once an interval: why another rank has failed, or that the store is silent."""
        answered, looks = self._answered, 0

        def look() -> str | None:
            nonlocal answered, looks
            answered, looks = self._answered, looks + 1 if self._answered == answered else 0
            return self.cause or (self._silence(self._keeper) if self._too_long(looks) else None)

        return look

    def say(self, cause: str) -> str:
        """Publish why this rank ends; returns the cause of the first rank that has ended."""
        self._note = cause
        self._ask()
        return self.cause or cause

    def find_cause(self) -> str | None:
        """Why another rank has ended, or which ranks have ended without a word; takes some intervals."""
        self._ask()
        before, answered = self.pulses, self._answered
        for _ in range(STILL):
            if self.cause is None:
                time.sleep(self.interval)
                self._ask()
        gone = [rank for rank, pulse in self.pulses.items() if before.get(rank) == pulse]
        if self.cause is None and gone and self._answered > answered:
            return f"{ranks(gone)} of {self._count} ended without a word"
        return self.cause

    def _ask(self) -> None:
        """Wait for an answer of the store to a question from now on, a second at most."""
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
                self.cause = self.cause or f"{self._keeper} ended without a word"
            self._answered = self._asked
            waited = waited + self.interval if self.cause and self.on_duty else 0.0
            if waited > GRACE:
                print(f"error: {self.cause}", file=sys.stderr, flush=True)
                os._exit(1)
            self._wake.wait(self.interval)

    def _exchange(self) -> str | None:
        """Publish the pulse of this rank and read those of all; returns why a rank has failed."""
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
                f"{self._timeout:g} s; a step that takes longer needs a larger distributed.timeout"
            )
        return None

    def _too_long(self, intervals: int) -> bool:
        return intervals * self.interval > self._timeout

    def _silence(self, name: str) -> str:
        return f"{name} gave no sign of life for {self._timeout:g} s (distributed.timeout)"


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
