"""On linear regression with squared error, whose optimum is known, algorithms that correct their steps reach it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from fedsim.data import TensorData

WORKERS, SAMPLES, D = 4, 6, 3


def data(root):
    """Samples of four workers, one worker after another; their inputs and their targets differ."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(WORKERS, SAMPLES, D, generator=generator, dtype=torch.double)
    inputs *= torch.tensor([0.5, 1.0, 1.5, 2.0]).view(-1, 1, 1)
    targets = torch.randint(0, 10, (WORKERS, SAMPLES), generator=generator).float()
    train = TensorData(inputs.flatten(0, 1).float(), targets.flatten())
    return train, train


class Line(nn.Linear):
    """A linear function that is 0 at first."""

    def __init__(self) -> None:
        super().__init__(D, 1, bias=False)
        nn.init.zeros_(self.weight)


TABLES = {  # half of the squared error; in each step a worker uses all its samples
    **{"task": {"name": "regression", "loss": "huber", "delta": 1e9}, "model": f"{__name__}:Line"},
    **{"data": f"{__name__}:data", "partition": "tests.plugs:in_blocks", "workers": WORKERS, "aggregate": "mean"},
    **{"precision": "float64", "engine": "serial"},
}


def distance(local, **changes):
    """How far the final row is from the minimum of the mean of the workers' losses."""
    train, _ = data(None)
    inputs, targets = train.inputs.double(), train.targets.double()
    optimum = torch.linalg.lstsq(inputs, targets.unsqueeze(1)).solution.squeeze(1)
    local = {"batch_size": SAMPLES, "steps": 10, "lr": 0.1, **local}
    return (fedsim.run({**TABLES, "local": local, **changes}).global_row - optimum).norm().item()


@pytest.mark.parametrize(
    ("local", "rounds", "most"),
    [
        ({"solver": "scaffold"}, 40, 2e-4),
        pytest.param({"solver": "feddyn", "alpha": 1.0}, 40, 2e-4, marks=pytest.mark.slow),
        pytest.param({"solver": "mime", "beta": 0.5, "lr": 0.02}, 60, 1e-6, marks=pytest.mark.slow),
        pytest.param({"solver": "scaffold", "option": 1, "lr": 0.05}, 100, 1e-8, marks=pytest.mark.slow),
    ],
)
def test_corrected_steps_approach_the_optimum(local, rounds, most):
    assert distance(local, rounds=rounds) < most


@pytest.mark.parametrize(
    ("local", "rounds"),
    [({"solver": "scaffold", "lr": 0.05}, 60), ({"solver": "feddyn", "alpha": 1.0, "lr": 0.05}, 300)],
)
@pytest.mark.slow
def test_corrected_steps_reach_the_optimum_with_partial_cohorts(local, rounds):
    assert distance(local, cohort=2, rounds=rounds) < 1e-3
