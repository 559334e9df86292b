from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fedsim.engines.pool.barrier import AbortedError, Barrier, DeadlineError, HeartbeatTable, HeartbeatTimeout
from tests.forking import CONTEXT


def meet(board, index, crossings, cells):
    """After each crossing every cell must show at least this process's own number of crossings."""
    barrier = Barrier(board, index, timeout=30.0)
    for crossing in range(1, crossings + 1):
        cells[index] = crossing
        barrier.wait()
        if min(cells) < crossing:
            os._exit(1)


def test_who_is_alone_waits_for_nobody():
    barrier = Barrier(HeartbeatTable(1), 0, timeout=1.0)
    for _ in range(2000):
        barrier.wait()


@pytest.mark.parametrize("count", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_nobody_passes_before_all_have_come(count):
    board, cells = HeartbeatTable(count), CONTEXT.RawArray("q", count)
    processes = [CONTEXT.Process(target=meet, args=(board, index, 2000, cells)) for index in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_a_peer_that_never_comes_ends_the_wait_at_the_deadline():
    with pytest.raises(DeadlineError, match="process 1 did not arrive"):
        Barrier(HeartbeatTable(2), 0, timeout=0.3).wait()


def test_a_peer_that_works_is_waited_for_past_the_deadline():
    board = HeartbeatTable(2)

    def work():
        for _ in range(10):
            time.sleep(0.1)
            board.heartbeat(1)
        Barrier(board, 1, timeout=1.0).wait()

    thread = threading.Thread(target=work)
    thread.start()
    Barrier(board, 0, timeout=0.5).wait()
    thread.join()


def test_time_in_which_nobody_looked_does_not_count(monkeypatch):
    """A suspended program must not take its own suspension for its peers' silence, however short its timeout."""
    now = [0.0]
    monkeypatch.setattr("fedsim.engines.pool.barrier.time.monotonic", lambda: now[0])
    board = HeartbeatTable(1)
    for timeout, interval in ((1.0, 0.1), (300.0, 1.0), (float("inf"), 1.0)):
        silence = HeartbeatTimeout(board, 0, timeout)
        assert silence.interval == interval
        for _ in range(8):
            now[0] += 3600.0
            assert not silence.too_long()


def test_silence_lasts_from_one_sign_of_life_to_the_next(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fedsim.engines.pool.barrier.time.monotonic", lambda: now[0])
    board = HeartbeatTable(1)
    silence = HeartbeatTimeout(board, 0, 2.0)

    def silent_at(second):
        looks = []
        while now[0] < second:
            now[0] += 0.125
            looks.append(silence.too_long())
        return looks[-1]

    assert not silent_at(2.0)
    board.heartbeat(0)
    assert not silent_at(4.0)
    assert silent_at(4.25)
    board.heartbeat(0)
    assert not silence.too_long()


def test_work_that_is_called_off_stops_at_its_next_sign_of_life():
    board = HeartbeatTable(2)
    board.heartbeat(1)
    board.abort()
    with pytest.raises(AbortedError):
        board.heartbeat(1)


def test_abort_wakes_everybody():
    board = HeartbeatTable(3)
    outcomes = []

    def wait(index):
        try:
            Barrier(board, index, timeout=30.0).wait()
        except AbortedError:
            outcomes.append(index)

    threads = [threading.Thread(target=wait, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    board.abort()
    for thread in threads:
        thread.join(5)
    assert sorted(outcomes) == [0, 1]


def wait_for_ever(board, index):
    Barrier(board, index, timeout=60.0).wait()


def test_a_process_killed_while_it_waits_leaves_nothing_taken():
    """What multiprocessing.Barrier fails at: its peers, and abort() itself, would hang."""
    board = HeartbeatTable(3)
    victim, survivor = (CONTEXT.Process(target=wait_for_ever, args=(board, index)) for index in (0, 1))
    victim.start()
    survivor.start()
    while not all(board.read(index, 0) for index in (0, 1)):
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    board.abort()
    survivor.join(10)
    assert survivor.exitcode == 1  # AbortedError


def test_a_new_process_takes_over_where_its_predecessor_was():
    board = HeartbeatTable(1)
    Barrier(board, 0, timeout=1.0).wait()
    Barrier(board, 0, timeout=1.0).wait()
    assert board.read(0, 0) == 2
