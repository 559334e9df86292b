"""Worker state on two ranks: the numbers of `serial`, also if the run is resumed."""

from __future__ import annotations

import pytest
import torch

from fedsim.records.reader import Run
from tests.engines.test_resuming_ranks import model_of, ranks

WORDS = (
    *("run_experiment.py", "tiny.toml", "data=tests.plugs:tiny", "workers=5", "cohort=3", "local.batch_size=16"),
    *("local.steps=3", "local.lr=0.1", "local.momentum=0.9", "precision=float64", "checkpoint.every=1"),
)
CASES = {
    "momentum of workers": ("model=logistic", "sync=gradients", "local.momentum_at=worker", "aggregate.rule=median"),
    "error feedback": ("model=logistic", 'processors=[{name="top_k",k=500,error_feedback=true}]'),
    "kept state and buffers": ("model=tests.models:Normalised", "buffers=local", "local.keep_state=true"),
    "personal models": (
        *("model=tests.models:Normalised", "local.solver=ditto", "local.lam=0"),
        *("data.worker_test=0.25", "evaluation.fine_tune=1"),
    ),
    "personal parameters": (
        *("model=tests.models:Normalised", "local.solver=lg_fedavg", 'local.personal=["layers.[12].*"]'),
        *("data.worker_test=0.25", "evaluation.fine_tune=1"),
    ),
}
SLOW = "error feedback", "personal models", "personal parameters"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_two_ranks_keep_the_state_of_workers_and_resume(case, tmp_path):
    words, limit = (*WORDS, *CASES[case]), "worker_state_memory=10000"
    on_ranks = (*words, "engine=distributed", "distributed.timeout=60", "--resume", "run")
    ranks(2, *on_ranks, "rounds=2", cwd=tmp_path)
    out, _ = ranks(2, *on_ranks, limit, "rounds=4", cwd=tmp_path)
    assert "continuing after round 2 of 4" in out
    ranks(1, *words, "engine=serial", "rounds=4", "--resume", "whole", cwd=tmp_path)
    assert torch.allclose(model_of(tmp_path / "run"), model_of(tmp_path / "whole"), rtol=0, atol=1e-9)
    if "evaluation.fine_tune=1" in words:
        run, whole = (Run.read(tmp_path / name).workers.loss for name in ("run", "whole"))
        assert run.keys() == whole.keys() == {"global", "personal", "fine_tuned"}
        assert all(run[model] == pytest.approx(whole[model], abs=1e-9) for model in run)
