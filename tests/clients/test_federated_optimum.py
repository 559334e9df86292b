"""On losses whose optimum is known, SCAFFOLD and FedDyn reach it, and FedNova's fixed point is the right one."""

from __future__ import annotations

import pytest
import torch

import fedsim
from tests.clients.quadratics import bowls, optimum, tables


def distance(local, **changes):
    return (fedsim.run(tables(local=local, **changes)).global_row - optimum()).norm().item()


@pytest.mark.parametrize(
    ("local", "rounds", "most"),
    [
        ({"solver": "scaffold"}, 40, 2e-4),
        ({"solver": "feddyn", "alpha": 1.0}, 40, 2e-4),
        ({"solver": "mime", "beta": 0.5, "lr": 0.02}, 30, 1e-2),
        pytest.param({"solver": "mime", "beta": 0.5, "lr": 0.02}, 60, 1e-6, marks=pytest.mark.slow),
        pytest.param({"solver": "scaffold", "option": 1, "lr": 0.05}, 100, 1e-8, marks=pytest.mark.slow),
    ],
)
def test_corrected_steps_approach_the_optimum(local, rounds, most):
    assert distance(local, rounds=rounds) < most


@pytest.mark.parametrize(
    ("local", "rounds"),
    [
        ({"solver": "scaffold", "lr": 0.05}, 60),
        pytest.param({"solver": "feddyn", "alpha": 1.0, "lr": 0.05}, 300, marks=pytest.mark.slow),
    ],
)
def test_corrected_steps_reach_the_optimum_with_partial_cohorts(local, rounds):
    assert distance(local, cohort=2, rounds=rounds) < 1e-3


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
