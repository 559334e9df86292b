"""MimeLite and Mime: local steps with the server's momentum, which stays the same during a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.solver import Decay, NonNegative, OuterProductGrad, State, solver


@solver("mimelite")
@dataclass(frozen=True)
class MimeLite(ClientAlgorithm):
    """Local steps with the momentum m of the server. Karimireddy et al. 2020, with SGD with momentum.

    x -= lr ((1 - beta) gradient + beta m), at every local step. After the round m = beta m + (1 - beta) c, where c is
    the mean of the cohort's full gradients: of all samples of a worker, at the row that it was sent. With beta = 0 it
    is `sgd` to the bit.

    Args:
        lr: learning rate, >= 0.
        beta: decay of m, 0 <= beta < 1.

    Cost: one pass over a worker's samples in each round, in which it also receives and sends a row [d]; a state of [d].

    >>> row, solver = torch.tensor([1.0]), fedsim.clients.MimeLite(lr=0.5, beta=0.5)
    >>> solver.step(row, torch.tensor([2.0]), {"momentum": torch.tensor([-2.0])})
    >>> row
    tensor([1.])
    """

    lr: NonNegative = 0.05
    beta: Decay = 0.9
    full_gradient: ClassVar[bool] = True

    def server_state(self, row: Tensor) -> State:
        return {"momentum": torch.zeros_like(row)}

    def message(self, row: Tensor) -> State:
        return {"full_gradient": torch.zeros_like(row)}

    def start(self, rows: Tensor) -> State:
        return {"momentum": torch.zeros_like(rows)}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {"momentum": worker.received["momentum"].expand_as(rows).clone()}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        rows.add_(gradients, alpha=-self.lr * (1 - self.beta)).add_(state["momentum"], alpha=-self.lr * self.beta)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        product.add_to(rows, alpha=-self.lr * (1 - self.beta))
        rows.add_(state["momentum"], alpha=-self.lr * self.beta)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        assert worker.full_gradient is not None
        return {"full_gradient": worker.full_gradient}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        server["momentum"].lerp_(sums["full_gradient"] / workers, 1 - self.beta)


@solver("mime")
@dataclass(frozen=True)
class Mime(MimeLite):
    """MimeLite with gradients corrected as in SVRG. Karimireddy et al. 2020, with SGD with momentum.

    It replaces the gradient of a batch at x by gradient at x - gradient at w + c. w is the row that the worker was
    sent; c, which the server sends too, is the mean of the cohort's full gradients at w. Workers that drop out
    (`worker_dropout`) do not report, so c is the mean over the others. Local training for an evaluation has no cohort
    but the worker itself: w is the row that it begins with, and c the worker's own full gradient at w.

    Args:
        lr: learning rate, >= 0.
        beta: decay of m, 0 <= beta < 1.

    Cost: two gradients a step, and one pass over a worker's samples in each round, in which it also receives two rows
    [d] and sends one; three states of [d]. The workers send their gradients before any of them takes a step.

    >>> row, solver = torch.tensor([1.0]), fedsim.clients.Mime(lr=0.5, beta=0.0)
    >>> state = {"start": torch.tensor([3.0]), "mean_gradient": torch.tensor([4.0]), "momentum": torch.tensor([0.0])}
    >>> solver.step_rows(row, row.clone(), state, gradient_at=lambda point: point)
    >>> row
    tensor([0.])
    """

    element_wise: ClassVar[bool] = False
    gradients_per_step: ClassVar[int] = 2
    uses_start_row: ClassVar[bool] = True

    def server_state(self, row: Tensor) -> State:
        return {"momentum": torch.zeros_like(row), "mean_gradient": torch.zeros_like(row)}

    def message(self, row: Tensor) -> State:
        return {}

    def numbers_sent(self, d: int) -> tuple[int, int]:
        return 2 * d, d

    def receive_gradients(self, server: State, mean: Tensor) -> None:
        server["mean_gradient"].copy_(mean)

    def start(self, rows: Tensor) -> State:
        return {"momentum": torch.zeros_like(rows), "mean_gradient": torch.zeros_like(rows), "start": rows.clone()}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        state = {name: tensor.expand_as(rows).clone() for name, tensor in worker.received.items()}
        if worker.only_tested:  # the mean gradient of the last cohort is of an earlier row
            assert worker.full_gradient is not None
            state["mean_gradient"] = worker.full_gradient.clone()
        return {**state, "start": rows.clone()}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        gradients.sub_(gradient_at(state["start"])).add_(state["mean_gradient"])
        self.step(rows, gradients, state)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        return {}

    def correct(self, update: Tensor, server: State, workers: int, population: int) -> None:
        server["momentum"].lerp_(server["mean_gradient"], 1 - self.beta)  # the update stays as it is
