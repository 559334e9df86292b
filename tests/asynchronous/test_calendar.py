from __future__ import annotations

import json
import math
import random
import time

import pytest

from fedsim.asynchronous.calendar import Calendar


class PlainCalendar:
    """A list of pending events that is searched from end to end."""

    def __init__(self):
        self.now, self.pending = 0.0, []

    def add(self, slot, seconds):
        self.pending.append((self.now + seconds, slot))

    def cancel(self, slot):
        self.pending = [event for event in self.pending if event[1] != slot]

    def next(self):
        self.now = min(self.pending)[0]
        arrived = sorted(slot for at, slot in self.pending if at == self.now)
        self.pending = [event for event in self.pending if event[0] != self.now]
        return arrived


def test_arrivals_come_in_order_of_time_and_take_now_along():
    calendar = Calendar()
    for slot, seconds in ((3, 2.5), (0, 4.0), (1, 1.0)):
        calendar.add(slot, seconds)
    assert (calendar.now, len(calendar)) == (0.0, 3)
    assert (calendar.next(), calendar.now, len(calendar)) == ([1], 1.0, 2)
    calendar.add(1, 0.5)  # at 1.5
    assert (calendar.next(), calendar.now) == ([1], 1.5)
    assert (calendar.next(), calendar.now) == ([3], 2.5)
    assert (calendar.next(), calendar.now, len(calendar)) == ([0], 4.0, 0)


def test_all_that_arrive_at_one_time_arrive_together_in_ascending_order():
    calendar = Calendar()
    for slot in (5, 2, 9, 0):
        calendar.add(slot, 1.0)
    calendar.add(7, math.nextafter(1.0, 2.0))
    assert calendar.next() == [0, 2, 5, 9]
    assert calendar.next() == [7]


def test_no_time_at_all_is_an_arrival_of_its_own_at_the_same_time():
    calendar = Calendar()
    calendar.add(0, 1.0)
    calendar.add(1, 1.0)
    assert calendar.next() == [0, 1]
    calendar.add(0, 0.0)
    assert (calendar.next(), calendar.now) == ([0], 1.0)


def test_what_is_cancelled_does_not_arrive_and_its_slot_is_free_again():
    calendar = Calendar()
    for slot in range(3):
        calendar.add(slot, 1.0 + slot)
    calendar.cancel(0)
    calendar.cancel(1)
    assert len(calendar) == 1
    calendar.add(1, 5.0)
    assert (calendar.next(), calendar.now) == ([2], 3.0)
    assert (calendar.next(), calendar.now) == ([1], 5.0)


def test_a_slot_cancelled_and_added_again_at_the_same_time_arrives_once():
    calendar = Calendar()
    for again in range(3):
        calendar.add(4, 1.0)
        if again < 2:
            calendar.cancel(4)
    calendar.add(6, 1.0)
    assert calendar.next() == [4, 6]
    calendar.add(4, 0.0)
    assert (calendar.next(), calendar.now, len(calendar)) == ([4], 1.0, 0)
    with pytest.raises(ValueError, match="empty"):
        calendar.next()


def test_cancelled_events_do_not_pile_up():
    calendar = Calendar()
    calendar.add(0, 1.0)
    for k in range(10_000):
        calendar.add(1, 1000.0 + k)
        calendar.cancel(1)
    assert len(calendar._heap) < 200
    assert calendar.next() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_calls_goes_as_in_a_plain_list(seed):
    """Durations are few and exact, so that there are many ties."""
    rng, calendar, plain = random.Random(seed), Calendar(), PlainCalendar()
    for _ in range(500):
        pending = {slot for _, slot in plain.pending}
        call = rng.choice(["add", "add", "add", "next", "cancel"])
        if call == "add" and len(pending) < 30:
            slot, seconds = rng.choice([slot for slot in range(30) if slot not in pending]), rng.randrange(8) / 4
            calendar.add(slot, seconds)
            plain.add(slot, seconds)
        elif call == "next" and pending:
            assert (calendar.next(), calendar.now) == (plain.next(), plain.now)
        elif call == "cancel" and pending:
            slot = rng.choice(sorted(pending))
            calendar.cancel(slot)
            plain.cancel(slot)
        if rng.random() < 0.05:
            calendar = Calendar.restored(*json.loads(json.dumps(calendar.state())))
        assert len(calendar) == len(plain.pending)
        assert calendar.state() == (plain.now, sorted(plain.pending))


def test_a_restored_calendar_goes_on_bit_for_bit():
    rng, calendar = random.Random(0), Calendar()
    for slot in range(50):
        calendar.add(slot, rng.expovariate(1))
    calendar.cancel(7)
    calendar.next()
    now, pending = calendar.state()
    assert pending == sorted(pending)
    assert len(pending) == 48
    again = Calendar.restored(now, reversed(pending))
    while len(calendar):
        assert (again.next(), again.now) == (calendar.next(), calendar.now)
    assert len(again) == 0


@pytest.mark.parametrize("seconds", [-1.0, -math.ulp(0.0), math.nan, math.inf])
def test_impossible_durations_are_refused_and_leave_the_calendar_as_it_was(seconds):
    calendar = Calendar()
    with pytest.raises(ValueError, match=rf"slot 3: cannot arrive in {seconds} seconds; .* finite and at least 0"):
        calendar.add(3, seconds)
    assert calendar.state() == (0.0, [])


def test_a_slot_has_one_pending_event_at_most():
    calendar = Calendar()
    calendar.add(3, 1.5)
    with pytest.raises(ValueError, match="slot 3: is to arrive at 1.5 already"):
        calendar.add(3, 2.0)
    assert calendar.state() == (0.0, [(1.5, 3)])


def test_what_is_not_there_can_be_neither_awaited_nor_cancelled():
    calendar = Calendar()
    with pytest.raises(ValueError, match="the calendar is empty"):
        calendar.next()
    with pytest.raises(ValueError, match="slot 2: has no pending event"):
        calendar.cancel(2)


@pytest.mark.parametrize(
    ("now", "pending", "message"),
    [
        (math.nan, [], "now = nan"),
        (2.0, [(1.0, 0)], "slot 0: cannot arrive at 1.0; it is 2.0 already"),
        (2.0, [(math.nan, 0)], "slot 0: cannot arrive at nan"),
        (2.0, [(3.0, 1), (4.0, 1)], "slot 1: is to arrive twice, at 3.0 and at 4.0"),
    ],
)
def test_states_that_no_calendar_can_have_are_refused(now, pending, message):
    with pytest.raises(ValueError, match=message):
        Calendar.restored(now, pending)


def test_an_event_takes_microseconds():
    calendar, rng = Calendar(), random.Random(0)
    seconds = [rng.expovariate(1) for _ in range(100_000)]
    for slot in range(100):
        calendar.add(slot, seconds[slot])
    start = time.process_time()
    for each in seconds:
        for slot in calendar.next():
            calendar.add(slot, each)
    assert time.process_time() - start < 0.5  # 0.1 where nothing else runs
