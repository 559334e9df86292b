"""A check of an installation: the main features on a few hundred images, in a few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedsim

QUICK = ["model=logistic", "data=tests.components:tiny", "workers=3", "local.lr=0.05"]
TABLES = {"model": "2nn", "data": "tests.components:tiny", "workers": 3, "rounds": 2}


@pytest.mark.usefixtures("pictures")
def test_a_run_learns_and_leaves_its_records(cli):
    done = cli("run", *QUICK, "engine=serial", "rounds=5", "--out", "first")
    assert done.exit_code == 0, done.output
    names = {path.name for path in Path("first").iterdir()}
    assert names >= {"experiment.toml", "environment.json", "metrics.jsonl", "model.safetensors", "curve.png"}
    assert fedsim.run("first/experiment.toml", allow_imports=True).test_accuracy > 0.5


def test_spawn_is_bit_identical_to_serial():
    serial = fedsim.run({**TABLES, "engine": "serial"})
    pooled = fedsim.run({**TABLES, "engine": "processes", "processes": 2})
    assert torch.equal(pooled.global_row, serial.global_row)


def test_a_resumed_run_is_bit_identical_to_a_whole_one(tmp_path):
    whole = fedsim.run({**TABLES, "engine": "serial"})
    first = {**TABLES, "engine": "serial", "checkpoint": {"every": 1}}
    fedsim.run({**first, "rounds": 1}, tmp_path / "run")
    resumed = fedsim.run(first, tmp_path / "run", resume=True)
    assert torch.equal(resumed.global_row, whole.global_row)


@pytest.mark.usefixtures("pictures")
def test_a_comparison_ends_with_its_table_and_pictures(cli):
    done = cli(
        "compare", *QUICK, "rounds=2", "aggregate.rule=mean,median", "seed=0,1", "--jobs", 2, "--out", "comparison"
    )
    assert done.exit_code == 0, done.output
    assert "median" in done.stdout
    assert {path.name for path in Path("comparison").iterdir()} >= {
        "comparison.json",
        "results.csv",
        "summary.csv",
        "accuracy.png",
    }
