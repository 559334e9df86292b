"""Ranks that are started again continue from the newest checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import ROOT, ended, start_python, start_ranks

WORDS = (
    *("run_experiment.py", "tiny.toml", "engine=distributed", "rounds=5", "checkpoint.every=1", "server=adam"),
    *("distributed.timeout=20", "aggregate.rule=foolsgold", "data=tests.plugs:tiny", "workers=4"),
    "local.batch_size=16",
)


def ranks(count, program, *words, cwd):
    """A group of ranks, to its end: what all wrote to stdout and to stderr."""
    (cwd / "tiny.toml").write_text('name = "tiny"\n')
    codes, outs, errors = ended(start_ranks(count, ROOT / program, *words, cwd=cwd), 150)
    assert codes == [0] * count, errors
    return "".join(outs), "".join(errors)


def torchrun(count, program, *words, cwd, restarts):
    """The same under PyTorch's launcher."""
    (cwd / "tiny.toml").write_text('name = "tiny"\n')
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    options = ("--max-restarts", str(restarts), str(ROOT / program))
    process = start_python(*launcher, *options, *words, cwd=cwd, OMP_NUM_THREADS="1")
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return out, errors


def model_of(folder):
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("local.momentum=0.9", "local.keep_state=true")], ids=["", "worker state"])
def test_torchrun_restarts_a_killed_rank_to_the_same_model(kept, tmp_path):
    fails = ("model=tests.models:FailsInRankOnce", "model.how=kill", "model.after=20", *kept)
    out, errors = torchrun(2, *WORDS, *fails, "--resume", "run", cwd=tmp_path, restarts=1)
    assert "ended without a word" in errors
    assert "continuing after round 2 of 5" in out
    ranks(2, *WORDS, *fails, "model.rank=9", "--resume", "whole", cwd=tmp_path)
    assert torch.equal(model_of(tmp_path / "run"), model_of(tmp_path / "whole"))


def test_a_finished_run_of_ranks_can_be_resumed(tmp_path):
    """All rounds are on record then, by the first rank."""
    for _ in range(2):
        out, _ = ranks(2, *WORDS, "model=logistic", "--resume", "run", cwd=tmp_path)
    assert "after 5 rounds, 0 of them in this session" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "solver"),
    [
        *((rule, "sgd") for rule in ("weighted_mean", "median", "krum", "foolsgold")),
        *(("weighted_mean", "scaffold"), ("median", "feddyn"), ("krum", "feddyn")),
    ],
)
def test_another_number_of_ranks_continues_to_the_same_numbers(rule, solver, tmp_path):
    words = (*WORDS, f"aggregate.rule={rule}", "precision=float64", "model=logistic", f"local.solver={solver}")
    ranks(3, *words, "rounds=3", "--resume", "run", cwd=tmp_path)
    ranks(2, *words, "--resume", "run", cwd=tmp_path)
    ranks(1, *words, "--resume", "whole", cwd=tmp_path)
    assert torch.allclose(model_of(tmp_path / "run"), model_of(tmp_path / "whole"), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_powersgd_starts_its_state_again_and_warns(tmp_path):
    words = (*WORDS, "model=logistic", "sync=gradients", "server=sgd", "aggregate.rule=mean", "--resume", "run")
    hook = ("distributed.hook=powersgd", "distributed.hook.start_powerSGD_iter=3")
    ranks(2, *words, *hook, "rounds=2", cwd=tmp_path)
    out, errors = ranks(2, *words, *hook, cwd=tmp_path)
    assert "continuing after round 2 of 5" in out
    assert errors.count('distributed.hook = "powersgd": its state is in no checkpoint and starts again') == 1
