"""The event queue of the discrete-event simulation: pending arrivals by virtual time."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, nsmallest

SLACK = 64  # cancelled entries that the heap may hold beyond the number of pending events


class EventQueue:
    """Pending events by time, at most one for each slot.

    Events of the same time are popped together, so the order in which they were added does not matter. `add` and `pop`
    cost O(log n) for n pending events; `cancel` costs O(1), amortised.

    Args:
        now: the virtual time in seconds.
        pending: (time, slot) of the events.

    Attributes:
        now: the virtual time of the last popped events.
    """

    def __init__(self, now: float = 0.0, pending: Iterable[tuple[float, int]] = ()) -> None:
        self.now = now
        self._time_of = {slot: time for time, slot in pending}
        self._rebuild()

    def __len__(self) -> int:
        """The number of pending events."""
        return len(self._time_of)

    def add(self, slot: int, seconds: float) -> None:
        """Add an event of `slot` at now + seconds; the slot must have no pending event."""
        self._time_of[slot] = time = self.now + seconds
        heappush(self._heap, (time, slot))

    def cancel(self, slot: int) -> None:
        """Remove the pending event of a slot."""
        del self._time_of[slot]
        if len(self._heap) > 2 * len(self._time_of) + SLACK:
            self._rebuild()

    def peek(self, count: int) -> list[int]:
        """The slots of the next `count` events, without popping them."""
        return [slot for _, slot in nsmallest(count, self.pending())]

    def pop(self) -> list[int]:
        """Advance `now` to the earliest event; return the slots of all events at exactly that time, ascending."""
        heap, time_of = self._heap, self._time_of
        time, slot = heappop(heap)
        while time_of.get(slot) != time:  # cancelled
            time, slot = heappop(heap)
        del time_of[slot]
        slots = [slot]
        while heap and heap[0][0] == time:
            slot = heappop(heap)[1]
            if time_of.get(slot) == time:  # neither cancelled nor a duplicate of a cancelled event
                del time_of[slot]
                slots.append(slot)
        self.now = time
        return slots

    def pending(self) -> list[tuple[float, int]]:
        """(time, slot) of all pending events."""
        return [(time, slot) for slot, time in self._time_of.items()]

    def _rebuild(self) -> None:
        self._heap = self.pending()
        heapify(self._heap)
