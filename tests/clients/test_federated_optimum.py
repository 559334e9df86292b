"""On losses whose optimum is known, SCAFFOLD and FedDyn reach it, and FedNova's fixed point is the right one."""

from __future__ import annotations

import pytest
import torch

import fedsim
from tests.clients.quadratics import SAMPLES, WORKERS, D, bowls, data, optimum, tables


def distance(local, **changes):
    return (fedsim.run(tables(local=local, **changes)).global_row - optimum()).norm().item()


def test_fedavg_stops_short_of_the_optimum():
    """The fixed point of its linear iteration, from the workers' matrices and vectors."""

    inputs = data(None)[0].inputs.double().view(WORKERS, SAMPLES, D)
    targets = data(None)[0].targets.double().view(WORKERS, SAMPLES, 1)
    hessians, optima = inputs.mT @ inputs / SAMPLES, torch.linalg.lstsq(inputs, targets).solution
    shrink = torch.eye(D) - torch.linalg.matrix_power(torch.eye(D) - 0.1 * hessians, 10)
    fixed_point = torch.linalg.solve(shrink.sum(0), (shrink @ optima).sum(0)).squeeze(1)
    row = fedsim.run(tables()).global_row
    assert torch.allclose(row, fixed_point, rtol=0, atol=1e-10)
    assert (row - optimum()).norm() > 0.3


@pytest.mark.parametrize(
    "local",
    [{"solver": "scaffold"}, {"solver": "feddyn", "alpha": 1.0}],
)
def test_corrected_steps_approach_the_optimum(local):
    assert distance(local) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "local",
    [{"solver": "scaffold"}, {"solver": "scaffold", "option": 1}, {"solver": "feddyn", "alpha": 1.0}],
)
def test_corrected_steps_reach_the_optimum(local):
    assert distance({**local, "lr": 0.05}, rounds=100) < 1e-8


@pytest.mark.parametrize(
    ("local", "rounds"),
    [
        ({"solver": "scaffold", "lr": 0.05}, 60),
        pytest.param({"solver": "feddyn", "alpha": 1.0, "lr": 0.05}, 300, marks=pytest.mark.slow),
    ],
)
def test_corrected_steps_reach_the_optimum_with_partial_cohorts(local, rounds):
    assert distance(local, cohort=2, rounds=rounds) < 1e-3


def test_scaffold_reaches_the_regularised_optimum():
    """With weight decay: of the mean loss plus weight_decay / 2 |w|^2."""
    train = bowls(None)[0]
    mean = train.targets.double().view(4, 3).mean(0)
    for option in (1, 2):
        local = {"solver": "scaffold", "weight_decay": 0.5, "option": option, "batch_size": 3, "lr": 0.3}
        row = fedsim.run(tables("bowls", local=local, rounds=25)).global_row
        assert torch.allclose(row, mean / 3 / (1 / 3 + 0.5), rtol=0, atol=1e-8)


STEPS = torch.tensor([1, 5, 10, 20])


def fixed_point(lr, normalised):
    """A worker's K steps take w - b_k to (1 - lr / 3)^K (w - b_k), so this is a weighted mean of the b_k."""
    weights = 1 - (1 - lr / 3) ** STEPS.double()
    weights = weights / STEPS if normalised else weights
    return weights @ bowls(None)[0].targets.double().view(4, 3) / weights.sum()


@pytest.mark.parametrize(("solver", "normalised"), [("sgd", False), ("fednova", True)])
def test_the_fixed_point_under_unequal_steps(solver, normalised):
    local = {"solver": solver, "batch_size": 3, "steps": STEPS.tolist(), "lr": 0.6}
    row = fedsim.run(tables("bowls", local=local, rounds=25)).global_row
    assert torch.allclose(row, fixed_point(0.6, normalised), rtol=0, atol=1e-9)


def test_fednova_s_fixed_point_is_the_optimum_for_small_steps_and_fedavg_s_is_not():
    best = bowls(None)[0].targets.double().view(4, 3).mean(0)
    assert torch.allclose(fixed_point(1e-6, normalised=True), best, rtol=0, atol=1e-4)
    assert (fixed_point(1e-6, normalised=False) - best).norm() > 1
