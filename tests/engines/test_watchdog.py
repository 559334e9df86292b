from __future__ import annotations

import queue
import threading

import pytest
import torch.distributed as dist

from fedsim.engines.distributed import watchdog
from fedsim.engines.distributed.watchdog import HeartbeatMonitor, StoreView, Watchdog, ranks, wait_for_all


class Peers:
    """Two other ranks as the store shows them: ticks, heartbeats, and whether they wait."""

    interval, keeper = 0.5, "rank 1"
    waits = True  # the rank that looks
    answers = True  # the store

    def __init__(self):
        self.now = {1: (0, 0, False), 2: (0, 0, False)}
        self.word, self.last = None, StoreView(0, None, {})

    def seen(self):
        if self.answers:
            self.last = StoreView(self.last.answers + 1, self.word, dict(self.now))
        return self.last


def one_works(peers, look):
    peers.now = {1: (look, look, False), 2: (look, 0, True)}


def none_works(peers, look):
    peers.now = {1: (look, 7, False), 2: (look, 7, True)}


def none_works_and_this_rank_waits_from_look_20_on(peers, look):
    peers.waits = look >= 20
    none_works(peers, look)


def one_ends(peers, look):
    peers.word = "rank 2: no space left" if look == 3 else None


def one_is_gone(peers, look):
    peers.now = {1: (look, look, False), 2: (1, 1, False)}


def the_store_stops(peers, look):
    peers.now = {1: (look, look, False), 2: (look, look, False)}
    peers.answers = look < 10


def the_store_is_slow(peers, look):
    peers.now = {1: (look, look, False), 2: (look, look, False)}
    peers.answers = look % 5 == 0


@pytest.mark.parametrize(
    ("change", "line", "between"),
    [
        (one_works, None, None),
        (the_store_is_slow, None, None),
        (none_works, "rank 1 made no step for 3 s; a step that takes longer needs", (3, 5)),
        (none_works_and_this_rank_waits_from_look_20_on, "rank 1 made no step for 3 s", (13, 15)),
        (one_ends, "rank 2: no space left", (2, 2)),
        (one_is_gone, "rank 2 gave no sign of life for 3 s (distributed.timeout)", (3, 5)),
        (the_store_stops, "rank 1 gave no sign of life for 3 s (distributed.timeout)", (8, 10)),
    ],
)
def test_the_monitor_reports_who_has_failed(change, line, between, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedsim.engines.distributed.watchdog.time.monotonic", lambda: now[0])
    peers, report = Peers(), None
    monitor = HeartbeatMonitor(peers, [1, 2], timeout=3.0)
    for look in range(200):
        now[0] += peers.interval
        change(peers, look)
        if report := monitor.look():
            break
    if line is None:
        assert report is None
    else:
        assert report.startswith(line)
        assert between[0] <= now[0] <= between[1]


def test_a_suspension_of_the_monitor_does_not_count_as_silence(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedsim.engines.distributed.watchdog.time.monotonic", lambda: now[0])
    peers = Peers()
    monitor = HeartbeatMonitor(peers, [1, 2], timeout=3.0)
    for look in range(100):
        now[0] += 1000
        peers.now = dict.fromkeys((1, 2), (look // 2, look // 2, False))
        assert monitor.look() is None


def test_a_store_that_fails_ends_the_process(monkeypatch, capsys):
    class Failing(dist.HashStore):
        def set(self, key, value):
            raise RuntimeError

    codes = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr("os._exit", codes.put)
    watch = Watchdog(Failing(), "the launcher", 0, 2, lambda: 0, timeout=2.0)
    watch.on_duty = True
    assert codes.get(timeout=30) == 1
    watch.stop()
    assert capsys.readouterr().err.startswith("error: the launcher is gone\n")


def test_stop_waits_for_a_call_to_a_slow_store():
    """A thread that returned from it to an interpreter that has ended would abort the process."""
    called, go_on = threading.Event(), threading.Event()

    class Slow(dist.HashStore):
        def set(self, key, value):
            called.set()
            go_on.wait(30)

    watch = Watchdog(Slow(), "rank 0", 0, 1, lambda: 0, timeout=0.2)
    assert called.wait(30)
    assert not watch.stop(seconds=0.1)
    threading.Timer(0.5, go_on.set).start()
    assert watch.stop()


def test_missing_ranks_are_named():
    store = dist.HashStore()
    store.set("pulse/1", "1 0 0")
    assert wait_for_all(store, 3, 0.1) == [0, 2]
    assert (ranks([1]), ranks([0, 2])) == ("rank 1", "ranks 0, 2")
