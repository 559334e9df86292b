from __future__ import annotations

import re

import pytest

import fedsim

COMPONENTS = "tests.asynchronous.race_components"
KILLED = r"process [01], working on worker 1 in round 1, was killed by SIGKILL \(exit code -9\)"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"policy": f"{COMPONENTS}:FailingLocked"},
            KILLED + " while it held a lock; the data that this lock protects may be half written",
        ),
        (
            {"policy": f"{COMPONENTS}:FailingHogwild"},
            KILLED + " during a write to the shared model, which may be half written",
        ),
        pytest.param(
            {"policy": "hogwild", "model": {"name": "tests.models:Fails", "how": "kill"}},
            r"process [01], working on worker [01] in round 1, was killed by SIGKILL \(exit code -9\)",
            marks=pytest.mark.slow,
        ),
        (
            {"policy": {"name": f"{COMPONENTS}:FailingLocked", "how": "stop"}, "process_timeout": 1.0},
            r"process [01] has sent no heartbeat for 1 s \(worker 1 in round 1\); if a step takes .*",
        ),
    ],
    ids=["with the lock", "in a write", "in a step", "stopped with the lock"],
)
def test_a_failing_worker_ends_the_run_with_one_line(tables, message):
    changes = {"mode": "race", "workers": 2, "rounds": 3, "model": "logistic", "data": "tests.components:tiny"}
    changes["max_restarts"] = 0
    with pytest.raises(fedsim.WorkerError) as caught:
        fedsim.run({**changes, **tables})
    assert re.fullmatch(message, str(caught.value)), str(caught.value)
