"""What workers keep between their rounds, in every engine: momentum, optimizer states, residuals, personal models."""

from __future__ import annotations

import pytest
import torch

import fedsim
from tests.lethal import order

TABLES = {
    **{"rounds": 4, "workers": 7, "cohort": 3, "model": "logistic", "data": "tests.plugs:tiny", "precision": "float64"},
    **{"partition": "tests.plugs:uneven", "records": {"curve": False}},
}
HALF = {"name": "tests.processing.test_error_feedback:half", "error_feedback": True}
AT_WORKER = {"batch_size": 16, "lr": 0.5, "steps": 3, "momentum": 0.9, "dampening": 0.9, "momentum_at": "worker"}
ALIE = {"attack": {"name": "alie", "workers": [4], "z": 1.5}, "aggregate": {"rule": "median", "nonfinite": "exclude"}}
OWN_BUFFERS = {"model": "tests.models:Normalised", "buffers": "local"}
CASES = {
    "solver state and own buffers": {
        **{**OWN_BUFFERS, "local": {"batch_size": 16, "steps": 3, "solver": "adam", "keep_state": True}},
        "partition": "iid",
    },
    "solver state and residuals of updates": {
        "local": {"batch_size": 16, "steps": 3, "lr": 0.1, "momentum": 0.9, "keep_state": True},
        "processors": [HALF],
    },
    "momentum and residuals of gradients": {"sync": "gradients", "local": AT_WORKER, "processors": [HALF]},
    "momentum under attack": {"sync": "gradients", "local": AT_WORKER, **ALIE, "cohort": None},
    "mime": {"local": {"solver": "mime", "lr": 0.2, "batch_size": 16}},
    "ditto": {"local": {"solver": "ditto", "lr": 0.1, "batch_size": 16}, **OWN_BUFFERS, "partition": "iid"},
    "apfl": {"local": {"solver": "apfl", "lr": 0.1, "adaptive": True, "batch_size": 16}},
    "learning rates": {"local": {"steps": 2, "schedule": {"name": "cosine", "T_max": 4}}},
}


def run(case, out=None, engine="serial", session=None, **changes):
    tables = {**TABLES, "engine": engine, **CASES[case], **changes}
    resume = {"resume": True} if out else {}
    return fedsim.run(tables, out, session=session, **resume).global_row


@pytest.mark.parametrize("case", list(CASES)[:4])  # `engines/test_contract.py` has the others
def test_spawn_gives_the_bits_of_serial_and_stacks_its_numbers(case, session):
    serial = run(case)
    assert torch.equal(serial, run(case, engine="spawn", processes=2, session=session))
    stacked = run(case, engine="batched", processes=1, batched={"width": 2})
    assert torch.allclose(serial, stacked, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_bitwise_the_same_result(case, tmp_path):
    """With another limit of memory, if workers keep anything."""
    limit = {} if case in ("mime", "learning rates") else {"worker_state_memory": 1}
    for rounds, changes in ((2, {}), (4, limit)):
        row = run(case, tmp_path / "run", rounds=rounds, checkpoint={"every": 1}, **changes)
    assert torch.equal(row, run(case))


@pytest.mark.parametrize(
    ("case", "engine"),
    [("solver state and residuals of updates", "batched"), ("momentum and residuals of gradients", "spawn")],
)
def test_a_round_that_lost_a_process_is_repeated_with_what_was_kept_before(case, engine, tmp_path):
    model = {"name": "tests.lethal:Mortal", "folder": str(tmp_path)}
    tables = {**TABLES, **CASES[case], "model": model}

    def kill_in_round_2(record):
        order(str(tmp_path), *(["train"] if record["round"] == 1 else []))

    with pytest.warns(fedsim.errors.FedsimWarning, match="killed"):
        result = fedsim.run({**tables, "engine": engine, "processes": 2}, on_round=kill_in_round_2)
    serial = fedsim.run({**tables, "engine": "serial"})
    assert torch.allclose(result.global_row, serial.global_row, rtol=0, atol=1e-9 if engine == "batched" else 0)
