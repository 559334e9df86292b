"""Local solvers: how a row moves along its gradient.

A solver is a frozen dataclass; its fields are its configuration. `start` gives the state that the first step needs,
`step` moves rows in place. Both are element-wise over tensors of any shape [..., d], so one row, a stack of rows or
a slice of columns take the same code. What is one number for a whole row, such as a count of steps, is for that reason
kept as a tensor of the row's shape. Workers start afresh in every round.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedsim.registry import Registry

solver = Registry("local solver")

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]

State = dict[str, Tensor]


class Product(NamedTuple):
    """Gradients of a stack of weights that have not been computed: left^T right, [k, o, i].

    Attributes:
        left: [k, m, o], of the loss by the outputs of the layer that the weights belong to.
        right: [k, m, i], inputs of that layer.
    """

    left: Tensor
    right: Tensor

    def computed(self) -> Tensor:
        return torch.bmm(self.left.mT, self.right)

    def add_to(self, weights: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
        """weights = beta weights + alpha left^T right, in one pass over the weights [k, o, i]."""
        weights.baddbmm_(self.left.mT, self.right, beta=beta, alpha=alpha)


class Solver(Protocol):
    """What the engines ask of a local solver."""

    def start(self, rows: Tensor) -> State:
        """State for rows [..., d] that have not moved yet: tensors of the same shape."""

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move `rows` one step, in place; may also change `gradients` and `state`."""

    # A solver may also have `step_of_product(rows, product, state)`: the same step for weights [k, o, i], without ever
    # computing their gradients, which would be written to memory and read again. One that goes by the row at `start`
    # says so by `anchored = True`: it has no meaning where gradients are aggregated, since nobody leaves that row.


def step_along(solver: Solver, rows: Tensor, gradients: Tensor | Product, state: State) -> None:
    """A solver's step along gradients that may not have been computed."""
    if isinstance(gradients, Tensor):
        solver.step(rows, gradients, state)
    elif hasattr(solver, "step_of_product"):
        solver.step_of_product(rows, gradients, state)
    else:
        solver.step(rows, gradients.computed(), state)


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
