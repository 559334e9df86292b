from __future__ import annotations

import queue
import threading

import pytest
import torch.distributed as dist

from fedsim.processes import watchdog
from fedsim.processes.watchdog import Watchdog, ranks, wait_for_all


def watch(store=None, steps=lambda: 7, timeout=3.0):
    """Return the watchdog of rank 0 of 3 before its thread starts. It looks at the store 20 times per timeout."""
    return Watchdog(store or dist.HashStore(), "rank 0", 0, 3, steps, timeout)


@pytest.mark.parametrize(
    ("waits", "pulses", "line"),
    [
        (True, lambda look: (f"{look} {look} 0", f"{look} 0 1"), None),  # rank 1 makes progress
        (False, lambda look: (f"{look} 7 0", f"{look} 7 0"), None),  # nobody waits for a long step
        (True, lambda look: (f"{look} 7 0", f"{look} 7 1"), "rank 1 made no step for 3 s; if a step takes longer"),
        (True, lambda look: (f"{look} {look} 0", "1 1 0"), "rank 2 sent no heartbeat for 3 s (distributed.timeout)"),
    ],
)
def test_it_names_the_rank_that_has_failed(waits, pulses, line):
    store = dist.HashStore()
    watching, causes = watch(store), []
    watching.waits = waits
    for look in range(24):
        for rank, pulse in enumerate(pulses(look), 1):
            store.set(f"pulse/{rank}", pulse)
        causes.append(watching._exchange())
    assert causes[:20] == [None] * 20
    assert causes[-1] is None if line is None else causes[-1].startswith(line)


def test_a_store_that_is_silent_counts_from_the_last_answer():
    watching = watch()
    look = watching.silences()
    for answered in range(40):
        watching._answered = answered // 5
        assert look() is None
    lines = [look() for _ in range(22)]
    assert lines[15] is None
    assert lines[-1] == "rank 0 sent no heartbeat for 3 s (distributed.timeout)"


def test_the_first_cause_counts():
    store = dist.HashStore()
    first, second = watch(store), watch(store)
    for guard in (first, second):
        guard.start()
    assert first.say("rank 2: no space left") == second.say("the connection was lost") == "rank 2: no space left"
    assert all(guard.end() for guard in (first, second))


def test_a_rank_without_ticks_ended_without_a_word():
    store = dist.HashStore()
    store.set("pulse/2", "1 1 0")
    watching = watch(store, timeout=1.0)
    watching.start()
    assert watching.find_cause() == "rank 2 of 3 ended without an error message"
    assert watching.end()


def test_a_store_that_fails_ends_the_process(monkeypatch, capsys):
    class Failing(dist.HashStore):
        def set(self, key, value):
            raise RuntimeError

    codes = queue.SimpleQueue()
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr("os._exit", codes.put)
    watching = watch(Failing())
    watching.on_duty = True
    watching.start()
    assert codes.get(timeout=30) == 1
    watching.end()
    assert capsys.readouterr().err.startswith("error: rank 0 ended without an error message\n")


def test_the_end_waits_for_a_call_to_a_slow_store():
    """A thread that returned from the store after the interpreter has ended would abort the process."""
    called, go_on = threading.Event(), threading.Event()

    class Slow(dist.HashStore):
        def set(self, key, value):
            called.set()
            go_on.wait(30)

    watching = watch(Slow())
    watching.start()
    assert called.wait(30)
    assert not watching.end(seconds=0.1)
    threading.Timer(0.5, go_on.set).start()
    assert watching.end()


def test_missing_ranks_are_named():
    store = dist.HashStore()
    store.set("pulse/1", "1 0 0")
    assert wait_for_all(store, 3, 0.1) == [0, 2]
    assert (ranks([1]), ranks([0, 2])) == ("rank 1", "ranks 0, 2")
