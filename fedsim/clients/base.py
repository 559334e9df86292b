"""Client algorithms: how a worker's row moves along its gradient.

A client algorithm is a frozen dataclass; its fields are its configuration. `start` returns the state of the steps,
`step` moves rows in place. Both are element-wise over tensors of any shape [..., d], so the same code works on a row, a
stack of rows and a slice of columns. A count of steps is therefore a tensor of the row's shape. Each round makes a new
state.
"""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass, replace
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from fedsim.core.registry import Registration, Registry
from fedsim.core.suggestions import nearest

GIVEN = ("model", "batches", "worker")  # to functions that train a model


class ClientAlgorithmRegistry(Registry):
    """Algorithms are dataclasses, or functions `train(model, batches, ...)`; see `fedsim.clients.adapters`."""

    def _registration(self, name: str, target: Any) -> Registration:
        if isinstance(target, type) and issubclass(target, Optimizer):
            hint = nearest(target.__name__.lower(), self.names())
            raise TypeError(
                f"is an optimizer of PyTorch, not a client algorithm, which moves many rows at once; {hint}"
            )
        registration = super()._registration(name, target)
        if is_dataclass(target):
            return registration
        parameters = () if isinstance(target, type) else inspect.signature(target).parameters
        if not {"model", "batches"}.issubset(parameters):
            raise TypeError(
                "is neither a dataclass that derives from fedsim.clients.ClientAlgorithm nor a function of model and "
                "batches, as train(model, batches, lr); see docs/how-to/own-client-algorithm.md"
            )
        return replace(registration, takes={name: True for name in GIVEN if name in parameters})


client_algorithm = ClientAlgorithmRegistry("client algorithm")

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]

State = dict[str, Tensor]


class OuterProductGrad(NamedTuple):
    """Gradients of stacked weights as factors: left^T right, [k, o, i].

    Attributes:
        left: [k, m, o], gradients of the loss by the layer's outputs.
        right: [k, m, i], inputs of the layer.
    """

    left: Tensor
    right: Tensor

    def computed(self) -> Tensor:
        return torch.bmm(self.left.mT, self.right)

    def add_to(self, weights: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
        """weights = beta weights + alpha left^T right, in one pass over the weights [k, o, i]."""
        weights.baddbmm_(self.left.mT, self.right, beta=beta, alpha=alpha)


class Stepper(Protocol):
    """The methods that every client algorithm has; `fedsim.clients.ClientAlgorithm` has the optional ones too."""

    def start(self, rows: Tensor) -> State:
        """Return the state for rows [..., d] that have not moved: tensors of the same shape."""

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move `rows` one step in place; `gradients` and `state` may change too."""


class RowOptimizer:
    """A client algorithm of one row, with the methods `zero_grad` and `step` of a `torch.optim.Optimizer`.

    The module must be bound to `row` and `gradient` (see `fedsim.core.rows.bind`).

    Args:
        state: of the client algorithm; by default `algorithm.start(row)`.
    """

    def __init__(self, algorithm: Stepper, row: Tensor, gradient: Tensor, state: State | None = None) -> None:
        self._algorithm, self._row, self._gradient = algorithm, row, gradient
        self._state = algorithm.start(row) if state is None else state

    def zero_grad(self) -> None:
        self._gradient.zero_()

    def step(self) -> None:
        self._algorithm.step(self._row, self._gradient, self._state)
