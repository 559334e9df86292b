"""`local.keep_state = true`: a worker's solver continues with the state of its last round."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.core.rows import Layout
from fedsim.models import logistic
from tests import plugs
from tests.clients.test_definitions import in_pytorch
from tests.textbook import Federation

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "beta1": 0.8, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
}
TABLES = {
    **{"rounds": 4, "workers": 5, "cohort": 2, "model": "logistic", "data": "tests.plugs:tiny", "engine": "serial"},
    "records": {"curve": False},
}
KEPT = {"batch_size": 16, "steps": 3, "keep_state": True}


def tables(engine="serial", solver="adam", **changes):
    local = {**KEPT, "solver": solver, **OPTIMIZERS[solver][1], **changes.pop("local", {})}
    return {**TABLES, "engine": engine, "precision": "float64", "local": local, **changes}


@pytest.mark.parametrize("solver", OPTIMIZERS)
def test_each_worker_s_optimizer_lives_on_between_its_rounds(solver):
    """Plain PyTorch: one model and one optimizer for each worker, of which only the model begins again."""
    result = fedsim.run(tables(solver=solver, local={"steps": None, "epochs": 1}, rounds=6))
    federation = Federation(logistic, plugs.tiny, 5, 16)
    models = [logistic().double() for _ in range(5)]
    layout = Layout.of(models[0])
    make = in_pytorch(*OPTIMIZERS[solver]) if solver != "sgd" else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [make(model.parameters()) for model in models]
    for round in range(1, 7):
        rows = {}
        for worker in sample_cohort(0, round, 5, 2).tolist():
            model, optimizer = models[worker], optimizers[worker]
            layout.write(federation.row, model)
            for x, y in federation.epoch(round, worker):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            rows[worker] = layout.read(model)
        federation.row = federation.average(rows)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


def test_a_run_on_the_clock_is_resumed_to_the_bit(tmp_path):
    changes = {"mode": "clock", "policy": "fedbuff", "clock": {"speed": "lognormal"}, "checkpoint": {"every": 1}}
    whole = fedsim.run(tables(**changes))
    fedsim.run(tables(**changes, rounds=2), tmp_path / "run")
    assert torch.equal(fedsim.run(tables(**changes), tmp_path / "run", resume=True).global_row, whole.global_row)
