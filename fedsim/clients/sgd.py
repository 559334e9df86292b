"""Stochastic gradient descent, plain and with FedProx's proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm
from fedsim.clients.solver import Decay, NonNegative, OuterProductGrad, State, solver
from fedsim.errors import ExperimentError


@solver("sgd")
@dataclass(frozen=True)
class SGD(ClientAlgorithm):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as in `torch.optim.SGD`.

    g = gradient + weight_decay w;  v = momentum v + g;  w -= lr v  (Nesterov: w -= lr (g + momentum v)).

    A parameter that a step does not use has gradient 0 here, so weight decay and momentum still move it;
    `torch.optim.SGD` skips it. Robbins and Monro 1951.

    Args:
        lr: learning rate, >= 0.
        momentum: 0 <= momentum < 1.
        weight_decay: >= 0.
        nesterov: needs momentum > 0.

    Cost: a few passes over the row [d]; with momentum a state of [d].

    >>> row = torch.tensor([1.0])
    >>> solver = fedsim.clients.SGD(lr=0.1)
    >>> solver.step(row, torch.tensor([2.0]), solver.start(row))
    >>> row
    tensor([0.8000])
    """

    lr: NonNegative = 0.05
    momentum: Decay = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ExperimentError("local.nesterov = true: needs local.momentum > 0")

    def start(self, rows: Tensor) -> State:
        return {"momentum": torch.zeros_like(rows)} if self.momentum else {}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.weight_decay:
            gradients.add_(rows, alpha=self.weight_decay)
        direction = gradients
        if self.momentum:
            velocity = state["momentum"].mul_(self.momentum).add_(gradients)
            direction = gradients.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        rows.add_(direction, alpha=-self.lr)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        if self.nesterov:  # goes along the gradient twice
            self.step(rows, product.computed(), state)
        elif self.momentum:
            velocity = state["momentum"]
            product.add_to(velocity, beta=self.momentum)
            if self.weight_decay:
                velocity.add_(rows, alpha=self.weight_decay)
            rows.add_(velocity, alpha=-self.lr)
        else:
            product.add_to(rows, beta=1 - self.lr * self.weight_decay, alpha=-self.lr)


@solver("fedprox")
@dataclass(frozen=True)
class FedProx(SGD):
    """SGD on the loss plus mu / 2 |w - w_start|^2, which keeps a worker near the global row. Li et al. 2020.

    The gradient is gradient + mu (w - w_start), otherwise it is `sgd`; with mu = 0 it is `sgd` to the bit. w_start is
    the row at the start of a worker's round.

    Args:
        mu: >= 0.
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as sgd, with another state of [d] and two more passes over the row.

    >>> row = torch.tensor([1.0])
    >>> solver = fedsim.clients.FedProx(lr=0.5, mu=1.0)
    >>> state = solver.start(row)
    >>> for _ in range(2):
    ...     solver.step(row, torch.tensor([1.0]), state)
    >>> row
    tensor([0.2500])
    """

    mu: NonNegative = 0.01
    uses_start_row: ClassVar[bool] = True

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **({"start": rows.clone()} if self.mu else {})}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.mu:
            gradients.add_(rows - state["start"], alpha=self.mu)
        super().step(rows, gradients, state)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        if self.mu:
            self.step(rows, product.computed(), state)
        else:
            super().step_fused(rows, product, state)
