from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedsim.engines.crew import Crew
from fedsim.errors import WorkerError


def who(seat):
    return seat.index, seat.count, os.getpid()


def threads(seat):
    return torch.get_num_threads()


def add_to(seat, tensor, value):
    tensor[seat.index] += value


def remember(seat, value=None):
    if value is not None:
        seat.belongings["value"] = value
    return seat.belongings["value"]


def meet(seat):
    seat.barrier.wait()


def misbehave(seat, how, index=0, meet_after=True):
    """Process `index` does something terrible while the others wait for it at the barrier."""
    if seat.index == index:
        with seat.working_on(7, 3):
            if how == "raise":
                raise ZeroDivisionError("divided")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(0)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "sleep":
                time.sleep(3600)
    if meet_after:
        seat.barrier.wait()


def work_for(seat, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        seat.beat()


def unpicklable(seat):
    return lambda: None


def test_every_process_answers_in_order_and_lives_from_call_to_call():
    with Crew(3) as crew:
        first, second = crew.call(who), crew.call(who)
    assert [answer[:2] for answer in first] == [(0, 3), (1, 3), (2, 3)]
    assert first == second
    assert len({answer[2] for answer in first} | {os.getpid()}) == 4


def test_processes_have_the_threads_they_are_given():
    with Crew(1, threads=2) as crew:
        assert crew.call(threads) == [2]


def test_tensors_travel_by_handle():
    tensor = torch.zeros(2).share_memory_()
    with Crew(2) as crew:
        crew.call(add_to, tensor, 3.0)
        crew.call(add_to, tensor, 4.0)
    assert tensor.tolist() == [7, 7]


def test_what_a_call_leaves_is_there_for_the_next():
    with Crew(2) as crew:
        crew.call(remember, 5)
        assert crew.call(remember) == [5, 5]


def test_processes_meet_at_the_barrier():
    with Crew(3) as crew:
        for _ in range(5):
            crew.call(meet)


def fails_within(seconds, crew, *call):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        crew.call(*call)
    assert time.monotonic() - started < seconds
    return str(caught.value)


@pytest.mark.parametrize("meet_after", [True, False], ids=["others wait", "others are done"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "worker 7 in round 3 failed (process 1): ZeroDivisionError: divided\nTraceback"),
        ("kill", "process 1, working on worker 7 in round 3, was killed by SIGKILL (exit code -9)"),
        ("exit", "process 1, working on worker 7 in round 3, ended with exit code 0 before its work was done"),
    ],
)
def test_a_failure_ends_the_call_at_once_and_says_who_and_how(how, message, meet_after):
    with Crew(2) as crew:
        crew.call(who)
        assert message in fails_within(5, crew, misbehave, how, 1, meet_after)


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_process_that_hangs_is_found_out_and_named(how):
    with Crew(2, timeout=1.0) as crew:
        crew.call(who)
        message = fails_within(10, crew, misbehave, how, 1)
    assert "process 1 has given no sign of life for 1 s (worker 7 in round 3)" in message


def test_work_that_shows_signs_of_life_may_take_longer_than_the_timeout():
    with Crew(2, timeout=0.5) as crew:
        crew.call(who)
        crew.call(work_for, 2.0)


def test_a_death_between_calls_is_found_at_the_next():
    with Crew(2) as crew:
        pid = crew.call(who)[1][2]
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert "process 1, working on no worker, was killed by SIGKILL" in fails_within(5, crew, who)


def test_a_result_that_cannot_be_sent_is_an_error_not_a_hang():
    with Crew(1) as crew:
        assert "process 0" in fails_within(5, crew, unpicklable)


def test_close_can_be_called_twice_and_after_a_failure():
    crew = Crew(2)
    crew.call(who)
    crew.close()
    crew.close()
    crew = Crew(1)
    fails_within(60, crew, misbehave, "exit")
    crew.close()


def test_a_crew_that_was_never_asked_goes_too():
    Crew(2).close()


SCRIPT = """
import os, sys, time
from fedsim.engines.crew import Crew
from tests.engines.test_crew import who, work_for
if __name__ == "__main__":
    crew = Crew(2)
    print(*[answer[2] for answer in crew.call(who)], flush=True)
    crew.call(work_for, 60.0)
"""


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_go_when_their_parent_does(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        start_new_session=True,
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(number)
    parent.wait(10)
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    parent.stdout.close()


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from fedsim.engines.crew import Crew\nfrom tests.engines.test_crew import who\nCrew(1).call(who)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 1
    assert 'needs `if __name__ == "__main__":`' in done.stderr
