"""Per-FedAvg: a global model from which one step leads to a good personal model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.solver import NonNegative, State, solver
from fedsim.errors import ExperimentError


@solver("per_fedavg")
@dataclass(frozen=True)
class PerFedAvg(ClientAlgorithm):
    """Meta-learning by model-agnostic steps, in its first-order form. Fallah et al. 2020.

    Two local steps, on two batches, are one step of the paper: x' = x - inner_lr (gradient at x), then
    x -= lr (gradient at x'). Of an odd number of local steps the last one is not used. The personal model is x' of the
    global model; workers keep none. The test of workers after local training of an odd number of steps tests x'. The
    training loss is the mean over both batches.

    Args:
        lr: learning rate of x, >= 0.
        inner_lr: learning rate of x', >= 0.

    Raises ExperimentError if a worker has a single step in a round, since its row would not move.

    Cost: one gradient a local step, and a few passes over the row [d]; a state of [d].

    >>> row, solver = torch.tensor([1.0]), fedsim.clients.PerFedAvg(lr=1.0, inner_lr=0.5)
    >>> state = solver.start(row)
    >>> for _ in range(2):
    ...     solver.step_rows(row, row.clone(), state, gradient_at=None)
    ...     print(row)
    tensor([0.5000])
    tensor([0.5000])
    """

    lr: NonNegative = 0.05
    inner_lr: NonNegative = 0.01
    element_wise: ClassVar[bool] = False

    def start(self, rows: Tensor) -> State:
        return {"x": rows.clone(), "is_inner": torch.zeros_like(rows[..., :1], dtype=torch.bool)}

    def check_steps(self, worker: int, steps: int) -> None:
        if steps < 2:
            raise ExperimentError(
                'local.solver = "per_fedavg": needs two local steps in a round, each on a batch, and worker '
                f"{worker} has {steps}; use local.steps = 2 or more, or a smaller local.batch_size"
            )

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        # Before the run only a sample of a virtual population is checked, and a policy may choose the number of steps.
        for fact in worker.facts if not worker.only_tested else ():
            self.check_steps(fact.worker, fact.steps)
        return self.start(rows)

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        x, is_inner = state["x"], state["is_inner"]  # is_inner: whether the row is at x'
        torch.where(is_inner, x, rows, out=x)
        rates = torch.full_like(rows[..., :1], self.inner_lr).masked_fill_(is_inner, self.lr)
        torch.addcmul(x, rates, gradients, value=-1, out=rows)
        is_inner.logical_not_()

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        rows.copy_(torch.where(state["is_inner"], state["x"], rows))
        return {}
