"""Linear regression with squared error, whose optimum is known: data, model and task as plugs, and the optimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.core.learning_task import Classification
from fedsim.data import TensorData

WORKERS, SAMPLES, D = 4, 6, 3


def data(root):
    """Samples of four workers, one worker after another; their inputs and their targets differ."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(WORKERS, SAMPLES, D, generator=generator, dtype=torch.double)
    inputs *= torch.tensor([0.5, 1.0, 1.5, 2.0]).view(-1, 1, 1)
    targets = torch.randint(0, 10, (WORKERS, SAMPLES), generator=generator)
    train = TensorData(inputs.flatten(0, 1).float(), targets.flatten())
    return train, train


def bowls(root):
    """Worker k has the loss |w - b_k|^2 / 6: its inputs are unit vectors, its targets the numbers of b_k."""
    targets = torch.tensor([[0, 8, 1], [9, 2, 0], [4, 4, 9], [1, 9, 7]])
    train = TensorData(torch.eye(D).repeat(WORKERS, 1), targets.flatten())
    return train, train


class Line(nn.Linear):
    """A linear function that is 0 at first."""

    def __init__(self) -> None:
        super().__init__(D, 1, bias=False)
        nn.init.zeros_(self.weight)


@dataclass(frozen=True)
class SquaredError(Classification):
    """Half of the squared difference to the label."""

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        losses = (outputs.squeeze(-1) - targets).square() / 2
        return losses.mean() if reduction == "mean" else losses

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.squeeze(-1).round() == targets

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Accept all outputs."""


def tables(dataset="data", **changes):
    """An experiment on these data in float64, in which each step of a worker uses all its samples."""
    made = {
        **{"task": "tests.clients.quadratics:SquaredError", "model": "tests.clients.quadratics:Line"},
        **{"data": f"tests.clients.quadratics:{dataset}", "partition": "tests.plugs:in_blocks", "workers": WORKERS},
        **{"precision": "float64", "engine": "serial", "aggregate": "mean", "rounds": 40},
    }
    local = {"batch_size": SAMPLES, "steps": 10, "lr": 0.1, **changes.pop("local", {})}
    return {**made, "local": local, **changes}


def optimum():
    """The minimum of the mean of the workers' losses on `data`."""
    train, _ = data(None)
    inputs, targets = train.inputs.double(), train.targets.double()
    return torch.linalg.lstsq(inputs, targets.unsqueeze(1)).solution.squeeze(1)
