"""Server optimizers: how the aggregated update moves the global row.

A server optimizer is a frozen dataclass that derives from `ServerStep`; its fields are its configuration. It uses the
aggregated update D as a client algorithm uses minus the gradient. All methods are element-wise and in place, over
tensors of any shape [..., d], so a slice of columns can be stepped by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.clients import Decay, NonNegative, Positive, State
from fedsim.clients.adaptive import averaged_weight
from fedsim.core.registry import Registry
from fedsim.errors import ExperimentError


class ServerStep(ABC):
    """The interface of server optimizers; the defaults are those of an optimizer without state."""

    def start(self, rows: Tensor) -> State:
        """Return the state for a global row that has not moved: tensors of the same shape, dtype and device."""
        return {}

    @abstractmethod
    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        """Move the global row, or some of its columns, by the aggregated update, in place.

        Changes `rows` and `state`. `update` is relative to the row that the workers were sent, and stays unchanged.
        """

    def broadcast(self, rows: Tensor, state: State) -> Tensor:
        """Return the row that the workers are sent: the global row itself, unless an optimizer overrides this.

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


@dataclass(frozen=True)
class AdaptiveStep(ServerStep):
    """The common part of adam, yogi and adagrad: FedOpt, adaptive server optimizers (Reddi et al. 2021, Algorithm 2).

    All three keep a mean m of the updates and per coordinate a mean v of their squares:

        m = beta1 m + (1 - beta1) D        w += lr m / (sqrt(v) + tau)

    They differ in v. tau > 0 keeps the quotient finite; a larger tau makes the step less adaptive.

    Args:
        lr: the server's learning rate, >= 0; the paper tunes it to each task.
        beta1: decay of m, 0 <= beta1 < 1.
        tau: > 0.
        v0: start of v, >= 0, or "tau^2", the least value that the paper's analysis allows.
        bias_correction: divide m by 1 - beta1^t after t steps (and v by 1 - beta2^t if there is a beta2), as Adam does
            for a single process; the paper does not.
    """

    lr: NonNegative = 0.1
    beta1: Decay = 0.9
    _: KW_ONLY  # so that beta2 of a subclass follows beta1
    tau: Positive = 1e-3
    v0: NonNegative | Literal["tau^2"] = 0.0
    bias_correction: bool = False

    def start(self, rows: Tensor) -> State:
        v0 = self.tau**2 if self.v0 == "tau^2" else self.v0
        state = {"m": torch.zeros_like(rows), "v": torch.full_like(rows, v0)}
        if self.bias_correction:
            state |= {f"{name}_weight": torch.zeros_like(rows) for name in self.decays}
        return state

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        state["m"].mul_(self.beta1).add_(update, alpha=1 - self.beta1)
        self.accumulate(state["v"], update)
        means = dict(state)
        if self.bias_correction:
            for name, decay in self.decays.items():
                means[name] = state[name] / averaged_weight(state[f"{name}_weight"], decay)
        rows.addcdiv_(means["m"], means["v"].sqrt().add_(self.tau), value=self.lr)

    @abstractmethod
    def accumulate(self, v: Tensor, update: Tensor) -> None:
        """Update v in place."""

    @property
    def decays(self) -> dict[str, float]:
        """The decay of each mean that `bias_correction` corrects."""
        return {"m": self.beta1}


@dataclass(frozen=True)
class DecayingStep(AdaptiveStep):
    """The common part of adam and yogi: v decays, so steps do not become shorter."""

    lr: NonNegative = 0.03
    beta2: Decay = 0.99

    def __post_init__(self) -> None:
        if self.bias_correction and self.v0 != 0:
            raise ExperimentError(
                f"server.bias_correction = true: needs a v that starts at 0, but server.v0 = {self.v0}"
            )

    @property
    def decays(self) -> dict[str, float]:
        return {"m": self.beta1, "v": self.beta2}


@server_optimizer("adam")
@dataclass(frozen=True)
class ServerAdam(DecayingStep):
    """FedAdam: v = beta2 v + (1 - beta2) D^2; w += lr m / (sqrt(v) + tau). Reddi et al. 2021.

    Args:
        beta2: decay of v, 0 <= beta2 < 1.
        lr, beta1, tau, v0, bias_correction: see `AdaptiveStep`; bias_correction needs v0 = 0.

    Cost: a few passes over [d]; state m and v [d].

    >>> server = fedsim.ServerOptimizer("adam", lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)
    >>> server.step(torch.zeros(1), torch.ones(1))
    tensor([0.3333])
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        v.mul_(self.beta2).addcmul_(update, update, value=1 - self.beta2)


@server_optimizer("yogi")
@dataclass(frozen=True)
class ServerYogi(DecayingStep):
    """FedYogi: as adam with v -= (1 - beta2) D^2 sign(v - D^2), which changes v more slowly. Reddi et al. 2021.

    m = beta1 m + (1 - beta1) D; w += lr m / (sqrt(v) + tau).

    Args:
        beta2: decay of v, 0 <= beta2 < 1.
        lr, beta1, tau, v0, bias_correction: see `AdaptiveStep`; bias_correction needs v0 = 0.

    Cost: a few passes over [d]; state m and v [d].

    >>> fedsim.ServerOptimizer("yogi", lr=1.0, beta1=0.5, beta2=0.75, tau=1.0).step(torch.zeros(1), torch.ones(1))
    tensor([0.3333])
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        square = update.square()
        v.addcmul_(square, (v - square).sign_(), value=self.beta2 - 1)


@server_optimizer("adagrad")
@dataclass(frozen=True)
class ServerAdagrad(AdaptiveStep):
    """FedAdagrad: as adam with v += D^2. Reddi et al. 2021.

    m = beta1 m + (1 - beta1) D; w += lr m / (sqrt(v) + tau). The paper's experiments have beta1 = 0.

    Args:
        lr, beta1, tau, v0, bias_correction: see `AdaptiveStep`; bias_correction changes m alone.

    Cost: a few passes over [d]; state m and v [d].

    >>> fedsim.ServerOptimizer("adagrad", lr=1.0, beta1=0.0, tau=1.0).step(torch.zeros(1), torch.ones(1))
    tensor([0.5000])
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        v.addcmul_(update, update)
