"""Ranks that are started again go on from the newest checkpoint, each with its part of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import ROOT, start

WORDS = (
    *("run_experiment.py", "tiny.toml", "engine=distributed", "rounds=5", "checkpoint.every=1", "server=adam"),
    *("distributed.timeout=20", "aggregate.rule=foolsgold", "data=tests.plugs:tiny", "workers=4"),
    "local.batch_size=16",
)


def ranks(count, *words, cwd, restarts=0):
    """torchrun, to its end: what went to stderr, where it has ended well."""
    (cwd / "tiny.toml").write_text('name = "tiny"\n')
    program, *rest = words
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    options = ("--max-restarts", str(restarts), str(ROOT / program))
    process = start(*launcher, *options, *rest, cwd=cwd, OMP_NUM_THREADS="1")
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return out, errors


def model_of(folder):
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


def test_under_max_restarts_a_run_whose_rank_was_killed_ends_as_if_it_had_not_been(tmp_path):
    fails = ("model=tests.plugs:FailsInRankOnce", "model.how=kill", "model.after=20")
    out, errors = ranks(2, *WORDS, *fails, "--resume", "run", cwd=tmp_path, restarts=1)
    assert "ended without a word" in errors
    assert "going on after round 2 of 5" in out
    ranks(2, *WORDS, *fails, "model.rank=9", "--resume", "whole", cwd=tmp_path)
    assert torch.equal(model_of(tmp_path / "run"), model_of(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["weighted_mean", "median", "krum", "foolsgold"])
def test_another_number_of_ranks_goes_on_to_the_same_numbers(rule, tmp_path):
    words = (*WORDS, f"aggregate.rule={rule}", "precision=float64", "model=logistic")
    ranks(3, *words, "rounds=3", "--resume", "run", cwd=tmp_path)
    ranks(2, *words, "--resume", "run", cwd=tmp_path)
    ranks(1, *words, "--resume", "whole", cwd=tmp_path)
    assert torch.allclose(model_of(tmp_path / "run"), model_of(tmp_path / "whole"), rtol=0, atol=1e-9)
