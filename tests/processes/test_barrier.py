"""The barrier of pool processes, and the heartbeats by which their parent monitors them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fedsim.processes.process_context import ARRIVALS, AbortedError, Barrier, HeartbeatTable, HeartbeatTimeout
from tests.forking import CONTEXT


def cross(table, index, crossings, cells):
    """Cross the barrier repeatedly and check that all processes have arrived at each crossing."""
    barrier = Barrier(table, index)
    for crossing in range(1, crossings + 1):
        cells[index] = crossing
        barrier.wait()
        if min(cells) < crossing:
            os._exit(2)


@pytest.mark.parametrize("count", [1, 3])
def test_no_process_passes_before_all_have_arrived(count):
    table, cells = HeartbeatTable(count), CONTEXT.RawArray("q", count)
    processes = [CONTEXT.Process(target=cross, args=(table, index, 1000, cells)) for index in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    if count == 1:
        Barrier(table, 0).wait()
        assert table.read(0, ARRIVALS) == 1001, "a second barrier of a process continues the count"


def test_an_abort_ends_waits_and_heartbeats_also_if_a_process_was_killed_as_it_waited():
    """With multiprocessing.Barrier, the other processes and abort() itself would hang."""
    table = HeartbeatTable(3)
    victim, survivor = (CONTEXT.Process(target=cross, args=(table, index, 1, [1] * 3)) for index in (0, 1))
    victim.start()
    survivor.start()
    while not all(table.read(index, ARRIVALS) for index in (0, 1)):
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    table.abort()
    survivor.join(10)
    assert survivor.exitcode == 1  # exited with AbortedError
    with pytest.raises(AbortedError):
        table.heartbeat(2)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedsim.processes.process_context.time.monotonic", lambda: now[0])
    return now


def test_a_suspension_of_the_parent_does_not_count_as_silence(clock):
    for timeout, interval in ((1.0, 0.1), (300.0, 1.0), (float("inf"), 1.0)):
        silence = HeartbeatTimeout(HeartbeatTable(1), 0, timeout)
        assert silence.interval == interval
        for _ in range(8):
            clock[0] += 3600.0
            assert not silence.too_long()


def test_a_heartbeat_ends_the_silence(clock):
    table = HeartbeatTable(1)
    silence = HeartbeatTimeout(table, 0, 2.0)

    def silent_at(second):
        looks = []
        while clock[0] < second:
            clock[0] += 0.125
            looks.append(silence.too_long())
        return looks[-1]

    assert not silent_at(2.0)
    table.heartbeat(0)
    assert not silent_at(4.0)
    assert silent_at(4.25)
    table.heartbeat(0)
    assert not silence.too_long()
