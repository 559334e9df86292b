"""A run whose processes are killed or stopped replaces them, repeats the round and reaches the same result."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings

import pytest
import torch

import fedsim
from fedsim.engines import auto, base
from fedsim.errors import FedsimWarning, WorkerError
from fedsim.processes import process_pool
from fedsim.processes.child_process import start_process
from fedsim.processes.process_pool import ProcessPool
from tests.commands import ROOT, assert_none_left, start
from tests.lethal import die_second, order
from tests.processes.pool_calls import never_report

TABLES = {
    **{"rounds": 4, "workers": 4, "data": "tests.components:tiny", "records": {"curve": False}},
    "local": {"batch_size": 16, "lr": 0.05, "momentum": 0.5},
}
SPAWN = {"engine": "processes", "processes": 2}


@pytest.fixture
def mortal(tmp_path):
    """Return an experiment whose model kills its process when ordered."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return {**TABLES, "model": {"name": "tests.lethal:Mortal", "folder": str(folder)}}


def folder_of(tables):
    return tables["model"]["folder"]


def untimed(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def run_ordered(tables, orders, out=None, session=None):
    """Run an experiment with orders by round, and return its result and its warnings."""
    folder = folder_of(tables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fedsim.run(
            tables,
            out,
            session=session,
            on_start=lambda metadata: order(folder, *orders.get(1, ())),
            on_round=lambda record: order(folder, *orders.get(record["round"] + 1, ())),
        )
    assert {warning.category for warning in caught} <= {FedsimWarning}
    return result, [str(warning.message) for warning in caught]


def assert_as_without_faults(result, tables, session=None, **changes):
    whole = fedsim.run({**tables, **changes}, session=session)
    assert torch.equal(result.global_row, whole.global_row)
    assert untimed(result.history) == untimed(whole.history)


def events(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def test_processes_killed_in_training_and_aggregation_do_not_change_the_result(mortal, tmp_path, session):
    server = {"name": "tests.lethal:MortalAdam", "folder": folder_of(mortal)}
    tables = {**mortal, **SPAWN, "server": server, "mode": "clock", "clock": {"slowdown": "lognormal"}}
    out = tmp_path / "out"
    orders = {1: ["train"], 3: ["aggregate"]}
    result, said = run_ordered(tables, orders, out, session)
    assert_as_without_faults(result, tables, engine="serial", processes=None)
    told = events(out)
    assert [(each["event"], each["round"], each["attempt"]) for each in told] == [
        ("worker replaced", round, 1) for round in orders
    ]
    assert {each["why"] for each in told} == {"was killed by SIGKILL (exit code -9)"}
    assert told[0]["worker"] in range(4)
    assert told[1]["worker"] is None
    assert {each["process"] for each in told} <= {0, 1}
    assert re.fullmatch(
        r"process \d, working on worker \d in round 1, was killed by SIGKILL \(exit code -9\); a new process "
        r"takes over, and round 1 is repeated \(restart 1, max_restarts = 2\)",
        said[0],
    )
    assert len(said) == 2
    assert [len(record["cohort"]) for record in result.history] == [4] * 4
    assert [record["dropped"] for record in result.history] == [[]] * 4


CHOICE = {"workers": 8, "cohort": 3, "sampling": {"name": "power_of_choice", "candidates": 6}}
ON_CLOCK = {"mode": "clock", "clock": {"slowdown": "lognormal"}, "rounds": 3}


@pytest.mark.parametrize(
    ("changes", "orders"),
    [
        (CHOICE, {1: ["train"], 3: ["test"]}),  # the second process dies while it computes the candidates' losses
        ({**ON_CLOCK, "policy": "fedbuff"}, {2: ["train"]}),
        pytest.param({**ON_CLOCK, "policy": "asgd"}, {2: ["train"]}, marks=pytest.mark.slow),
    ],
    ids=["cohorts by losses", "fedbuff", "asgd"],
)
def test_a_repeated_round_starts_from_the_same_state(changes, orders, mortal, session):
    tables = {**mortal, **SPAWN, **changes}
    result, said = run_ordered(tables, orders, session=session)
    assert_as_without_faults(result, tables, engine="serial", processes=None)
    assert len(said) == len(orders)
    assert "cohort" not in changes or len({tuple(record.cohort) for record in result.history}) > 1


def test_a_race_repeats_its_round_after_a_process_died_with_the_lock(mortal, session):
    policy = {"name": "tests.lethal:MortalLocked", "folder": folder_of(mortal)}
    tables = {**mortal, **SPAWN, "mode": "race", "policy": policy, "rounds": 3, "race": {"runs": 2}}
    result, said = run_ordered(tables, {2: ["take"]}, session=session)
    assert "was killed by SIGKILL (exit code -9) while it held a lock" in said[0]
    assert len(said) == 1
    updates = [record["asynchronous"]["updates"] for record in result.history]
    assert updates == [updates[0], 2 * updates[0], 3 * updates[0]], "no round is missing or recorded twice"
    half_written = result.global_row[: len(result.global_row) // 2]
    assert abs(float(half_written.mean())) < 0.1, "the value 1 from the interrupted update has been undone"


@pytest.mark.slow
def test_a_stopped_process_is_replaced_after_the_timeout(mortal, monkeypatch):
    """With stacks, each of the two processes has one stack."""
    monkeypatch.setattr("fedsim.processes.process_pool.GRACE", 0.5)  # seconds before a stopped process is killed
    tables = {**mortal, "engine": "batched", "processes": 2, "process_timeout": 3.0, "rounds": 2}
    with fedsim.Session() as session:
        result, said = run_ordered(tables, {2: ["train-stop"]}, session=session)
        assert_as_without_faults(result, tables, session)
    assert re.match(r"process \d has sent no heartbeat for 3 s \(a stack of workers in round 2\); if a step", said[0])
    assert len(said) == 1


@pytest.mark.slow
def test_auto_replaces_the_processes_of_the_engine_that_it_chose(mortal, monkeypatch):
    monkeypatch.setattr(auto, "STEP_SECONDS", 10.0)  # so slow that several processes pay off
    tables = {**mortal, "engine": "auto", "processes": 2}
    result, said = run_ordered(tables, {3: ["train"]})
    assert_as_without_faults(result, tables, engine="serial", processes=None)
    assert len(said) == 1


def test_an_interrupt_during_recovery_ends_the_program_cleanly(mortal, tmp_path):
    order(folder_of(mortal), "train")
    words = [
        "engine=processes",
        "processes=2",
        "data=tests.components:tiny",
        "model.name=tests.lethal:Mortal",
        "rounds=100000",
    ]
    process = start(
        str(ROOT / "run_experiment.py"), *words, f"model.folder={folder_of(mortal)}", "--out", "x", cwd=tmp_path
    )
    line = process.stderr.readline()
    assert line.startswith("warning: process")
    assert line.endswith("round 1 is repeated (restart 1, max_restarts = 2)\n")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "interrupted\n")
    assert_none_left(process.pid)


@pytest.mark.parametrize("retries", [2, 0])
def test_a_process_that_is_killed_while_it_starts(retries, tmp_path, monkeypatch):
    """The second process of the first pool is killed before it can report that it has started."""
    started = []

    def start_in_vain(serve, *arguments, **options):
        started.append(start_process(never_report if len(started) == 1 else serve, *arguments, **options))
        if len(started) == 2:
            started[1].process.kill()
        return started[-1]

    monkeypatch.setattr(process_pool, "start_process", start_in_vain)
    tables = {**TABLES, **SPAWN, "rounds": 2, "model": "logistic", "max_restarts": retries}
    line = r"process 1 was killed by SIGKILL \(exit code -9\), while it started"
    if not retries:
        with pytest.raises(WorkerError, match=f"^{line}$"):
            fedsim.run(tables)
        return
    with pytest.warns(FedsimWarning, match=rf"^{line}; a new process takes over \(restart 1, max_restarts = 2\)$"):
        result = fedsim.run(tables, tmp_path / "run")
    changes = {"engine": "serial", "processes": None}
    assert_as_without_faults(result, tables, **changes)
    (event,) = events(tmp_path / "run")
    assert (event["event"], event["round"], event["process"]) == ("worker replaced", 0, 1)


EVERY_CALL = {
    "race without locks": {"mode": "race", "policy": "hogwild", "race": {"runs": 1}},
    "race with locks": {"mode": "race", "policy": "locked", "race": {"runs": 2}},
    "rounds": {"data": {"name": "tests.components:tiny", "local_test_fraction": 0.3}},
    "clock": {"mode": "clock", "policy": "fedbuff"},
    "divergence": {"aggregate": {"nonfinite": "stop"}, "local": {"lr": 1e38, "steps": 2}, "model": "2nn"},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "race without locks" else pytest.mark.slow) for k in EVERY_CALL]
)
def test_a_process_killed_before_any_call_is_replaced(kind, monkeypatch):
    """One of two processes is killed just before the pool's first, second, ... call, until there are no more calls."""
    tables = {**TABLES, **SPAWN, "rounds": 1, "local": {"steps": 2}, "model": "logistic", **EVERY_CALL[kind]}
    begin, calls, fatal = ProcessPool.begin, [], [0]

    def killing(pool, function, *arguments, **options):
        calls.append(function)
        if len(calls) == fatal[0]:
            os.kill(pool._children[1].process.pid, signal.SIGKILL)
        begin(pool, function, *arguments, **options)

    monkeypatch.setattr(ProcessPool, "begin", killing)
    whole = fedsim.run(tables)
    assert (whole.history[0].diverged is not None) == (kind == "divergence")
    for fatal[0] in range(1, len(calls)):  # the last call only releases memory
        calls.clear()
        with pytest.warns(FedsimWarning, match=r"process 1.* was killed by SIGKILL .*; a new process takes over"):
            result = fedsim.run(tables)
        if "race" not in kind:
            assert torch.equal(result.global_row, whole.global_row)
            assert untimed(result.history) == untimed(whole.history)
        assert len(result.history) == 1
    assert fatal[0] >= 3


def test_a_process_that_dies_when_all_is_done_takes_nothing_with_it(session, monkeypatch):
    tables = {**TABLES, **SPAWN, "rounds": 1, "model": "logistic"}
    with monkeypatch.context() as patch:
        patch.setattr(base, "_drop_executor", die_second)
        result = fedsim.run(tables, session=session)
    assert_as_without_faults(result, tables, session)  # the session has started new processes
