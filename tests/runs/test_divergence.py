"""Runs that end because updates or the global model contain NaN or infinity (`aggregate.nonfinite = "stop"`)."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import fedsim
from tests.runs.test_nonfinite import ENGINES, TIMED
from tests.textbook import small_two_nn, start_of

STOP = {"rounds": 4, "workers": 5, "aggregate": {"rule": "median", "nonfinite": "stop"}}
ATTACKED = {**STOP, "attack": {"name": "inf", "workers": [1, 3], "start_round": 3}}
DIVERGED = "2 of 5 updates contain NaN or infinity (from workers 1, 3)"
STOPPED = f"diverged in round 3: {DIVERGED}; the results are those of the model before this round"


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_ends_with_the_last_finite_model(engine, sync, tiny_experiment, session):
    tables = {**tiny_experiment, **ENGINES[engine], "sync": sync}
    clean = fedsim.run({**tables, **STOP, "rounds": 2}, session=session)
    result = fedsim.run({**tables, **ATTACKED}, session=session)
    assert torch.equal(result.global_row, clean.global_row)
    assert [record.diverged for record in result.history] == [None, None, DIVERGED]
    assert result.history[1].test_loss == result.history[2].test_loss == clean.test_loss
    assert result.stopped == STOPPED


@pytest.mark.parametrize("policy", ["asgd", "fedbuff", "ssp"])
def test_work_that_is_not_finite_ends_a_run_on_the_clock(policy, tiny_experiment):
    data = {"data": "tests.components:with_a_hole", "partition": "tests.components:in_blocks", "model": "logistic"}
    tables = {**tiny_experiment, **data, **TIMED, "policy": policy, "rounds": 3}
    result = fedsim.run({**tables, "aggregate": {"nonfinite": "stop"}})
    assert result.history[-1].diverged == "the result of worker 0 (the worker's round 1) contains NaN or infinity"
    assert result.global_row.isfinite().all()
    assert math.isfinite(result.test_loss)


def test_a_global_model_that_overflows_ends_the_run(tiny_experiment):
    local = {"batch_size": 16, "lr": 1e38}
    result = fedsim.run({**tiny_experiment, **STOP, "sync": "gradients", "rounds": 9, "local": local})
    assert len(result.history) == 1
    assert "diverged" in result.stopped
    start = parameters_to_vector(start_of(small_two_nn, dtype=torch.float32).parameters())
    assert torch.equal(result.global_row, start), "the steps before the one that diverged are undone"


def test_the_folder_says_that_the_run_diverged_and_resuming_repeats_the_end(tiny_experiment, tmp_path, capsys):
    tables = {**tiny_experiment, **ATTACKED, "checkpoint": {"every": 1}}
    first = fedsim.run(tables, tmp_path / "run", progress=True)
    assert f"stopped after round 3 of 4: {STOPPED}\n" in capsys.readouterr().out
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["diverged"] == DIVERGED
    again = fedsim.run({**tables, "rounds": 6}, tmp_path / "run", resume=True)
    histories = [[replace(record, seconds={}) for record in result.history] for result in (first, again)]
    assert histories[0] == histories[1]
    assert torch.equal(again.global_row, first.global_row)
    assert fedsim.load_run(tmp_path / "run", allow_imports=True).stopped == STOPPED


def test_a_comparison_counts_a_run_that_diverged(tiny_experiment, tmp_path):
    axes = {"attack.name": ["none", "inf"], "seed": [0, 1]}
    tables = {**tiny_experiment, **STOP, "attack": {"workers": [1]}}
    comparison = fedsim.compare(tables, axes, tmp_path, jobs=1)
    assert [(len(row.runs), row.failed) for row in comparison.summary] == [(2, 0), (2, 0)]
    assert comparison.summary[1].score is not None
    assert "2 of 4 runs diverged" in comparison.table
    assert all(run.folder.joinpath("error.txt").exists() is False for run in comparison.runs)
    before = [(run.folder / "metrics.jsonl").stat().st_mtime_ns for run in comparison.runs]
    fedsim.compare(tables, axes, tmp_path, jobs=1)
    assert [(run.folder / "metrics.jsonl").stat().st_mtime_ns for run in comparison.runs] == before
