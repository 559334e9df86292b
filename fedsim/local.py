"""Local solvers: how a row moves along its gradient.

A solver is a frozen dataclass; its fields are its configuration. `start` gives the state that the first step needs,
`step` moves rows in place. Both are element-wise over tensors of any shape [..., d], so one row, a stack of rows or
a slice of columns take the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.registry import Registry

solver = Registry("local solver")

NonNegative = Annotated[float, Field(ge=0)]

State = dict[str, Tensor]


class Solver(Protocol):
    """What the engines ask of a local solver."""

    def start(self, rows: Tensor) -> State:
        """State for rows [..., d] that have not moved yet: tensors of the same shape."""

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move `rows` one step, in place; may also change `gradients` and `state`."""


@solver("sgd")
@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as in `torch.optim.SGD`.

    g = gradient + weight_decay w;  v = momentum v + g;  w -= lr v  (Nesterov: w -= lr (g + momentum v)).

    One difference: a parameter that a step does not use has gradient 0 here, so it decays and coasts, where
    `torch.optim.SGD` finds no gradient and passes it over.
    """

    lr: NonNegative = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
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


class RowOptimizer:
    """A solver at work on one row, with the two methods of a `torch.optim.Optimizer` that a training step calls.

    The module must be bound to `row` and `gradient` (see `fedsim.rows.bind`).
    """

    def __init__(self, solver: Solver, row: Tensor, gradient: Tensor) -> None:
        self._solver, self._row, self._gradient = solver, row, gradient
        self._state = solver.start(row)

    def zero_grad(self) -> None:
        self._gradient.zero_()

    def step(self) -> None:
        self._solver.step(self._row, self._gradient, self._state)
