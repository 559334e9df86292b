"""The queue of a discrete-event simulation: who arrives next, and when, in virtual seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, nsmallest

SLACK = 64  # cancelled entries that the heap may hold, beyond as many as there are pending ones


class Calendar:
    """Pending events by time, at most one for each slot (a worker, or a place that workers take in turn).

    Nothing is drawn and nothing depends on the order in which events of one time were added, so a simulation on it is
    repeatable bit for bit. `add` and `next` cost O(log n) of n pending events; `cancel` O(1), amortised.

    Attributes:
        now: the virtual time in seconds: that of the last arrivals, or where the calendar began.
    """

    def __init__(self, now: float = 0.0) -> None:
        if not math.isfinite(now):
            raise ValueError(f"now = {now}: must be a finite number of seconds")
        self.now = now
        self._time_of: dict[int, float] = {}  # of each slot with a pending event
        self._heap: list[tuple[float, int]] = []  # these (time, slot), and some that were cancelled

    def __len__(self) -> int:
        """The number of pending events."""
        return len(self._time_of)

    def add(self, slot: int, seconds: float) -> None:
        """Let `slot` arrive at now + seconds.

        Raises ValueError where seconds are negative or not finite, and where the slot has a pending event already.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"slot {slot}: cannot arrive in {seconds} seconds; they must be finite and at least 0")
        if slot in self._time_of:
            raise ValueError(f"slot {slot}: is to arrive at {self._time_of[slot]} already")
        self._time_of[slot] = time = self.now + seconds
        heappush(self._heap, (time, slot))

    def cancel(self, slot: int) -> None:
        """Strike out the slot's pending event. Raises ValueError where it has none."""
        if slot not in self._time_of:
            raise ValueError(f"slot {slot}: has no pending event to cancel")
        del self._time_of[slot]
        if len(self._heap) > 2 * len(self._time_of) + SLACK:
            self._heap = [(time, slot) for slot, time in self._time_of.items()]
            heapify(self._heap)

    def soonest(self, count: int) -> list[int]:
        """The slots of the next `count` pending events, fewer where there are not so many; nothing changes."""
        order = nsmallest(count, ((time, slot) for slot, time in self._time_of.items()))
        return [slot for _, slot in order]

    def next(self) -> list[int]:
        """Go on to the earliest pending time: all slots that arrive at exactly that time, ascending.

        `now` becomes that time, and these slots have no pending event any more. Raises ValueError where none is
        pending.
        """
        if not self._time_of:
            raise ValueError("the calendar is empty: nobody is to arrive any more")
        heap, time_of = self._heap, self._time_of
        time, slot = heappop(heap)
        while time_of.get(slot) != time:  # cancelled
            time, slot = heappop(heap)
        del time_of[slot]
        arrived = [slot]
        while heap and heap[0][0] == time:
            slot = heappop(heap)[1]
            if time_of.get(slot) == time:  # neither cancelled nor there twice, cancelled and added again
                del time_of[slot]
                arrived.append(slot)
        self.now = time
        return arrived

    def state(self) -> tuple[float, list[tuple[float, int]]]:
        """What a checkpoint needs: now, and the pending (time, slot), sorted; `restored` makes a calendar of it."""
        return self.now, sorted((time, slot) for slot, time in self._time_of.items())

    @classmethod
    def restored(cls, now: float, pending: Iterable[tuple[float, int]]) -> Calendar:
        """The calendar that had this `state()`, in any order; from here on they give the same arrivals, bit for bit.

        Raises ValueError where a time is not finite or lies before now, or a slot is there twice.
        """
        calendar = cls(now)
        for time, slot in pending:
            if not now <= time < math.inf:
                raise ValueError(f"slot {slot}: cannot arrive at {time}; it is {now} already, and times are finite")
            if slot in calendar._time_of:
                raise ValueError(f"slot {slot}: is to arrive twice, at {calendar._time_of[slot]} and at {time}")
            calendar._time_of[slot] = time
        calendar._heap = [(time, slot) for slot, time in calendar._time_of.items()]
        heapify(calendar._heap)
        return calendar
