from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fedsim.engines.pool.process_pool import ProcessPool
from fedsim.errors import ExperimentError, ProcessLostError, WorkerError
from fedsim.system.messages import MAX_FILES, Channel
from tests.commands import run_python, start_python
from tests.engines.pool_calls import (
    KillsItsReader,
    OnlyHere,
    add_to,
    add_to_all,
    die_while_sending,
    fail,
    give_by_handle_and_die,
    hang_at_the_barrier,
    leave_a_note_at_the_end,
    meet,
    misbehave,
    refuse,
    remember,
    threads,
    unpicklable,
    who,
    work_for,
    work_on,
)
from tests.leftovers import SHARED


@pytest.fixture(scope="module")
def session():
    """A crew that nothing happens to. (By this name the tests know that its processes are to stay.)"""
    with ProcessPool(3, threads=2) as crew:
        yield crew


@pytest.fixture
def crew(session):
    return session


def test_every_process_answers_in_order_and_lives_from_call_to_call(crew):
    first, second = crew.call(who), crew.call(who)
    assert [answer[:2] for answer in first] == [(0, 3), (1, 3), (2, 3)]
    assert first == second
    assert len({answer[2] for answer in first} | {os.getpid()}) == 4


def test_processes_have_the_threads_they_are_given(crew):
    assert crew.call(threads) == [2, 2, 2]


def test_tensors_travel_by_handle(crew):
    tensor = torch.zeros(3).share_memory_()
    crew.call(add_to, tensor, 3.0)
    crew.call(add_to, tensor, 4.0)
    assert tensor.tolist() == [7, 7, 7]


def test_more_files_than_one_system_call_passes_arrive(crew):
    tensors = [torch.zeros(3).share_memory_() for _ in range(MAX_FILES + 1)]
    crew.call(add_to_all, tensors)
    assert all(tensor.tolist() == [1, 1, 1] for tensor in tensors)


def test_what_a_call_leaves_is_there_for_the_next(crew):
    crew.call(remember, 5)
    assert crew.call(remember) == [5, 5, 5]


def test_processes_meet_at_the_barrier(crew):
    for _ in range(5):
        crew.call(meet)


def fails_within(seconds, crew, *call):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        crew.call(*call)
    assert time.monotonic() - started < seconds
    return str(caught.value)


FAILURES = {
    "raise": "worker 7 in round 3 failed (process 1): ZeroDivisionError: divided\nTraceback",
    "kill": "process 1, working on worker 7 in round 3, was killed by SIGKILL (exit code -9)",
    "exit": "process 1, working on worker 7 in round 3, ended with exit code 0 before its work was done",
}


@pytest.mark.parametrize("how", ["raise", "kill", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_failure_ends_the_call_at_once_and_says_who_and_how(how):
    with ProcessPool(2) as crew:
        crew.call(who)
        assert FAILURES[how] in fails_within(5, crew, misbehave, how, 1)


@pytest.mark.parametrize("how", ["raise", "exit", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_failure_when_others_are_done_does_so_too_and_survivors_let_go_of_what_they_have(how, tmp_path):
    """They are dismissed, not killed: a CUDA allocation that a killed process had open would never be freed."""
    with ProcessPool(2) as crew:
        crew.call(leave_a_note_at_the_end, tmp_path)
        assert FAILURES[how] in fails_within(5, crew, misbehave, how, 1, False)
    assert {path.name for path in tmp_path.iterdir()} == ({"0", "1"} if how == "raise" else {"0"})


@pytest.mark.parametrize("how", ["stop", pytest.param("sleep", marks=pytest.mark.slow)])
def test_a_process_that_hangs_is_found_out_and_named_and_not_one_that_shows_signs_of_life(how, monkeypatch):
    monkeypatch.setattr("fedsim.engines.pool.process_pool.GRACE", 0.5)  # after which it is killed
    with ProcessPool(2, timeout=1.0) as crew:
        crew.call(work_for, 1.6)
        message = fails_within(10, crew, misbehave, how, 1)
    assert "process 1 has given no sign of life for 1 s (worker 7 in round 3)" in message


def test_a_process_that_waits_in_vain_is_not_taken_for_the_one_that_hangs(monkeypatch):
    monkeypatch.setattr("fedsim.engines.pool.process_pool.GRACE", 0.5)
    with ProcessPool(2) as crew:
        crew.call(who)
        message = fails_within(10, crew, hang_at_the_barrier)
    assert message.startswith("process 1 has given no sign of life for 300 s")


def test_a_death_between_calls_is_found_at_the_next_and_no_later_call_is_taken():
    with ProcessPool(1) as crew:
        pid = crew.call(who)[0][2]
        assert crew.at_work
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert "process 0, before the first worker, was killed by SIGKILL" in fails_within(5, crew, who)
        assert not crew.at_work
        assert fails_within(1, crew, who) == "the process pool has been closed"


def test_a_death_between_workers_says_when_the_last_one_was():
    with ProcessPool(1) as crew:
        (answer,) = crew.call(who)
        crew.call(work_on, 5, 3)
        os.kill(answer[2], signal.SIGKILL)
        message = fails_within(5, crew, who)
    assert message == "process 0, between workers, last in round 3, was killed by SIGKILL (exit code -9)"


def test_a_failure_between_workers_blames_no_worker():
    with ProcessPool(1) as crew:
        message = fails_within(60, crew, fail)
    assert message.startswith("process 0, before the first worker, failed: ZeroDivisionError: divided\nTraceback")


def test_a_process_killed_as_it_starts_worked_on_nobody_and_lacks_no_guard():
    with ProcessPool(2) as crew:
        os.kill(crew._children[1].pid, signal.SIGKILL)
        message = fails_within(60, crew, who)
    assert message == "process 1 was killed by SIGKILL (exit code -9), while it started"


def test_a_result_that_cannot_be_sent_is_an_error_not_a_hang():
    with ProcessPool(1) as crew:
        assert "process 0" in fails_within(60, crew, unpicklable)


def test_a_call_that_cannot_be_unpickled_says_why():
    with ProcessPool(1) as crew:
        message = fails_within(60, crew, remember, OnlyHere())
    assert "before the first worker, failed: ModuleNotFoundError: no module named here_only" in message


def test_a_refusal_is_the_same_error_here_as_there():
    with ProcessPool(2) as crew, pytest.raises(ExperimentError) as caught:
        crew.call(refuse)
    assert caught.value.lines == ("f = 9: too many", "n = 3: too few")


def open_things():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), sum(map(maps.count, SHARED))


def test_neither_descriptors_nor_shared_memory_are_kept():
    """Whether it is closed once, twice, or after a failure."""
    counts = []
    for _ in range(3):
        tensor = torch.zeros(2).share_memory_()
        with ProcessPool(1) as crew:
            crew.call(add_to, tensor, 1.0)
            if len(counts) == 2:
                fails_within(5, crew, misbehave, "exit")
            crew.close()
        del tensor
        counts.append(open_things())
    (descriptors, maps), *_, (after_failure, maps_after_failure) = counts
    assert counts[0] == counts[1]
    assert after_failure == descriptors
    assert maps == maps_after_failure


def test_what_a_dead_process_had_not_fetched_is_let_go_of():
    before = open_things()
    with ProcessPool(1) as crew:
        crew.call(who)
        tensors = [torch.zeros(2) for _ in range(5)]
        assert "was killed by SIGKILL" in fails_within(5, crew, add_to, KillsItsReader(), tensors)
        del tensors
    del crew  # its board lies in memory of its own
    descriptors, maps = open_things()
    assert descriptors <= before[0]
    assert maps <= before[1] + 1


def test_an_answer_that_was_sent_counts_even_if_its_process_died_since():
    with ProcessPool(1) as crew:
        crew.call(who)
        ((_, tensor),) = crew.call(give_by_handle_and_die)
        assert tensor.tolist() == [0, 0]
        assert "was killed by SIGKILL (exit code -9)" in fails_within(10, crew, who)


def test_a_process_killed_while_it_sends_its_answer_is_lost():
    with ProcessPool(1) as crew, pytest.raises(ProcessLostError, match=r"was killed by SIGKILL \(exit code -9\)$"):
        crew.call(die_while_sending)


def test_an_error_in_a_connection_to_a_process_that_lives_is_raised_unchanged(monkeypatch):
    def refuse_to_receive(channel):
        raise OSError("too many open files")

    monkeypatch.setattr("fedsim.engines.pool.process_pool.GRACE", 0.1)
    with ProcessPool(1) as crew:
        crew.call(who)
        monkeypatch.setattr(Channel, "receive", refuse_to_receive)
        with pytest.raises(OSError, match="too many open files"):
            crew.call(who)


def test_a_crew_that_was_never_asked_goes_too():
    ProcessPool(1).close()


SCRIPT = """
import os, sys, time
from fedsim.engines.pool.process_pool import ProcessPool
from tests.engines.pool_calls import who, work_for
if __name__ == "__main__":
    with ProcessPool(2) as crew:  # an interrupt may come as soon as the line is out, before the next call has begun
        print(*[answer[2] for answer in crew.call(who)], flush=True)
        crew.call(work_for, 60.0)
"""


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def program(tmp_path):
    """A running program with a crew of two that is at work, and the processes of that crew."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with start_python(str(script), cwd=tmp_path, stderr=subprocess.DEVNULL) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        yield parent, pids
        for pid in (parent.pid, *pids):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def assert_gone(pids):
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    ("number", "stopped"),
    [
        (signal.SIGKILL, True),  # the other one is not
        *(pytest.param(number, True, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGINT)),
        *(pytest.param(number, False, marks=pytest.mark.slow) for number in (signal.SIGKILL, signal.SIGTERM)),
    ],
)
def test_processes_go_when_their_parent_does_even_if_one_is_stopped(program, number, stopped):
    parent, pids = program
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    parent.send_signal(number)
    parent.wait(10)
    assert_gone(pids)


def test_an_impatient_second_ctrl_c_leaves_nothing_behind(program):
    parent, pids = program
    os.kill(pids[0], signal.SIGSTOP)  # so that closing takes its time
    parent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    parent.wait(10)
    assert_gone(pids)


@pytest.mark.parametrize(
    ("from_stdin", "message"),
    [
        (False, "process 0 ended with exit code 1 while it started; a script needs "),
        (True, "processes cannot import a program that comes from <stdin>: it needs to be a file, with "),
    ],
    ids=["file", "stdin"],
)
def test_a_script_without_a_main_guard_is_told_so_once(tmp_path, from_stdin, message):
    script = tmp_path / "script.py"
    script.write_text(
        "from fedsim.engines.pool.process_pool import ProcessPool\n"
        "from tests.engines.pool_calls import who\nProcessPool(1).call(who)\n"
    )
    source = script.read_text() if from_stdin else ""
    done = run_python("-" if from_stdin else str(script), input=source)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"fedsim.errors.WorkerError: {message}")
    assert '`if __name__ == "__main__":` around what it does' in last
    assert last.endswith("or else engine=serial, which starts none")
