"""APFL: a personal model of each worker, mixed with the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsim.clients.algorithm import GradientAt, WorkerRound
from fedsim.clients.sgd import LocalSGD
from fedsim.clients.solver import State, solver


@solver("apfl")
@dataclass(frozen=True)
class APFL(LocalSGD):
    """Adaptive personalized federated learning: a mixture of a local and the global model. Deng et al. 2020.

    The row x takes the steps of `sgd`. The worker's own v, which it keeps, is trained within the mixture
    u = alpha v + (1 - alpha) x: at each step v -= lr alpha (gradient at u). The personal model is the
    mixture of v and the global model. Its BatchNorm statistics and other buffers stay with the worker, and follow the
    forward passes at u alone.

    Args:
        alpha: share of v, 0 <= alpha <= 1. With 0 the row moves as under `sgd`, and v does not move.
        adaptive: each worker keeps an alpha of its own, from `alpha` on, and at each step moves it along its gradient:
            alpha -= lr <v - x, gradient at u>, kept within [0, 1].
        lr, momentum, weight_decay, nesterov, dampening: see `SGD`; of these only lr applies to v and alpha.

    Cost: two gradients a step; a state of [d], and v [d] for each worker that has taken part.

    >>> row, solver = torch.tensor([1.0]), fedsim.clients.APFL(lr=0.5, alpha=0.5)
    >>> state = {"personal": torch.tensor([3.0])}
    >>> solver.step_rows(row, row.clone(), state, gradient_at=lambda point: point)
    >>> row, state["personal"]
    (tensor([0.5000]), tensor([2.5000]))
    """

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    adaptive: bool = False
    element_wise: ClassVar[bool] = False
    personal_beside: ClassVar[bool] = True
    gradients_per_step: ClassVar[int] = 2

    def worker_state(self, row: Tensor) -> State:
        return self._personal(row)

    def _personal(self, rows: Tensor) -> State:
        shares = {"alpha": torch.full_like(rows[..., :1], self.alpha)} if self.adaptive else {}
        return {"personal": rows.clone(), **shares}

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **self._personal(rows)}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {**super().start(rows), **{name: kept.clone() for name, kept in worker.kept.items()}}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        personal, alpha = state["personal"], state.get("alpha", self.alpha)
        slope = gradient_at(self.personal_rows(rows, state))
        along_alpha = ((personal - rows) * slope).sum(-1, keepdim=True) if self.adaptive else None
        personal.sub_(slope.mul_(alpha), alpha=self.lr)
        if along_alpha is not None:
            state["alpha"].sub_(along_alpha, alpha=self.lr).clamp_(0, 1)
        self.step(rows, gradients, state)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept.update({name: state[name] for name in worker.kept})
        return {}

    def personal_rows(self, rows: Tensor, kept: State) -> Tensor:
        alpha = kept.get("alpha", self.alpha)
        return alpha * kept["personal"] + (1 - alpha) * rows
