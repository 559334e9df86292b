"""SCAFFOLD: control variates correct the local steps of workers whose data differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, WorkerRound
from fedsim.clients.solver import NonNegative, OuterProductGrad, Positive, State, solver


@solver("scaffold")
@dataclass(frozen=True)
class Scaffold(ClientAlgorithm):
    """Stochastic controlled averaging: SGD along the gradient - c_k + c. Karimireddy et al. 2020, algorithm 1.

        server sends x and c to the cohort S                                         (c, c_k = 0 at first)
        worker k:  y = x;  for each of its K batches:  y -= lr (gradient(y) - c_k + c)
                   c_k+ = full gradient at x (option 1), or c_k - c + (x - y) / (K lr) (option 2)
                   sends y - x and c_k+ - c_k;  c_k = c_k+
        server:    x += aggregate of the y - x;  c += sum over S of (c_k+ - c_k) / N

    N is the number of workers. The paper averages the updates without weights: `aggregate = "mean"`. Workers who are
    not in the cohort keep their c_k, and so do those who take no step with option 2.

    Args:
        lr: learning rate, > 0.
        weight_decay: >= 0; adds weight_decay y to each gradient, and to the full gradient.
        option: 1 or 2, how a worker renews c_k; 1 costs one more pass over its samples.

    There is no momentum, since option 2 takes (x - y) / (K lr) for a mean of gradients.

    Cost: a row [d] for each worker that has taken part, two more passes over the row in a step, and twice the bytes
    of `sgd` each way.

    >>> algorithm = fedsim.clients.Scaffold(lr=0.1)
    >>> algorithm.numbers_sent(d=3)
    (3, 3)
    """

    lr: Positive = 0.05
    weight_decay: NonNegative = 0.0
    option: Literal[1, 2] = 2

    @property
    def full_gradient(self) -> bool:
        return self.option == 1

    def worker_state(self, row: Tensor) -> State:
        return {"c_k": torch.zeros_like(row)}

    def server_state(self, row: Tensor) -> State:
        return {"c": torch.zeros_like(row)}

    def message(self, row: Tensor) -> State:
        return {"change": torch.zeros_like(row)}

    def start(self, rows: Tensor) -> State:
        return {"start": rows.clone(), "correction": torch.zeros_like(rows)}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {"start": rows.clone(), "correction": worker.received["c"] - worker.kept["c_k"]}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.weight_decay:
            gradients.add_(rows, alpha=self.weight_decay)
        rows.add_(gradients.add_(state["correction"]), alpha=-self.lr)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        product.add_to(rows, beta=1 - self.lr * self.weight_decay, alpha=-self.lr)
        rows.add_(state["correction"], alpha=-self.lr)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        before = worker.kept["c_k"]
        if self.option == 1:
            assert worker.full_gradient is not None
            after = worker.full_gradient + self.weight_decay * state["start"]
        else:
            travelled = worker.steps.to(rows.dtype) * self.lr
            after = state["start"].sub_(rows).div_(travelled).sub_(state["correction"])
            torch.where(travelled > 0, after, before, out=after)
        worker.kept["c_k"] = after
        return {"change": torch.sub(after, before, out=state["correction"])}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        server["c"] += sums["change"] / population
