from __future__ import annotations

import contextlib
import gc
import os
import pickletools
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.engines import base
from fedsim.errors import ExperimentError, ProcessLostError, WorkerError
from fedsim.processes import process_pool
from fedsim.processes.child_process import start_process
from fedsim.processes.messages import MAX_FILES, Channel, Message
from fedsim.processes.process_pool import ProcessPool
from tests.commands import assert_none_left, ended, run_python, start
from tests.device.pretend import GPU, pretend_gpu
from tests.engines.in_process import InProcessPool
from tests.leftovers import SHARED
from tests.processes.pool_calls import (
    KillsItsReader,
    OnlyHere,
    add_to,
    add_to_all,
    die_while_sending,
    give_by_handle_and_die,
    leave_a_note_at_the_end,
    meet,
    misbehave,
    never_report,
    refuse,
    remember,
    threads,
    unpicklable,
    who,
    work_for,
    work_on,
)


@pytest.fixture(scope="module")
def session():
    """Yield a pool without failures. (The name `session` exempts its processes from the check for leftovers.)"""
    with ProcessPool(3, threads=2) as pool:
        yield pool


@pytest.fixture
def pool(session):
    return session


def test_every_process_answers_in_order_and_keeps_its_state_threads_and_barrier(pool):
    first, second = pool.call(who), pool.call(who)
    assert [answer[:2] for answer in first] == [(0, 3), (1, 3), (2, 3)]
    assert first == second
    assert len({answer[2] for answer in first} | {os.getpid()}) == 4
    assert pool.call(threads) == [2, 2, 2]
    pool.call(remember, 5)
    assert pool.call(remember) == [5, 5, 5]
    for _ in range(5):
        pool.call(meet)


def test_tensors_are_passed_by_handle_also_if_one_system_call_cannot_pass_all_files(pool):
    tensors = [torch.zeros(3).share_memory_() for _ in range(MAX_FILES + 1)]
    for _ in range(2):
        pool.call(add_to_all, tensors)
    assert all(tensor.tolist() == [2, 2, 2] for tensor in tensors)


def failure_of(pool, *call):
    with pytest.raises(WorkerError) as caught:
        pool.call(*call)
    return str(caught.value)


FAILURES = {
    "raise": "worker 7 in round 3 failed (process 1): ZeroDivisionError: divided\nTraceback",
    "kill": "process 1, working on worker 7 in round 3, was killed by SIGKILL (exit code -9)",
    "exit": "process 1, working on worker 7 in round 3, ended with exit code 0 before its work was done",
}


@pytest.mark.parametrize(
    ("how", "others_wait"),
    [
        ("raise", True),
        ("kill", True),
        ("raise", False),
        ("exit", False),
        pytest.param("exit", True, marks=pytest.mark.slow),
    ],
)
def test_a_failure_ends_the_call_and_names_worker_and_cause(how, others_wait, tmp_path):
    """The survivors release their state: CUDA memory that a killed process had open is never freed."""
    with ProcessPool(2) as pool:
        pool.call(leave_a_note_at_the_end, tmp_path)
        assert FAILURES[how] in failure_of(pool, misbehave, how, 1, others_wait)
    if not others_wait:
        assert {path.name for path in tmp_path.iterdir()} == ({"0", "1"} if how == "raise" else {"0"})


@pytest.mark.parametrize("how", ["stop", pytest.param("sleep", marks=pytest.mark.slow)])
def test_a_process_without_heartbeats_is_named_and_not_one_that_sends_them_or_waits(how):
    with ProcessPool(2, timeout=1.0) as pool:
        pool.call(work_for, 1.6)
        message = failure_of(pool, misbehave, how, 1)
    assert "process 1 has sent no heartbeat for 1 s (worker 7 in round 3)" in message


def test_a_death_between_calls_is_found_at_the_next_which_is_the_last():
    with ProcessPool(1) as pool:
        pool.call(work_on, 5, 3)
        os.kill(pool.call(who)[0][2], signal.SIGKILL)
        cause = "was killed by SIGKILL (exit code -9)"
        assert failure_of(pool, who) == f"process 0, between workers, last in round 3, {cause}"
        assert not pool.at_work
        assert failure_of(pool, who) == "the process pool has been closed; create a new one"


def test_a_process_killed_as_it_starts_is_named_without_a_worker(monkeypatch):
    def start(serve, index, *arguments, **options):
        return start_process(never_report if index == 1 else serve, index, *arguments, **options)

    monkeypatch.setattr(process_pool, "start_process", start)  # a process that is ready within 10 ms could report first
    with ProcessPool(2) as pool:
        os.kill(pool._children[1].process.pid, signal.SIGKILL)
        assert failure_of(pool, who) == "process 1 was killed by SIGKILL (exit code -9), while it started"


def test_a_process_that_is_stopped_while_it_starts_does_not_block_a_call_larger_than_its_pipe():
    with ProcessPool(1) as pool:
        os.kill(pool._children[0].process.pid, signal.SIGSTOP)
        pool.begin(remember, bytes(2**24))
        assert pool.poll([]) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((unpicklable,), "process 0, before the first worker, failed: TypeError: cannot pickle"),
        ((remember, OnlyHere()), "process 0, before the first worker, failed: ModuleNotFoundError: no module named"),
    ],
)
def test_a_call_that_fails_between_workers_names_no_worker(call, message):
    with ProcessPool(1) as pool:
        assert failure_of(pool, *call).startswith(message)


def test_an_experiment_error_is_the_same_here_as_in_the_process():
    with ProcessPool(2) as pool, pytest.raises(ExperimentError) as caught:
        pool.call(refuse)
    assert caught.value.lines == ("f = 9: too many", "n = 3: too few")


def open_things():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), sum(map(maps.count, SHARED))


def test_a_closed_pool_keeps_no_descriptors_and_no_shared_memory():
    """The pool is closed once, twice, or after a failure."""
    counts = []
    for how in ("close", "close", "exit"):
        tensor = torch.zeros(2).share_memory_()
        with ProcessPool(1) as pool:
            pool.call(add_to, tensor, 1.0)
            if how == "exit":
                failure_of(pool, misbehave, how)
            pool.close()
        del tensor
        counts.append(open_things())
    assert counts[0] == counts[1] == counts[2]


def test_files_that_a_dead_process_had_not_received_are_closed():
    before = open_things()
    with ProcessPool(1) as pool:
        pool.call(who)
        tensors = [torch.zeros(2) for _ in range(5)]
        assert "was killed by SIGKILL" in failure_of(pool, add_to, KillsItsReader(), tensors)
        del tensors
    del pool  # its heartbeat table is in shared memory
    descriptors, maps = open_things()
    assert descriptors <= before[0]
    assert maps <= before[1] + 1


def test_an_answer_counts_if_its_process_dies_after_sending_it():
    with ProcessPool(1) as pool:
        pool.call(who)
        ((_, tensor),) = pool.call(give_by_handle_and_die)
        assert tensor.tolist() == [0, 0]
        assert "was killed by SIGKILL (exit code -9)" in failure_of(pool, who)


def test_a_process_killed_while_it_sends_its_answer_is_lost():
    with ProcessPool(1) as pool, pytest.raises(ProcessLostError, match=r"was killed by SIGKILL \(exit code -9\)$"):
        pool.call(die_while_sending)


def test_an_error_in_a_connection_to_a_process_that_lives_is_raised_unchanged(monkeypatch):
    def refuse_to_receive(channel):
        raise OSError("too many open files")

    monkeypatch.setattr("fedsim.processes.process_pool.GRACE", 0.1)
    with ProcessPool(1) as pool:
        pool.call(who)
        monkeypatch.setattr(Channel, "receive", refuse_to_receive)
        with pytest.raises(OSError, match="too many open files"):
            pool.call(who)


def test_processes_prepare_before_their_first_call_and_nobody_waits_for_results_or_errors():
    with ProcessPool(2, timeout=20) as pool:
        pool.prepare(remember, 5)
        pool.prepare(remember, 5, "too many arguments")
        pool.prepare(unpicklable)
        assert pool.call(remember) == [5, 5]
        pool.prepare(remember, 6)
        assert pool.call(remember) == [6, 6]
        os.kill(pool._children[1].process.pid, signal.SIGKILL)
        pool._children[1].process.join()
        pool.prepare(remember, 7)
        assert "was killed by SIGKILL" in failure_of(pool, remember)


@pytest.mark.parametrize("how", ["closed", "killed", "interrupted"])
def test_memory_of_sent_tensors_is_kept_until_its_receiver_has_ended(how, monkeypatch):
    ended = []

    def forget(channel):
        stat = Path(f"/proc/{pids[channel]}/stat")
        ended.append(not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")

    def interrupt(pools):
        raise KeyboardInterrupt

    with ProcessPool(2) as pool:
        pids = {child.pipe: child.process.pid for child in pool._children}
        pool.call(meet)
        monkeypatch.setattr(Channel, "forget", forget)
        if how == "killed":
            with pytest.raises(ProcessLostError):
                pool.call(misbehave, "kill")
        if how == "interrupted":
            monkeypatch.setattr("fedsim.processes.process_pool.wait_for", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.call(work_for, 60.0)
    assert ended == [True, True]


def test_a_process_prepares_by_initialising_the_gpu_of_the_task(monkeypatch):
    used = []
    with pretend_gpu() as gpu:
        monkeypatch.setattr(torch.cuda, "set_device", used.append)
        base._initialise(None, GPU)
        assert gpu.launches
    assert used == [GPU]


FOREIGN = "typer", "matplotlib", "torchvision", "pandas", "torch._dynamo", "fedsim.cli", "fedsim.report", "fedsim.runs"


def test_a_process_prepares_by_importing_all_that_a_task_needs_and_nothing_of_the_command_line(
    tiny_experiment, monkeypatch
):
    """In a new interpreter, because the tests fork processes that have imported everything."""
    needed, call = set(), InProcessPool.call

    def noted(self, function, *arguments):
        if function is base._make_executor:
            opcodes = pickletools.genops(Message((function, arguments)).data)
            needed.update(text for _, text, _ in opcodes if isinstance(text, str) and text.startswith("fedsim."))
        return call(self, function, *arguments)

    monkeypatch.setattr(InProcessPool, "call", noted)
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    prepared = []
    monkeypatch.setattr(InProcessPool, "prepare", lambda self, *work: prepared.append(Message(work).data))
    fedsim.run({**tiny_experiment, "engine": "processes", "processes": 2})
    call = f"_, (f, *a) = pickle.loads({prepared[0]!r}); f(None, *a)"
    program = f"import fedsim.processes.process_pool, pickle, sys; {call}"
    imported = set(run_python("-c", f"{program}; print(*sys.modules)").stdout.split())
    assert needed
    assert needed <= imported
    assert not imported & set(FOREIGN)


SCRIPT = """
import os, sys, time
import fedsim
from fedsim.processes.process_pool import ProcessPool
from tests.processes.pool_calls import who, work_for
if __name__ == "__main__":
    with ProcessPool(2) as pool:  # an interrupt may come as soon as the line is out, before the next call has begun
        print(*[answer[2] for answer in pool.call(who)], flush=True)
        pool.call(work_for, 60.0)
"""


@pytest.mark.parametrize(
    ("signals", "stopped"),
    [
        ([signal.SIGKILL], True),  # the other process is not stopped
        # the second interrupt comes while the pool is being closed
        pytest.param([signal.SIGINT, signal.SIGINT], True, marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM], True, marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM], False, marks=pytest.mark.slow),
    ],
)
def test_processes_end_with_their_parent_even_if_one_is_stopped(signals, stopped, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    parent = start("script.py", cwd=tmp_path, stderr=subprocess.DEVNULL)
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        for number in signals:
            parent.send_signal(number)
            time.sleep(0.3)
        parent.wait(10)
        try:
            assert_none_left(parent.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("from_stdin", "message"),
    [
        pytest.param(False, "process 0 ended with exit code 1 while it started; put the code ", id="file"),
        pytest.param(
            *(True, "processes cannot import a program from <stdin>; write the program to a file, with "),
            id="stdin",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_without_a_main_guard_works_if_processes_are_forked_and_else_gets_one_error(
    tmp_path, from_stdin, message
):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom fedsim.processes.process_pool import ProcessPool\n"
        "from tests.processes.pool_calls import who\nprint(ProcessPool(1, start_method=sys.argv[1]).call(who))\n"
    )
    source = script.read_text() if from_stdin else ""
    if from_stdin:
        assert run_python("-", "fork", input=source).stdout.startswith("[(0, 1, ")
    else:
        (code,), (out,), _ = ended([start(script, "fork", cwd=tmp_path)])
        assert (code, out[:8]) == (0, "[(0, 1, ")
    done = run_python("-" if from_stdin else str(script), "spawn", input=source)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"fedsim.errors.WorkerError: {message}")
    assert 'under `if __name__ == "__main__":`' in last
    assert last.endswith("or use engine=serial, which starts no processes")
