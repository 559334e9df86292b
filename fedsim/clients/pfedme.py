"""pFedMe: personal models by Moreau envelopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.solver import NonNegative, State, solver
from fedsim.core.rows import Layout


@solver("pfedme")
@dataclass(frozen=True)
class PFedMe(ClientAlgorithm):
    """Each step finds a personal model near the row, and moves the row towards it. Dinh et al. 2020.

    theta = x, then `inner_steps` times theta -= lr (gradient at theta + lam (theta - x)), on one batch;
    x -= eta lam (x - theta). The server averages: w = (1 - beta) w + beta (mean of the x). The last theta of a round is
    the personal model; of a worker that has not taken part it is w. BatchNorm statistics and other buffers of theta
    stay with the worker, and follow the forward passes at theta, of which the first one is at x.

    Args:
        lr: learning rate of theta, >= 0.
        eta: learning rate of x, >= 0.
        lam: the paper's lambda, >= 0; lr lam must be small for theta to converge.
        inner_steps: steps of theta for each local step, > 0.
        beta: >= 0; 1 is the plain average.

    Cost: `inner_steps` gradients a step, and another one if the model has buffers; a state of [d], and theta [d] for
    each worker that has taken part.

    >>> row, solver = torch.tensor([2.0]), fedsim.clients.PFedMe(lr=0.5, eta=0.5, lam=1.0, inner_steps=2)
    >>> state = solver.start(row)
    >>> solver.step_rows(row, row.clone(), state, gradient_at=lambda point: point.clone())
    >>> row, state["theta"]
    (tensor([1.5000]), tensor([1.]))
    """

    lr: NonNegative = 0.05
    eta: NonNegative = 0.005
    lam: NonNegative = 15.0
    inner_steps: Annotated[int, Field(gt=0)] = 5
    beta: NonNegative = 1.0
    element_wise: ClassVar[bool] = False
    personal_beside: ClassVar[bool] = True
    starts_from_current: ClassVar[bool] = True
    has_buffers: ClassVar[bool] = False  # of the model

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        return self._copy(has_buffers=bool(Layout.of(module).buffers))

    def with_lr(self, lr: float) -> ClientAlgorithm:
        return self._copy(lr=lr)

    @property
    def gradients_per_step(self) -> int:  # type: ignore[override]
        return self.inner_steps

    def worker_state(self, row: Tensor) -> State:
        return {"theta": row.clone()}

    def start(self, rows: Tensor) -> State:
        return {"theta": rows.clone()}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        theta = state["theta"].copy_(rows)
        for inner_step in range(self.inner_steps):
            slope = gradient_at(theta) if inner_step or self.has_buffers else gradients
            theta.sub_(slope.add_(theta - rows, alpha=self.lam), alpha=self.lr)
        rows.add_(theta - rows, alpha=self.eta * self.lam)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept["theta"] = state["theta"]
        return {}

    def correct(self, update: Tensor, server: State, workers: int, population: int) -> None:
        update.mul_(self.beta)

    def personal_rows(self, rows: Tensor, kept: State) -> Tensor:
        return kept["theta"]
