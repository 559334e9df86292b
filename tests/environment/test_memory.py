"""Main memory: the need is checked before the first round, and an out-of-memory error takes one line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fedsim
from fedsim import ExperimentError, WorkerError
from fedsim.runs import checks
from fedsim.server import ServerStep
from fedsim.system.limits import format_failure

ROW = 4 * 7_850  # bytes of a row of the model "logistic"
SMALL = ROW / 2  # more than all tensors that are not rows
SERIAL = {"workers": 4, "model": "logistic", "data": "tests.components:tiny", "engine": "serial", "rounds": 1}


@pytest.mark.parametrize(
    ("tables", "recorded", "rows"),
    [
        ({}, False, 4 + 1 + 3 + 1),
        ({}, True, 4 + 1 + 3 + 1 + 3),
        ({"checkpoint": {"every": 0}}, True, 4 + 1 + 3 + 1),
        ({"local": {"momentum": 0.9}}, False, 4 + 1 + 3 + 2),
        ({"local": {"momentum": 0.9, "keep_optimizer_state": True}}, True, 4 + 1 + 3 + 2 + 4 + 4 + 3 + 3 * 4),
        ({"server": "adam"}, True, 4 + 3 + 3 + 1 + 3 * 3),
        ({"sync": "gradients"}, False, 4 + 1 + 6 + 1),
        ({"engine": "processes", "processes": 2}, False, 4 + 1 + 6 + 2 + 1),
        ({"engine": "batched", "processes": 1, "batched": {"stack_size": 2}}, False, 4 + 1 + 3 + 6),
        ({"aggregate": "fltrust"}, False, 5 + 1 + 3 + 1),
    ],
)
def test_the_memory_of_all_rows_is_checked_before_the_first_round(tables, recorded, rows, tmp_path, monkeypatch):
    out = tmp_path / "run" if recorded else None
    monkeypatch.setattr(checks, "free_memory", lambda: rows * ROW - SMALL)
    with pytest.raises(
        ExperimentError, match=r"^cohort = 4: .* needs about .* of memory \(models and .* are free; use"
    ):
        fedsim.run({**SERIAL, **tables}, out)
    monkeypatch.setattr(checks, "free_memory", lambda: rows * ROW + SMALL)
    fedsim.run({**SERIAL, **tables}, out)


def test_the_states_of_all_repetitions_of_a_race_are_counted(monkeypatch):
    race = {**SERIAL, "engine": "processes", "processes": 1, "mode": "race", "policy": "fedbuff", "max_restarts": 0}
    live = 4 + 1 + 3 + 1 + 4 + 2  # rows, global model, module, gradient, start models, sum of updates in float64
    monkeypatch.setattr(checks, "free_memory", lambda: (live + 1.0) * ROW)
    fedsim.run({**race, "race": {"runs": 1}})
    states = 2 * (4 + 1 + 4 + 2)
    monkeypatch.setattr(checks, "free_memory", lambda: (live + states) * ROW - SMALL)
    with pytest.raises(ExperimentError, match=r"copies for repetitions, .* a smaller race.runs or a smaller model"):
        fedsim.run({**race, "race": {"runs": 2}})


def test_rules_that_compare_all_pairs_need_memory_for_them(monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda: 9 * ROW - SMALL)
    with pytest.raises(ExperimentError, match="distances of all pairs 128 B"):
        fedsim.run({**SERIAL, "aggregate": {"rule": "krum", "f": 0}})


@pytest.mark.parametrize("engine", [{}, {"engine": "processes", "processes": 1}])
def test_memory_that_runs_out_in_a_round_gives_a_one_line_error(engine):
    with pytest.raises(WorkerError) as caught:
        fedsim.run({**SERIAL, "model": "tests.models:Greedy", **engine})
    assert "worker 0 in round 1 failed" in str(caught.value)
    assert "memory ran out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_errors_keep_their_traceback():
    assert "\n" in format_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@dataclass(frozen=True)
class ScaledStep(ServerStep):
    """A server step whose state depends on the initial model."""

    lr: float = 1.0

    def start(self, row):
        return {"scale": torch.full_like(row, 1 + row.abs().max().item())}

    def step(self, row, update, state):
        row.addcdiv_(update, state["scale"], value=self.lr)


def test_a_state_that_depends_on_values_cannot_be_counted(tmp_path):
    assert len(fedsim.run({**SERIAL, "server": ScaledStep()}, tmp_path / "run").history) == 1
