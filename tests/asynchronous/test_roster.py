from __future__ import annotations

from collections import Counter

import pytest

from fedsim.asynchronous.roster import Roster
from fedsim.engines.feed import Member
from fedsim.engines.job import Schedule
from fedsim.randomness import numpy_generator

SIZES = [10, 4, 1, 7]  # 3, 1, 1 and 2 steps in batches of 4


def roster(work, *, slots=4, workers=4, schedule=None, seed=0):
    return Roster(seed, workers, slots, work, schedule or Schedule(4), lambda worker: SIZES[worker % 4])


def test_rounds_follow_each_other():
    who = roster("model")
    for round in (1, 2, 3):
        member = who.next(1)
        assert member == Member(1, 1, round)
        who.done(member)


def test_steps_go_through_rounds():
    who, seen = roster("gradient"), []
    for _ in range(7):
        member = who.next(0)
        seen.append((member.round, member.step))
        who.done(member)
    assert seen == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0)]
    assert who.next(2)[2:] == (1, None, 0)


def test_steps_of_several_epochs_are_one_round():
    who = roster("gradient", schedule=Schedule(4, epochs=2))
    seen = []
    for _ in range(7):
        member = who.next(0)
        seen.append((member.round, member.step))
        who.done(member)
    assert seen[4:] == [(1, 4), (1, 5), (2, 0)]


def test_what_was_given_up_is_begun_anew():
    for work in ("gradient", "model"):
        who = roster(work)
        who.done(who.next(0))
        member = who.next(0)
        who.given_up(member)
        assert who.next(0) == member


def test_steps_and_samples_by_hand():
    who = roster("model")
    assert [who.steps(who.next(slot)) for slot in range(4)] == [3, 1, 1, 2]
    assert [who.samples(Member(slot, slot, 1)) for slot in range(4)] == [10, 4, 1, 7]
    assert [who.samples(Member(0, 0, 1, steps)) for steps in (1, 2, 3, 4, 6)] == [4, 8, 10, 14, 20]
    assert [who.steps(Member(0, 0, 1, steps)) for steps in (1, 4)] == [1, 4]
    who = roster("gradient")
    assert [who.samples(Member(0, 0, 1, None, step)) for step in (0, 1, 2)] == [4, 4, 2]
    assert who.steps(Member(0, 0, 1, None, 2)) == 1


def test_a_round_is_worth_what_a_synchronous_one_is():
    assert roster("model").pieces_of_a_round() == 4
    assert roster("model", slots=3, workers=9).pieces_of_a_round() == 3
    assert roster("gradient").pieces_of_a_round() == 3 + 1 + 1 + 2
    assert roster("gradient", schedule=Schedule(4, epochs=None, steps=5)).pieces_of_a_round() == 20


def test_whoever_is_free_is_drawn_for_a_free_slot_all_alike():
    """7 workers for 3 slots, one after another: never one that is at work, each a seventh of the time."""
    who, at_work, drawn = roster("model", slots=3, workers=7), {}, Counter()
    for count in range(7000):
        slot = count % 3
        if slot in at_work:
            who.done(at_work.pop(slot))
        member = who.next(slot)
        assert member.worker not in {other.worker for other in at_work.values()}
        at_work[slot] = member
        drawn[member.worker] += 1
    assert set(drawn) == set(range(7))
    assert max(abs(count - 1000) for count in drawn.values()) < 150
    assert max(member.round for member in at_work.values()) > 800, "each in rounds of its own"


def test_draws_are_those_documented_and_follow_the_seed():
    who, busy = roster("model", slots=3, workers=50, seed=8), set()
    for count in range(3):
        rng = numpy_generator(8, "dispatch", count)
        expected = next(worker for worker in iter(lambda rng=rng: int(rng.integers(50)), None) if worker not in busy)
        busy.add(expected)
        assert who.next(count).worker == expected
    other = roster("model", slots=3, workers=50, seed=9)
    assert {other.next(slot).worker for slot in range(3)} != busy


def test_a_million_workers_cost_no_more_than_those_who_are_drawn():
    who = roster("model", slots=5, workers=10**6)
    for slot in range(5):
        who.done(who.next(slot))
    assert len(who._done) == 5


@pytest.mark.parametrize("work", ["gradient", "model"])
def test_where_there_is_a_slot_for_everyone_each_has_its_own(work):
    who = roster(work)
    assert [who.next(slot).worker for slot in (2, 0, 3, 1)] == [2, 0, 3, 1]
