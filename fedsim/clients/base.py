"""Types of client algorithms, and the interface of their optimizer: the methods `start` and `step`.

A client algorithm is a frozen dataclass whose fields are its configuration. `start` returns the optimizer state, and
`step` changes rows (flat parameter vectors) in place. Both are element-wise over tensors of any shape [..., d], so the
same code works on one row, on a stack of rows and on a slice of columns. For this reason a step counter must have the
row's shape. Each round starts with a new state.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


def add_multiple(tensor: Tensor, other: Tensor, factor: float | Tensor) -> Tensor:
    """Add `factor` times `other` to `tensor`, in place. Return `tensor`.

    `factor`: a number, or one number per worker as a tensor [..., 1].
    """
    return tensor.addcmul_(other, factor) if isinstance(factor, Tensor) else tensor.add_(other, alpha=factor)


class OuterProductGrad(NamedTuple):
    """Gradients of a linear layer's weights in k models, stored as two factors: the gradient is left^T right.

    The weights are [k, o, i] for i input and o output features.

    Attributes:
        left: gradients of the loss with respect to the layer's outputs for m samples per model, [k, m, o].
        right: inputs of the layer, [k, m, i].
    """

    left: Tensor
    right: Tensor

    def computed(self) -> Tensor:
        return torch.bmm(self.left.mT, self.right)

    def add_to(self, weights: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
        """Set `weights` [k, o, i] to beta * weights + alpha * gradient, in place."""
        weights.baddbmm_(self.left.mT, self.right, beta=beta, alpha=alpha)


class Stepper(Protocol):
    """Interface of the simplest client algorithms, which have only the methods `start` and `step`."""

    def start(self, rows: Tensor) -> State:
        """Return the optimizer state before the first step: tensors by name, with the shape of `rows`."""

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move the models `rows` by one step, in place. `gradients` and `state` may be changed too."""
