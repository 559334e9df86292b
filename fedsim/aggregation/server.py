"""Server optimizers: how the aggregated update moves the global row.

A server optimizer is a frozen dataclass that derives from `ServerStep`; its fields are its configuration. It stands
to the aggregated update D as a local solver stands to minus the gradient. Everything it does is element by element
and in place, over tensors of any shape [..., d], so a slice of columns can be stepped by itself. Cost: a few passes
over [d] and, for each tensor of its state and for one or two it works with, as much memory as the row has.

FedOpt's adaptive optimizers are in `fedsim.aggregation.fedopt`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.local import Decay, NonNegative, Positive, State
from fedsim.registry import Plug, Registry


class ServerStep(ABC):
    """What the engines ask of a server optimizer; the defaults are those of one that keeps nothing."""

    def start(self, rows: Tensor) -> State:
        """State for a global row that has not moved yet: tensors of the same shape, dtype and device."""
        return {}

    @abstractmethod
    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        """Move the global row (or a slice of its columns) by the aggregated update, in place.

        Changes `rows` and `state`, not `update`, which is measured from what the workers were sent.
        """

    def broadcast(self, rows: Tensor, state: State) -> Tensor:
        """What the workers are sent: the global row itself, unless an optimizer has them start elsewhere.

        A function of `rows` and `state` that changes neither; its result may be `rows` and is only to be read. Between
        two steps it always gives the same, so it need not be kept for the updates to be measured from it.
        """
        return rows


class ServerRegistry(Registry):
    """A Registry of what the engines can work with: dataclasses that derive from ServerStep."""

    def _plug(self, name: str, target: Callable[..., Any]) -> Plug:
        kind = target if isinstance(target, type) else type(target)
        if not (issubclass(kind, ServerStep) and is_dataclass(kind)):
            raise TypeError("must be a dataclass that derives from fedsim.aggregation.ServerStep")
        return super()._plug(name, target)


server_optimizer = ServerRegistry("server optimizer")


@server_optimizer("sgd")
@dataclass(frozen=True)
class ServerSGD(ServerStep):
    """w += lr D; with lr 1 the new global row is the aggregate of the workers' rows (McMahan et al. 2017).

    lr >= 0. Cost: one pass over [d], and no state.
    """

    lr: NonNegative = 1.0

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        rows.add_(update, alpha=self.lr)


@server_optimizer("momentum")
@dataclass(frozen=True)
class ServerMomentum(ServerStep):
    """FedAvgM: v = beta v + D; w += lr v  (Nesterov: w += lr (D + beta v)). Hsu et al. 2019.

    0 <= beta < 1. The same as `torch.optim.SGD` with the gradient -D. Cost: a few passes over [d]; v [d] is kept.
    """

    lr: NonNegative = 1.0
    beta: Decay = 0.9
    nesterov: bool = False

    def start(self, rows: Tensor) -> State:
        return {"v": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        _momentum_step(rows, update, state["v"], self.lr, self.beta, nesterov=self.nesterov)


@server_optimizer("diloco")
@dataclass(frozen=True)
class ServerDiLoCo(ServerStep):
    """DiLoCo's outer step, Nesterov momentum: v = beta v + D; w += lr (D + beta v). Douillard et al. 2023.

    0 <= beta < 1. It is `momentum` with `nesterov` and other defaults; workers are meant to train with AdamW for long.
    Cost: a few passes over [d]; v [d] is kept.
    """

    lr: NonNegative = 0.7
    beta: Decay = 0.9

    def start(self, rows: Tensor) -> State:
        return {"v": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        _momentum_step(rows, update, state["v"], self.lr, self.beta, nesterov=True)


def _momentum_step(rows: Tensor, update: Tensor, velocity: Tensor, lr: float, beta: float, *, nesterov: bool) -> None:
    velocity.mul_(beta).add_(update)
    rows.add_(update.add(velocity, alpha=beta) if nesterov else velocity, alpha=lr)


@server_optimizer("slowmo")
@dataclass(frozen=True)
class ServerSlowMo(ServerStep):
    """Slow momentum: u = beta u - D / lr; w -= alpha lr u, with the workers' learning rate lr. Wang et al. 2020.

    0 <= beta < 1, lr > 0. With the constant rate there is here, lr cancels: whatever it is, the row moves as under
    `momentum` with lr = alpha (up to rounding), and only the state u is in other units, those of a gradient.
    Cost: a few passes over [d]; u [d] is kept.
    """

    alpha: NonNegative = 1.0
    beta: Decay = 0.5
    lr: Positive = 1.0

    def start(self, rows: Tensor) -> State:
        return {"u": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        momentum = state["u"].mul_(self.beta).sub_(update, alpha=1 / self.lr)
        rows.sub_(momentum, alpha=self.alpha * self.lr)


@server_optimizer("bmuf")
@dataclass(frozen=True)
class ServerBMUF(ServerStep):
    """Blockwise model-update filtering: delta = bm delta + zeta D; w += delta. Chen and Huo 2016.

    0 <= bm < 1, the block momentum. With n workers in every round bm = 1 - 1/n is the paper's advice (and zeta = 1);
    an optimizer does not know n, and the default is that of 10 workers.

    With `nesterov` the workers are sent w + bm delta, and D is measured from there; w is what is kept and tested.
    Cost: a few passes over [d]; delta [d] is kept.
    """

    bm: Decay = 0.9
    zeta: NonNegative = 1.0
    nesterov: bool = False

    def start(self, rows: Tensor) -> State:
        return {"delta": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        rows.add_(state["delta"].mul_(self.bm).add_(update, alpha=self.zeta))

    def broadcast(self, rows: Tensor, state: State) -> Tensor:
        return rows.add(state["delta"], alpha=self.bm) if self.nesterov else rows
