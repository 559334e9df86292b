"""Restarted ranks continue from the newest checkpoint, with the state of the workers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import fedsim
from fedsim.records.reader import Run
from tests.commands import ROOT, ended, latest, start_ranks, start_torchrun

WORDS = (
    *("engine=distributed", "data=tests.components:tiny", "rounds=5", "checkpoint.every=1", "server=adam"),
    *("aggregate.rule=foolsgold", "workers=4", "local.batch_size=16", "distributed.timeout=60"),
)
KEPT = {
    "momentum of workers": ("sync=gradients", "local.momentum_at=worker", "aggregate.rule=median"),
    "error feedback": ('processors=[{name="top_k",k=500,error_feedback=true}]',),
    "state and buffers": ("model=tests.models:Normalised", "buffers=local", "local.keep_optimizer_state=true"),
    "personal models": (
        *("model=tests.models:Normalised", "local.algorithm=ditto", "local.lam=0"),
        *("data.local_test_fraction=0.25", "worker_evaluation.fine_tune=1"),
    ),
    "personal parameters": (
        *("model=tests.models:Normalised", "local.algorithm=lg_fedavg", 'local.personal=["layers.[12].*"]'),
        *("data.local_test_fraction=0.25", "worker_evaluation.fine_tune=1"),
    ),
}


def ranks(count, *words, cwd, start=start_ranks):
    """Run a group of ranks to its end and return their joint stdout and stderr."""
    (cwd / "tiny.toml").write_text('name = "tiny"\n')
    processes = start(count, str(ROOT / "run_experiment.py"), "tiny.toml", *words, "--resume", "run", cwd=cwd)
    codes, outs, errors = ended(processes, 150)
    assert not any(codes), errors
    return "".join(outs), "".join(errors)


def alone(*words, cwd):
    """Run the same experiment in this process and return its folder."""
    words = latest([*(word for word in words if not word.startswith("distributed.")), "engine=serial"])
    result = fedsim.run(fedsim.load_experiment(cwd / "tiny.toml", words), out=cwd / "alone")
    return result.folder


def row_of(folder):
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


@pytest.mark.parametrize("case", [pytest.param(k, marks=[pytest.mark.slow] * (k != "state and buffers")) for k in KEPT])
def test_two_ranks_keep_the_state_of_workers_and_resume(case, tmp_path):
    words = (*WORDS, "model=logistic", "server=sgd", "aggregate.rule=weighted_mean", "workers=5", "cohort=3")
    words += ("local.steps=3", "local.lr=0.1", "local.momentum=0.9", "precision=float64", *KEPT[case])
    ranks(2, *words, "rounds=2", cwd=tmp_path)
    out, _ = ranks(2, *words, "worker_state_memory=10000", cwd=tmp_path)
    assert "continuing after round 2 of 5" in out
    folder = alone(*words, cwd=tmp_path)
    assert torch.allclose(row_of(tmp_path / "run"), row_of(folder), rtol=0, atol=1e-9)
    if "worker_evaluation.fine_tune=1" in words:
        run, whole = (Run.read(of).workers.loss for of in (tmp_path / "run", folder))
        assert run.keys() == whole.keys() == {"global", "personal", "fine_tuned"}
        assert all(run[model] == pytest.approx(whole[model], abs=1e-9) for model in run)
    out, _ = ranks(2, *words, "worker_state_memory=10000", cwd=tmp_path)
    assert "after 5 rounds, 0 of them in this session" in out, "rank 0 has already recorded all rounds"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), ("local.momentum=0.9", "local.keep_optimizer_state=true")], ids=["", "worker state"]
)
def test_torchrun_restarts_a_killed_rank_to_the_same_model(settings, tmp_path):
    words = (*WORDS, "model=tests.models:FailsInRankOnce", "model.how=kill", "model.after=20", *settings)
    out, _ = ranks(2, *words, cwd=tmp_path, start=start_torchrun)
    assert "continuing after round 2 of 5" in out
    (tmp_path / "whole").mkdir()
    ranks(2, *words, "model.rank=9", cwd=tmp_path / "whole")
    assert torch.equal(row_of(tmp_path / "run"), row_of(tmp_path / "whole" / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "algorithm"),
    [
        *((rule, "sgd") for rule in ("weighted_mean", "median", "krum", "foolsgold")),
        *(("weighted_mean", "scaffold"), ("median", "feddyn"), ("krum", "feddyn")),
    ],
)
def test_another_number_of_ranks_continues_to_the_same_numbers(rule, algorithm, tmp_path):
    words = (*WORDS, f"aggregate.rule={rule}", "precision=float64", "model=logistic", f"local.algorithm={algorithm}")
    ranks(3, *words, "rounds=3", cwd=tmp_path)
    ranks(2, *words, cwd=tmp_path)
    assert torch.allclose(row_of(tmp_path / "run"), row_of(alone(*words, cwd=tmp_path)), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_powersgd_starts_its_state_again_and_warns(tmp_path):
    words = (*WORDS, "model=logistic", "sync=gradients", "server=sgd", "aggregate.rule=mean")
    words += ("distributed.hook=powersgd", "distributed.hook.start_powerSGD_iter=3")
    ranks(2, *words, "rounds=2", cwd=tmp_path)
    out, errors = ranks(2, *words, cwd=tmp_path)
    assert "continuing after round 2 of 5" in out
    assert (
        errors.count('distributed.hook = "powersgd": the state of this hook is not in the checkpoint and is reset') == 1
    )


def test_a_run_of_ranks_continues_without_a_launcher_with_the_engine_auto(tmp_path):
    """The engine of the earlier part was chosen by the launcher, not by `auto`."""
    words = [word for word in WORDS if not word.startswith(("engine", "distributed"))]
    ranks(1, *words, "engine=distributed", "rounds=2", cwd=tmp_path)
    experiment = fedsim.load_experiment(tmp_path / "tiny.toml", [*words, "engine=auto"])
    result = fedsim.run(experiment, tmp_path / "run", resume=True)
    assert torch.allclose(row_of(result.folder), row_of(alone(*words, cwd=tmp_path)), rtol=0, atol=1e-5)
