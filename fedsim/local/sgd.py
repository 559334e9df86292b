"""Stochastic gradient descent, plain and with FedProx's proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.local.solver import Decay, NonNegative, Product, State, solver


@solver("sgd")
@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as in `torch.optim.SGD`.

    g = gradient + weight_decay w;  v = momentum v + g;  w -= lr v  (Nesterov: w -= lr (g + momentum v)).

    One difference: a parameter that a step does not use has gradient 0 here, so it decays and coasts, where
    `torch.optim.SGD` finds no gradient and passes it over.
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

    def step_of_product(self, rows: Tensor, product: Product, state: State) -> None:
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
    """SGD on the loss plus mu / 2 |w - w_start|^2, which holds a worker near what it was sent. Li et al. 2020.

    gradient + mu (w - w_start) in place of the gradient, and all else as in `sgd`, momentum and weight decay included;
    with mu = 0 it is `sgd`, to the bit. w_start is the row at the start of a worker's round. Costs one more row of
    memory and two more passes over the row at each step.
    """

    mu: NonNegative = 0.01
    anchored: ClassVar[bool] = True

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **({"start": rows.clone()} if self.mu else {})}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.mu:
            gradients.add_(rows - state["start"], alpha=self.mu)
        super().step(rows, gradients, state)

    def step_of_product(self, rows: Tensor, product: Product, state: State) -> None:
        if self.mu:
            self.step(rows, product.computed(), state)
        else:
            super().step_of_product(rows, product, state)
