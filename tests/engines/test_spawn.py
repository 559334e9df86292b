"""The engine `spawn` when a model does something terrible to one of its processes."""

from __future__ import annotations

import re

import pytest

import fedsim

DEATH = r"process \d, working on worker \d in round 1, "


@pytest.mark.parametrize(
    ("how", "processes", "sync", "message"),
    [
        (
            "raise",
            1,
            "gradients",
            r"worker \d in round 1 failed \(process \d\): ZeroDivisionError: this model divides",
        ),
        ("kill", 2, "parameters", rf"{DEATH}was killed by SIGKILL \(exit code -9\)$"),
        pytest.param(
            *("exit", 2, "parameters", rf"{DEATH}ended with exit code 0 before its work was done$"),
            marks=pytest.mark.slow,
        ),
        ("leave", 1, "gradients", rf"{DEATH}ended with exit code 0 before its work was done$"),
        ("hang", 2, "gradients", r"process \d has given no sign of life for 2 s \(worker \d in round 1\)"),
    ],
)
def test_a_death_ends_the_run_and_says_how_and_on_whom_it_worked(
    how, processes, sync, message, tiny_experiment, monkeypatch
):
    monkeypatch.setattr("fedsim.engines.pool.process_pool.GRACE", 0.5)  # for those who hang; then they are killed
    tables = {**tiny_experiment, "engine": "spawn", "processes": processes, "sync": sync, "timeout": 2.0}
    tables["worker_retries"] = 0
    with pytest.raises(fedsim.WorkerError) as failure:
        fedsim.run({**tables, "model": {"name": "tests.models:Fails", "how": how}})
    assert re.match(message, str(failure.value)), str(failure.value)
    assert ("Traceback" in str(failure.value)) == (how == "raise")
