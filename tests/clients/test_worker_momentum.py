"""`local.momentum_at = "worker"`: each worker sends its own momentum in rounds of gradients."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.clients import SGD
from fedsim.core.randomness import sample_cohort
from fedsim.models import logistic
from tests import plugs
from tests.textbook import Federation, finished

AT_WORKER = {"momentum_at": "worker", "momentum": 0.9, "dampening": 0.9}
LOCAL = {"batch_size": 16, "lr": 0.5, "steps": 3}
TABLES = {
    **{"rounds": 3, "workers": 5, "model": "logistic", "data": "tests.plugs:tiny", "sync": "gradients"},
    "records": {"curve": False},
}


def tables(engine="serial", **changes):
    local = {**LOCAL, **AT_WORKER, **changes.pop("local", {})}
    return {**TABLES, "engine": engine, "precision": "float64", "local": local, **changes}


@pytest.mark.parametrize("dampening", [0.0, 0.9])
def test_partial_cohorts_follow_a_loop_in_plain_pytorch(dampening):
    """Workers that are not in the cohort keep their momentum, and their batches go on by their own shard."""
    local = {"momentum": 0.9, "dampening": dampening, "weight_decay": 0.01}
    result = fedsim.run(tables(workers=6, cohort=2, rounds=6, aggregate="mean", local=local))
    federation, momenta = Federation(logistic, plugs.tiny, 6, 16), {}
    for round in range(1, 7):
        cohort = sample_cohort(0, round, 6, 2).tolist()
        batches = {worker: federation.batches(round, worker) for worker in cohort}
        for _ in range(3):
            for worker in cohort:
                gradient = federation.gradient(federation.row, next(batches[worker]))
                momenta[worker] = 0.9 * momenta.get(worker, 0.0) + (1 - dampening) * gradient
            mean = torch.stack([momenta[worker] for worker in cohort]).mean(0)
            federation.row = federation.row - 0.5 * (mean + 0.01 * federation.row)
    assert len(momenta) > 2
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dampening", [0.0, 0.9])
def test_only_with_a_linear_rule_is_it_the_momentum_of_the_server(dampening):
    far = {}
    for rule in ("mean", "median"):
        at_worker, at_server = (
            fedsim.run(tables(aggregate=rule, local={"momentum_at": at, "dampening": dampening})).global_row
            for at in ("worker", "server")
        )
        far[rule] = float((at_worker - at_server).abs().max())
    assert far["mean"] < 1e-12
    assert far["median"] > 1e-4


def test_dampened_momentum_begins_at_zero():
    """Unlike PyTorch's, whose first step is not dampened; from equal states the steps are the same."""
    solver, row = SGD(lr=1.0, momentum=0.9, dampening=0.5), torch.zeros(1)
    state = solver.start(row)
    for expected in (-0.5, -1.45):
        solver.step(row, torch.ones(1), state)
        assert row.item() == pytest.approx(expected)
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, dampening=0.5)
    theirs.state[parameter]["momentum_buffer"] = torch.zeros(1)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        theirs.step()
    assert parameter.item() == row.item()


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_excluded_worker_keeps_the_momentum_of_before(engine):
    """Worker 2 has one sample. Its gradient is not finite, so the worker is always excluded."""
    changes = {"model": "tests.models:OneIsTooFew", "partition": "tests.plugs:ending_in_one", "workers": 3}
    aggregate = {"rule": "median", "nonfinite": "exclude"}
    run = finished(tables(engine, aggregate=aggregate, processes=1, rounds=2, **changes))
    assert run.row.isfinite().all()
    assert [record.excluded for record in run.records] == [[2], [2]]
    assert {worker: bool(kept["momentum"].any()) for worker, kept in run.states.items()} == {0: True, 1: True}
