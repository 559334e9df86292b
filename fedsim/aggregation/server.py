"""Server optimizers: how the aggregated update moves the global row.

A server optimizer is a frozen dataclass like a local solver, with the aggregated update D in the gradient's place:
`start(rows)` gives its state, `step(rows, update, state)` moves the global row in place, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedsim.local import NonNegative, State
from fedsim.registry import Registry

server_optimizer = Registry("server optimizer")


class ServerStep(Protocol):
    """What the engines ask of a server optimizer."""

    def start(self, rows: Tensor) -> State:
        """State for a global row that has not moved yet: tensors of the same shape."""

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        """Move the global row (or a slice of its columns) by the aggregated update, in place."""


@server_optimizer("sgd")
@dataclass(frozen=True)
class ServerSGD:
    """w += lr D; with lr 1 the new global row is the aggregate of the workers' rows."""

    lr: NonNegative = 1.0

    def start(self, rows: Tensor) -> State:
        return {}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        rows.add_(update, alpha=self.lr)


@server_optimizer("momentum")
@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM: v = momentum v + D; w += lr v  (Nesterov: w += lr (D + momentum v)). Hsu et al. 2019."""

    lr: NonNegative = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False

    def start(self, rows: Tensor) -> State:
        return {"momentum": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        velocity = state["momentum"].mul_(self.momentum).add_(update)
        rows.add_(update.add(velocity, alpha=self.momentum) if self.nesterov else velocity, alpha=self.lr)
