from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fedsim.engines.pool.barrier import ARRIVALS, AbortedError, Barrier, DeadlineError, HeartbeatTable, HeartbeatTimeout
from tests.forking import CONTEXT


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedsim.engines.pool.barrier.time.monotonic", lambda: now[0])
    return now


def cross(table, index, crossings, cells):
    """After each crossing every cell must show at least this process's own number of crossings."""
    barrier = Barrier(table, index, timeout=30.0)
    for crossing in range(1, crossings + 1):
        cells[index] = crossing
        barrier.wait()
        if min(cells) < crossing:
            os._exit(1)


@pytest.mark.parametrize("count", [1, 3])
def test_no_process_passes_before_all_have_arrived(count):
    table, cells = HeartbeatTable(count), CONTEXT.RawArray("q", count)
    processes = [CONTEXT.Process(target=cross, args=(table, index, 1000, cells)) for index in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_a_missing_peer_ends_the_wait_at_the_deadline():
    with pytest.raises(DeadlineError, match="process 1 did not arrive"):
        Barrier(HeartbeatTable(2), 0, timeout=0.3).wait()


def test_the_deadline_does_not_end_the_wait_for_a_peer_with_heartbeats():
    table = HeartbeatTable(2)

    def work():
        for _ in range(10):
            time.sleep(0.1)
            table.heartbeat(1)
        Barrier(table, 1, timeout=1.0).wait()

    thread = threading.Thread(target=work)
    thread.start()
    Barrier(table, 0, timeout=0.5).wait()
    thread.join()


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


def test_an_abort_ends_waits_and_heartbeats():
    table, aborted = HeartbeatTable(3), []

    def wait(index):
        try:
            Barrier(table, index, timeout=30.0).wait()
        except AbortedError:
            aborted.append(index)

    threads = [threading.Thread(target=wait, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    while not all(table.read(index, ARRIVALS) for index in (0, 1)):
        time.sleep(0.01)
    table.abort()
    for thread in threads:
        thread.join(5)
    assert sorted(aborted) == [0, 1]
    with pytest.raises(AbortedError):
        table.heartbeat(2)


def wait_long(table, index):
    Barrier(table, index, timeout=60.0).wait()


def test_a_process_killed_while_it_waits_does_not_block_the_others():
    """With multiprocessing.Barrier its peers, and abort() itself, would hang."""
    table = HeartbeatTable(3)
    victim, survivor = (CONTEXT.Process(target=wait_long, args=(table, index)) for index in (0, 1))
    victim.start()
    survivor.start()
    while not all(table.read(index, ARRIVALS) for index in (0, 1)):
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    table.abort()
    survivor.join(10)
    assert survivor.exitcode == 1  # AbortedError


def test_a_second_barrier_of_a_process_continues_its_count():
    table = HeartbeatTable(1)
    Barrier(table, 0, timeout=1.0).wait()
    Barrier(table, 0, timeout=1.0).wait()
    assert table.read(0, ARRIVALS) == 2
