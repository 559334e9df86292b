"""Server optimizers: how the aggregated update moves the global row.

A server optimizer is a frozen dataclass that derives from `ServerStep`; its fields are its configuration. It uses the
aggregated update D as a local solver uses minus the gradient. All methods are element-wise and in place, over tensors
of any shape [..., d], so a slice of columns can be stepped by itself. `fedsim.server.fedopt` has FedOpt's optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients import Decay, NonNegative, Positive, State
from fedsim.core.registry import Registry


class ServerStep(ABC):
    """The interface of server optimizers; the defaults are those of an optimizer without state."""

    def start(self, rows: Tensor) -> State:
        """The state for a global row that has not moved: tensors of the same shape, dtype and device."""
        return {}

    @abstractmethod
    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        """Move the global row, or some of its columns, by the aggregated update, in place.

        Changes `rows` and `state`. `update` is relative to the row that the workers were sent, and stays unchanged.
        """

    def broadcast(self, rows: Tensor, state: State) -> Tensor:
        """The row that the workers are sent: the global row itself, unless an optimizer overrides this.

        Changes neither argument; the result may be `rows` and is read-only. Between two steps it is always the same.
        """
        return rows


server_optimizer = Registry("server optimizer", base=ServerStep)


@server_optimizer("sgd")
@dataclass(frozen=True)
class ServerSGD(ServerStep):
    """w += lr D; with lr = 1 the new global row is the aggregate of the workers' rows (McMahan et al. 2017).

    Args:
        lr: >= 0.

    Cost: one pass over [d], no state.

    >>> server = fedsim.ServerOptimizer("sgd", lr=0.5)
    >>> server.step(torch.tensor([1.0]), torch.tensor([4.0]))
    tensor([3.])
    """

    lr: NonNegative = 1.0

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        rows.add_(update, alpha=self.lr)


class MomentumStep(ServerStep):
    """The common part of momentum and diloco: v = beta v + D; w += lr v, or w += lr (D + beta v) with Nesterov."""

    lr: float
    beta: float
    nesterov: bool

    def start(self, rows: Tensor) -> State:
        return {"v": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        velocity = state["v"].mul_(self.beta).add_(update)
        rows.add_(update.add(velocity, alpha=self.beta) if self.nesterov else velocity, alpha=self.lr)


@server_optimizer("momentum")
@dataclass(frozen=True)
class ServerMomentum(MomentumStep):
    """FedAvgM: v = beta v + D; w += lr v  (Nesterov: w += lr (D + beta v)). Hsu et al. 2019.

    It is `torch.optim.SGD` with the gradient -D.

    Args:
        lr: >= 0.
        beta: momentum, 0 <= beta < 1.
        nesterov: use Nesterov momentum.

    Cost: a few passes over [d]; state v [d].

    >>> server = fedsim.ServerOptimizer("momentum", beta=0.5)
    >>> row = server.step(torch.tensor([0.0]), torch.tensor([2.0]))
    >>> server.step(row, torch.tensor([0.0]))
    tensor([3.])
    """

    lr: NonNegative = 1.0
    beta: Decay = 0.9
    nesterov: bool = False


@server_optimizer("diloco")
@dataclass(frozen=True)
class ServerDiLoCo(MomentumStep):
    """DiLoCo's outer step, Nesterov momentum: v = beta v + D; w += lr (D + beta v). Douillard et al. 2023.

    It is `momentum` with `nesterov` and other defaults, for workers that train many steps with AdamW.

    Args:
        lr: >= 0.
        beta: momentum, 0 <= beta < 1.

    Cost: a few passes over [d]; state v [d].

    >>> fedsim.ServerOptimizer("diloco", lr=1.0, beta=0.5).step(torch.tensor([0.0]), torch.tensor([2.0]))
    tensor([3.])
    """

    lr: NonNegative = 0.7
    beta: Decay = 0.9
    nesterov = True  # no annotation, so it is not a parameter


@server_optimizer("slowmo")
@dataclass(frozen=True)
class ServerSlowMo(ServerStep):
    """Slow momentum: u = beta u - D / lr; w -= alpha lr u, with the workers' learning rate lr. Wang et al. 2020.

    A constant lr cancels up to rounding: the row moves as under `momentum` with lr = alpha, and u has the units of a
    gradient. If `local.schedule` changes the workers' rate, give `server.schedule` the same values.

    Args:
        alpha: slow learning rate, >= 0.
        beta: momentum, 0 <= beta < 1.
        lr: the workers' learning rate, > 0.

    Cost: a few passes over [d]; state u [d].

    >>> fedsim.ServerOptimizer("slowmo", lr=0.25).step(torch.tensor([0.0]), torch.tensor([2.0]))
    tensor([2.])
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

    Args:
        bm: block momentum, 0 <= bm < 1. The paper advises 1 - 1 / n for n workers; the default is that of 10 workers.
        zeta: block learning rate, >= 0; 1 in the paper.
        nesterov: send the workers w + bm delta, from which D is measured; w is evaluated.

    Cost: a few passes over [d]; state delta [d].

    >>> server = fedsim.ServerOptimizer("bmuf", bm=0.5, nesterov=True)
    >>> row = server.step(torch.tensor([0.0]), torch.tensor([2.0]))
    >>> row, server.broadcast(row)
    (tensor([2.]), tensor([3.]))
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
