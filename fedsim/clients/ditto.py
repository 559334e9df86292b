"""Ditto: federated averaging, and a personal model of each worker near the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedsim.clients.algorithm import GradientAt, WorkerRound
from fedsim.clients.sgd import LocalSGD
from fedsim.clients.solver import NonNegative, State, solver


@solver("ditto")
@dataclass(frozen=True)
class Ditto(LocalSGD):
    """Federated averaging, and a personal model that is pulled to the global one. Li et al. 2021.

    The row takes the steps of `sgd`. At each step the worker's personal model v, which it keeps, takes a step on the
    same batch: v -= lr (gradient at v + lam (v - w)), with the row w that the worker was sent. v is evaluated. Its
    BatchNorm statistics and other buffers stay with the worker too, and follow the forward passes at v alone.

    Args:
        lam: the paper's lambda, >= 0: 0 trains v on the worker's samples alone.
        personal_steps: v takes only so many first steps of a round; None: all.
        lr, momentum, weight_decay, nesterov, dampening: see `SGD`; of these only lr applies to v.

    Cost: two gradients a step; states of [d] for v and w, and v [d] for each worker that has taken part.

    >>> row, solver = torch.tensor([1.0]), fedsim.clients.Ditto(lr=0.5, lam=1.0)
    >>> state = {"start": torch.tensor([1.0]), "personal": torch.tensor([3.0])}
    >>> solver.step_rows(row, torch.tensor([2.0]), state, gradient_at=lambda point: point - 3)
    >>> row, state["personal"]
    (tensor([0.]), tensor([2.]))
    """

    lam: NonNegative = 0.1
    personal_steps: Annotated[int, Field(gt=0)] | None = None
    element_wise: ClassVar[bool] = False
    personal_beside: ClassVar[bool] = True
    gradients_per_step: ClassVar[int] = 2
    uses_start_row: ClassVar[bool] = True

    def gradients(self, steps: int, batches: int) -> int:
        return steps + min(steps, self.personal_steps or steps)

    def worker_state(self, row: Tensor) -> State:
        return {"personal": row.clone()}

    def start(self, rows: Tensor) -> State:
        counts = {"taken": torch.zeros_like(rows[..., :1])} if self.personal_steps else {}
        return {**super().start(rows), **counts, "start": rows.clone(), "personal": rows.clone()}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {**self.start(rows), "personal": worker.kept["personal"].clone()}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        if self._moves_personal(state):
            personal = state["personal"]
            slope = gradient_at(personal).add_(personal - state["start"], alpha=self.lam)
            personal.add_(slope, alpha=-self.lr)
        self.step(rows, gradients, state)

    def _moves_personal(self, state: State) -> bool:
        """Whether v takes this step; all rows of a stack are at the same step."""
        if self.personal_steps is None:
            return True
        taken = state["taken"].add_(1)
        return bool((taken <= self.personal_steps).all())

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept["personal"] = state["personal"]
        return {}

    def personal_rows(self, rows: Tensor, kept: State) -> Tensor:
        return kept["personal"]
