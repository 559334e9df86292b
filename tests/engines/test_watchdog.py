from __future__ import annotations

import queue

import pytest
import torch.distributed as dist

from fedsim.engines.distributed import watchdog
from fedsim.engines.distributed.watchdog import HeartbeatMonitor, Seen, Watchdog, ranks, wait_for_all


class Peers:
    """What a look at the pulses of two other ranks gives: ticks, beats, and whether they wait."""

    interval, keeper = 0.5, "rank 1"
    waits = True  # the rank that looks
    answers = True  # the store

    def __init__(self):
        self.now = {1: (0, 0, False), 2: (0, 0, False)}
        self.word, self.last = None, Seen(0, None, {})

    def seen(self):
        if self.answers:
            self.last = Seen(self.last.answers + 1, self.word, dict(self.now))
        return self.last


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr("fedsim.engines.distributed.watchdog.time.monotonic", lambda: now[0])
    return now


def looks(peers, clock, seconds, change=lambda peers, look: None):
    """What is said first in so many seconds of looking."""
    silences = HeartbeatMonitor(peers, [1, 2], timeout=3.0)
    for look in range(int(seconds / peers.interval)):
        clock[0] += peers.interval
        change(peers, look)
        if said := silences.look():
            return said, clock[0]
    return None


def test_whoever_works_is_waited_for_without_end(clock):
    def one_works(peers, look):
        peers.now = {1: (look, look, False), 2: (look, 0, True)}

    assert looks(Peers(), clock, 100, one_works) is None


def test_where_nobody_makes_a_step_the_one_that_does_not_wait_is_named(clock):
    def none_works(peers, look):
        peers.now = {1: (look, 7, False), 2: (look, 7, True)}

    said, when = looks(Peers(), clock, 100, none_works)
    assert said == "rank 1 made no step for 3 s; a step that takes longer needs a larger distributed.timeout"
    assert 3 < when < 5


def test_who_makes_no_step_does_not_count_before_this_rank_waits(clock):
    def waits_from_look_20_on(peers, look):
        peers.waits = look >= 20
        peers.now = {1: (look, 7, False), 2: (look, 7, True)}

    said, when = looks(Peers(), clock, 100, waits_from_look_20_on)
    assert said.startswith("rank 1 made no step for 3 s")
    assert 13 < when < 15


def test_what_a_rank_has_ended_with_is_passed_on_at_once(clock):
    def one_ends(peers, look):
        peers.word = "rank 2: no space left" if look == 3 else None

    assert looks(Peers(), clock, 100, one_ends) == ("rank 2: no space left", 2.0)


def test_a_rank_whose_process_is_silent_is_lost_even_if_others_work(clock):
    def one_is_gone(peers, look):
        peers.now = {1: (look, look, False), 2: (1, 1, False)}

    said, _ = looks(Peers(), clock, 100, one_is_gone)
    assert said == "rank 2 gave no sign of life for 3 s (distributed.timeout)"


def test_a_store_that_does_not_answer_means_that_its_keeper_is_lost(clock):
    def stops(peers, look):
        peers.now = {1: (look, look, False), 2: (look, look, False)}
        peers.answers = look < 10

    said, when = looks(Peers(), clock, 100, stops)
    assert said == "rank 1 gave no sign of life for 3 s (distributed.timeout)"
    assert 8 < when < 10


def test_a_store_that_fails_ends_the_process_with_its_keeper(monkeypatch, capsys):
    class Failing(dist.HashStore):
        def set(self, key, value):
            raise RuntimeError

    codes = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr("os._exit", codes.put)
    watch = Watchdog(Failing(), "the launcher", 0, 2, beats=lambda: 0, timeout=2.0)
    assert codes.get(timeout=30) == 1
    watch.stop()
    assert capsys.readouterr().err.startswith("error: the launcher is gone\n")


def test_a_store_that_answers_late_is_waited_for(clock):
    def slow(peers, look):
        peers.now = {1: (look, look, False), 2: (look, look, False)}
        peers.answers = look % 5 == 0

    assert looks(Peers(), clock, 100, slow) is None


def test_time_in_which_nobody_was_there_to_look_does_not_count(clock):
    def suspended(peers, look):
        clock[0] += 1000
        peers.now = dict.fromkeys((1, 2), (look // 2, look // 2, False))

    assert looks(Peers(), clock, 50, suspended) is None


def test_ranks_that_have_not_come_are_named():
    store = dist.HashStore()
    store.set("pulse/1", "1 0 0")
    assert wait_for_all(store, 3, 0.1) == [0, 2]
    assert (ranks([1]), ranks([0, 2])) == ("rank 1", "ranks 0, 2")
