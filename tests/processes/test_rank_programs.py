"""Programs of ranks: what they print, and how they end if a rank fails, stops, differs or is missing."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import uuid

import pytest

import fedsim
from fedsim.records.history import METRICS
from fedsim.records.run_folder import MODEL
from tests.commands import ROOT, ended, free_port, read_until, start, start_ranks, start_tasks, start_torchrun
from tests.processes.test_rendezvous import impostor, ping


def ranks_of(count, *words, cwd, words_by_rank=None):
    return start_ranks(count, ROOT / "run_experiment.py", *words, cwd=cwd, words_by_rank=words_by_rank)


def accuracies(folder):
    return [json.loads(line)["test_accuracy"] for line in (folder / METRICS).read_text().splitlines()]


def error_lines(text):
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_hook_that_makes_the_mean_infinite_is_named(tmp_path):
    words = ["engine=distributed", "data=tests.components:tiny", "model=tests.models:Steep", "sync=gradients"]
    words += ["distributed.hook=fp16", "rounds=1", "local.batch_size=16"]
    codes, _, errors = ended(ranks_of(1, *words, cwd=tmp_path))
    assert codes == [2]
    assert error_lines(errors[0]) == [
        'error: round 1: distributed.hook = "fp16": the mean gradient contains NaN or infinity, '
        "although the workers' gradients do not"
    ]


@pytest.mark.parametrize("launch", [start_ranks, start_tasks, pytest.param(start_torchrun, marks=pytest.mark.slow)])
def test_the_command_runs_on_two_ranks_and_prints_once(launch, tmp_path):
    experiment = ROOT / "experiments" / "mnist_sync_sgd.toml"
    changes = ["data.name=tests.components:tiny", "rounds=2", "local.batch_size=16", "name=ranked"]
    words = [str(ROOT / "run_experiment.py"), str(experiment), *changes, "--out", "ranked"]
    codes, outs, errors = ended(launch(2, *words, cwd=tmp_path), 120)
    assert not any(codes), errors
    lines = "".join(outs).splitlines()
    assert [line.split()[0] for line in lines] == ["ranked:", lines[1].split()[0], "round", "1", "2", "final", "ranked"]
    assert lines[0].endswith("; distributed"), "the engine auto says what it is under a launcher"
    assert "distributed, 2 processes on cpu" in lines[1]
    metadata = json.loads((tmp_path / "ranked" / "environment.json").read_text())
    assert (metadata["ranks"], metadata["backend"], len(metadata["hosts"])) == (2, "gloo", 1)
    alone = fedsim.run(fedsim.load_experiment(experiment, [*changes, "engine=serial"]), out=tmp_path / "alone")
    assert accuracies(tmp_path / "ranked") == [record["test_accuracy"] for record in alone.history]
    assert (tmp_path / "ranked" / MODEL).stat().st_size == (tmp_path / "alone" / MODEL).stat().st_size


FAILING = (
    *("engine=distributed", "data=tests.components:tiny", "rounds=4", "workers=4", "local.batch_size=16"),
    # two workers with 4 steps each: in round 2
    *("model=tests.models:FailsInRank", "model.after=7", "distributed.timeout=5"),
)


IN_BACKWARD = ("sync=gradients", "model=tests.models:FailsInBackward")
LINES = {
    "kill": "error: rank 1 of 3 ended without an error message",
    "raise": "error: worker 1 in round 2 failed (rank 1): ZeroDivisionError: this model divides by zero",
    "hang": "error: rank 1 of 3 sent nothing for 5 s; if a step takes longer, increase distributed.timeout",
}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param("kill", (), marks=pytest.mark.slow),  # tested below with two ranks
        ("raise", ()),
        pytest.param("hang", (), marks=pytest.mark.slow),
        ("kill", IN_BACKWARD),
        pytest.param("raise", IN_BACKWARD, marks=pytest.mark.slow),
        pytest.param("hang", IN_BACKWARD, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_in_round_2_ends_the_others_with_one_line_each(how, words, tmp_path):
    line = LINES[how]
    processes = ranks_of(3, *FAILING, f"model.how={how}", *words, "--out", "run", cwd=tmp_path)
    if how == "hang":  # a launcher would end this rank
        for other in processes[::2]:
            other.wait(60)
        processes[1].kill()
    codes, _, errors = ended(processes)
    assert codes == [1, 1 if how == "raise" else -signal.SIGKILL, 1]
    assert [error_lines(text) for text in errors] == [[line], [line] if how == "raise" else [], [line]]
    assert len((tmp_path / "run" / METRICS).read_text().splitlines()) == 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_for_good_ends_the_other_within_the_timeout(rank, tmp_path):
    """Rank 0 keeps the store in which ranks note why they end."""
    words = "engine=distributed", "data=tests.components:tiny", "rounds=100000", "workers=4", "distributed.timeout=3"
    processes = ranks_of(2, *words, "--out", "run", cwd=tmp_path)
    read_until(processes[0], "    3")
    processes[rank].send_signal(signal.SIGSTOP)
    _, errors = processes[1 - rank].communicate(timeout=30)
    processes[rank].kill()
    processes[rank].communicate()
    assert errors == (
        "error: rank 1 of 2 sent nothing for 3 s; if a step takes longer, increase distributed.timeout\n"
        if rank
        else "error: no answer from rank 0 of 2 or the launcher, which hosts the ranks' store\n"
    )
    assert processes[1 - rank].returncode == 1


@pytest.mark.parametrize(
    ("words", "words_by_rank", "lines"),
    [
        (
            *(["engine=auto"], {1: ["seed=1"]}),
            [
                "the ranks differ in the experiment: seed = 0 on rank 0 and 1 on rank 1; for separate runs, name "
                "another engine, such as engine=serial"
            ],
        ),
        pytest.param(
            *(["data=tests.components:tiny_on_rank"], {}, ["the ranks differ in the data: training inputs = "]),
            marks=pytest.mark.slow,
        ),
        pytest.param(["data=tests.components:absent_on_rank"], {}, ["rank 1: ", ""], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_differ_say_so_and_stop(words, words_by_rank, lines, tmp_path):
    words = ["engine=distributed", "data=tests.components:tiny", "model=logistic", "rounds=1", *words]
    codes, outs, errors = ended(ranks_of(2, *words, cwd=tmp_path, words_by_rank=words_by_rank))
    assert codes == [2, 2]
    assert [out.count("\n") for out in outs] == [1, 0], "only rank 0 prints, one line about the run"
    for text, expected in zip(errors, lines * (2 // len(lines)), strict=True):
        [line] = error_lines(text)
        assert line.startswith(f"error: {expected}")
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_a_folder_that_is_taken_stops_all_ranks(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    words = ["engine=distributed", "data=tests.components:tiny", "--out", "taken"]
    codes, _, errors = ended(ranks_of(2, *words, cwd=tmp_path))
    assert codes == [2, 2]
    assert "error: taken: is not empty and has no experiment.toml" in errors[0]
    assert "error: rank 0: taken: is not empty and has no experiment.toml" in errors[1]


LEAVING = """
import atexit, gc, os, pathlib, threading

def report():
    import torch.distributed as dist
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    print(dist.is_initialized(), threads, [name for name in names if "gloo" in name or "tcpstore" in name])

atexit.register(report)  # before fedsim's own, and so called after it
import fedsim

def fail(record):
    assert os.environ["RANK"] == "0", "on purpose"

tables = {"engine": "distributed", "data": "tests.components:tiny", "model": "logistic", "rounds": 1, "workers": 2}
with fedsim.Session() as session:
    for seed in range(2):
        fedsim.run(tables, seed=seed, session=session)
try:
    fedsim.run(tables, on_round=fail)
except (AssertionError, fedsim.WorkerError):
    pass
gc.collect()
"""


def test_a_rank_leaves_the_group_and_ends_its_threads_before_the_program_ends(tmp_path):
    """A thread that returned from C++ after the interpreter has ended would abort the process."""
    codes, outs, errors = ended(start_ranks(2, "-c", LEAVING, cwd=tmp_path))
    assert (codes, errors) == ([0, 0], ["", ""])
    assert outs == ["False [] []\n"] * 2


def test_joining_ends_in_time_or_by_a_signal(tmp_path):
    """Impostors listen at rank 0's port and greet like it, after which PyTorch's client would wait without a timeout.

    In the last case the other ranks are missing.
    """
    contacts, words = (
        queue.SimpleQueue(),
        (ROOT / "run_experiment.py", "engine=distributed", "data=tests.components:tiny"),
    )
    ports = [impostor(ping, contacts) for _ in range(3)]
    processes = [
        start(*words, f"distributed.timeout={timeout}", cwd=tmp_path, RANK="1", WORLD_SIZE="2", MASTER_PORT=port)
        for timeout, port in zip((60, 60, 1), ports, strict=True)
    ]
    lonely = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": free_port()}
    processes.append(start(*words, "distributed.timeout=1", cwd=tmp_path, **lonely))
    for _ in range(2 * len(ports)):
        contacts.get(timeout=60)
    processes[0].send_signal(signal.SIGINT)
    processes[1].send_signal(signal.SIGTERM)
    codes, _, errors = ended(processes)
    assert codes == [128 + signal.SIGINT, 128 + signal.SIGTERM, 1, 1]
    assert errors[:2] == ["interrupted\n", "terminated\n"]
    place = f"127.0.0.1:{ports[2]} within 1 s"
    assert errors[2].startswith(f"error: rank 1 of 2: did not join the other ranks at {place}")
    assert errors[2].count("\n") == 1
    assert error_lines(errors[3]) == ["error: ranks 1, 2 of 3 did not join within 1 s"]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def two_machines():
    """Yield two network namespaces joined by a virtual link. The address of the first one is 10.213.77.1."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program `ip`")
    mark = uuid.uuid4().hex[:6]
    names, ends = [f"fedsim-{mark}-{side}" for side in "ab"], [f"fs{mark}{side}" for side in "ab"]
    link = ("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
    try:
        for made in (*(ip("netns", "add", name) for name in names), ip(*link)):
            if made.returncode:
                pytest.skip(f"this system cannot connect network namespaces: {made.stderr.strip()}")
        for side, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            assert ip("-n", name, "address", "add", f"10.213.77.{side}/24", "dev", end).returncode == 0
            assert all(ip("-n", name, "link", "set", device, "up").returncode == 0 for device in ("lo", end))
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.slow
def test_two_machines_run_the_two_machine_form_of_torchrun(two_machines, tmp_path):
    words = ["data=tests.components:tiny", "rounds=2", "local.batch_size=16", "aggregate.rule=median"]
    options = ["-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-endpoint", "10.213.77.1:29511"]
    processes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, *options, "--node-rank", str(rank)),
                *(ROOT / "run_experiment.py", *words, "engine=distributed", "--out", f"run{rank}"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True},
        )
        for rank, name in enumerate(two_machines)
    ]
    codes, outs, errors = ended(processes, 120)
    assert codes == [0, 0], errors
    assert sorted(map(bool, outs)) == [False, True]  # only the machine with rank 0 prints
    [folder] = tmp_path.glob("run*")
    (tmp_path / "tiny.toml").touch()
    alone = fedsim.run(fedsim.load_experiment(tmp_path / "tiny.toml", [*words, "engine=serial"]))
    assert accuracies(folder) == [record["test_accuracy"] for record in alone.history]
