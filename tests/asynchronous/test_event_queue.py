from __future__ import annotations

import random

import pytest

from fedsim.asynchronous.virtual_clock import EventQueue


class ListQueue:
    """A list of pending events that is searched from end to end."""

    def __init__(self):
        self.now, self.events = 0.0, []

    def add(self, slot, seconds):
        self.events.append((self.now + seconds, slot))

    def cancel(self, slot):
        self.events = [event for event in self.events if event[1] != slot]

    def peek(self, count):
        return [slot for _, slot in sorted(self.events)[:count]]

    def pop(self):
        self.now = min(self.events)[0]
        slots = sorted(slot for time, slot in self.events if time == self.now)
        self.events = [event for event in self.events if event[0] != self.now]
        return slots


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_agree_with_a_plain_list(seed):
    """Durations are few and exact, so that many events have the same time; restored queues continue in the same way."""
    rng, events, plain = random.Random(seed), EventQueue(), ListQueue()
    for _ in range(500):
        pending = {slot for _, slot in plain.events}
        call = rng.choice(["add", "add", "add", "pop", "cancel"])
        if call == "add" and len(pending) < 30:
            slot, seconds = rng.choice([slot for slot in range(30) if slot not in pending]), rng.randrange(8) / 4
            events.add(slot, seconds)
            plain.add(slot, seconds)
        elif call == "pop" and pending:
            assert (events.pop(), events.now) == (plain.pop(), plain.now)
        elif call == "cancel" and pending:
            slot = rng.choice(sorted(pending))
            events.cancel(slot)
            plain.cancel(slot)
        if rng.random() < 0.05:
            events = EventQueue(events.now, events.pending())
        assert sorted(events.pending()) == sorted(plain.events)
        assert events.peek(5) == plain.peek(5)
        assert len(events) == len(plain.events)


def test_cancelled_events_are_removed_from_the_heap():
    events = EventQueue()
    events.add(0, 1.0)
    for k in range(10_000):
        events.add(1, 1000.0 + k)
        events.cancel(1)
    assert len(events._heap) < 200
    assert events.pop() == [0]
