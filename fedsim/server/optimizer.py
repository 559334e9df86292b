"""Server optimizers, which move the global model along the aggregated update.

A server optimizer is a frozen dataclass that derives from `ServerStep`. Its fields are its configuration. It treats the
aggregated update D like a negative gradient. All methods are element-wise and in place, over tensors of any shape
[..., d], so they can be applied to a slice of columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.clients import State
from fedsim.clients.adaptive import averaged_weight
from fedsim.core.numbers import FractionBelowOne, NonNegativeFloat, PositiveFloat
from fedsim.core.registry import Registry
from fedsim.errors import ExperimentError


class ServerStep(ABC):
    """Base class of server optimizers, which move the global model by the aggregated update of the workers."""

    def start(self, rows: Tensor) -> State:
        """Return the optimizer state before the first step: tensors by name, with the shape of `rows`."""
        return {}

    @abstractmethod
    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        """Move the global model by one step, in place.

        Args:
            rows: global model, or some of its columns, which is changed.
            update: aggregated update (difference from the model that the workers received). It must not be changed.
            state: optimizer state, which is changed.
        """

    def broadcast(self, rows: Tensor, state: State) -> Tensor:
        """Return the model that is sent to the workers: by default, the global model `rows` itself.

        The method must not change its arguments, and callers must not change the result.
        """
        return rows


server_optimizer = Registry("server optimizer", base=ServerStep)


@server_optimizer("sgd")
@dataclass(frozen=True)
class ServerSGD(ServerStep):
    """SGD at the server: w += lr D for the global model w and the aggregated update D (McMahan et al. 2017).

    With lr = 1 the new global model is the aggregate of the workers' models.

    Args:
        lr: server learning rate, >= 0.

    Cost: one pass over the model [d], no state.

    >>> server = fedsim.ServerOptimizer("sgd", lr=0.5)
    >>> server.step(torch.tensor([1.0]), torch.tensor([4.0]))
    tensor([3.])
    """

    lr: NonNegativeFloat = 1.0

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        rows.add_(update, alpha=self.lr)


class MomentumStep(ServerStep):
    """Base class of `momentum` and `diloco`: v = beta v + D, w += lr v, or w += lr (D + beta v) with Nesterov.

    D is the aggregated update, and w the global model.
    """

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
    """FedAvgM, momentum at the server: v = beta v + D, w += lr v (Hsu et al. 2019).

    D is the aggregated update, and w the global model. With Nesterov momentum, w += lr (D + beta v). The optimizer
    equals `torch.optim.SGD` with the gradient -D.

    Args:
        lr: server learning rate, >= 0.
        beta: momentum factor, 0 <= beta < 1.
        nesterov: whether to use Nesterov momentum.

    Cost: a few passes over the model [d], and the state v [d].

    >>> server = fedsim.ServerOptimizer("momentum", beta=0.5)
    >>> row = server.step(torch.tensor([0.0]), torch.tensor([2.0]))
    >>> server.step(row, torch.tensor([0.0]))
    tensor([3.])
    """

    lr: NonNegativeFloat = 1.0
    beta: FractionBelowOne = 0.9
    nesterov: bool = False


@server_optimizer("diloco")
@dataclass(frozen=True)
class ServerDiLoCo(MomentumStep):
    """Outer optimizer of DiLoCo, Nesterov momentum: v = beta v + D, w += lr (D + beta v) (Douillard et al. 2023).

    D is the aggregated update, and w the global model. The optimizer is `momentum` with `nesterov = true` and the
    values of OpenDiLoCo (Jaghouar et al. 2024) and torchft. Workers train many steps with AdamW, and keep its state
    between rounds (`local.keep_optimizer_state`), as in section 6.1 of the paper.

    Args:
        lr: server learning rate, >= 0.
        beta: momentum factor, 0 <= beta < 1.

    Cost: a few passes over the model [d], and the state v [d].

    >>> fedsim.ServerOptimizer("diloco", lr=1.0, beta=0.5).step(torch.tensor([0.0]), torch.tensor([2.0]))
    tensor([3.])
    """

    lr: NonNegativeFloat = 0.7
    beta: FractionBelowOne = 0.9
    nesterov = True  # no annotation, so it is not a parameter


@server_optimizer("slowmo")
@dataclass(frozen=True)
class ServerSlowMo(ServerStep):
    """SlowMo, slow momentum: u = beta u - D / lr, w -= alpha lr u (Wang et al. 2020).

    D is the aggregated update, w the global model, and lr the workers' learning rate. If lr is constant, it cancels up
    to rounding, and w moves as under `momentum` with lr = alpha. u is comparable to a gradient, because D is divided by
    lr. If `local.schedule` changes the workers' learning rate, set `server.schedule` to the same values.

    Args:
        alpha: slow learning rate, >= 0.
        beta: momentum factor, 0 <= beta < 1.
        lr: learning rate of the workers, > 0.

    Cost: a few passes over the model [d], and the state u [d].

    >>> fedsim.ServerOptimizer("slowmo", lr=0.25).step(torch.tensor([0.0]), torch.tensor([2.0]))
    tensor([2.])
    """

    alpha: NonNegativeFloat = 1.0
    beta: FractionBelowOne = 0.5
    lr: PositiveFloat = 1.0

    def start(self, rows: Tensor) -> State:
        return {"u": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        momentum = state["u"].mul_(self.beta).sub_(update, alpha=1 / self.lr)
        rows.sub_(momentum, alpha=self.alpha * self.lr)


@server_optimizer("bmuf")
@dataclass(frozen=True)
class ServerBMUF(ServerStep):
    """BMUF, blockwise model-update filtering: delta = bm delta + zeta D, w += delta (Chen and Huo 2016).

    D is the aggregated update, and w the global model.

    Args:
        bm: block momentum, 0 <= bm < 1. The paper recommends 1 - 1 / n for n workers. The default is for 10 workers.
        zeta: block learning rate, >= 0. 1 in the paper.
        nesterov: whether the workers receive w + bm delta instead of w. D is then relative to w + bm delta, but
            evaluations use w.

    Cost: a few passes over the model [d], and the state delta [d].

    >>> server = fedsim.ServerOptimizer("bmuf", bm=0.5, nesterov=True)
    >>> row = server.step(torch.tensor([0.0]), torch.tensor([2.0]))
    >>> row, server.broadcast(row)
    (tensor([2.]), tensor([3.]))
    """

    bm: FractionBelowOne = 0.9
    zeta: NonNegativeFloat = 1.0
    nesterov: bool = False

    def start(self, rows: Tensor) -> State:
        return {"delta": torch.zeros_like(rows)}

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        rows.add_(state["delta"].mul_(self.bm).add_(update, alpha=self.zeta))

    def broadcast(self, rows: Tensor, state: State) -> Tensor:
        return rows.add(state["delta"], alpha=self.bm) if self.nesterov else rows


@dataclass(frozen=True)
class AdaptiveStep(ServerStep):
    """Base class of the adaptive server optimizers `adam`, `yogi` and `adagrad` (FedOpt, Reddi et al. 2021).

    Algorithm 2 of the paper keeps a running mean m of the aggregated updates D and an accumulator v of their
    element-wise squares, and moves the global model w:

        m = beta1 m + (1 - beta1) D        w += lr m / (sqrt(v) + tau)

    The optimizers differ in how they update v.

    Args:
        lr: server learning rate, >= 0. The paper tunes it for each task.
        beta1: decay rate of m, 0 <= beta1 < 1.
        tau: constant added to the denominator, > 0. A larger tau makes the step less adaptive.
        v0: initial value of v, >= 0, or "tau^2", the smallest value that the paper's analysis allows.
        bias_correction: whether m is divided by 1 - beta1^t after t steps (and v by 1 - beta2^t if there is a beta2),
            as in the original Adam, but not in the paper.
    """

    lr: NonNegativeFloat = 0.1
    beta1: FractionBelowOne = 0.9
    _: KW_ONLY  # so that beta2 of a subclass follows beta1
    tau: PositiveFloat = 1e-3
    v0: NonNegativeFloat | Literal["tau^2"] = 0.0
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
        """Update the accumulator `v` of squared updates in place with one more `update`."""

    @property
    def decays(self) -> dict[str, float]:
        """Decay rate of each running mean ("m" or "v") that needs a bias correction."""
        return {"m": self.beta1}


@dataclass(frozen=True)
class DecayingStep(AdaptiveStep):
    """Base class of `adam` and `yogi`, which gradually forget old squared updates."""

    lr: NonNegativeFloat = 0.03
    beta2: FractionBelowOne = 0.99

    def __post_init__(self) -> None:
        if self.bias_correction and self.v0 != 0:
            raise ExperimentError(f"server.bias_correction = true: needs server.v0 = 0, not {self.v0}")

    @property
    def decays(self) -> dict[str, float]:
        return {"m": self.beta1, "v": self.beta2}


@server_optimizer("adam")
@dataclass(frozen=True)
class ServerAdam(DecayingStep):
    """FedAdam: v = beta2 v + (1 - beta2) D^2, w += lr m / (sqrt(v) + tau) (Reddi et al. 2021).

    D is the aggregated update, w the global model, and m = beta1 m + (1 - beta1) D.

    Args:
        lr: server learning rate, >= 0. The paper tunes it for each task.
        beta1: decay rate of m, 0 <= beta1 < 1.
        beta2: decay rate of v, 0 <= beta2 < 1.
        tau: constant added to the denominator, > 0. A larger tau makes the step less adaptive.
        v0: initial value of v, >= 0, or "tau^2", the smallest value that the paper's analysis allows.
        bias_correction: whether m is divided by 1 - beta1^t and v by 1 - beta2^t after t steps, as in the original
            Adam, but not in the paper. Requires v0 = 0.

    Cost: a few passes over the model [d], and the states m and v [d].

    >>> server = fedsim.ServerOptimizer("adam", lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)
    >>> server.step(torch.zeros(1), torch.ones(1))
    tensor([0.3333])
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        v.mul_(self.beta2).addcmul_(update, update, value=1 - self.beta2)


@server_optimizer("yogi")
@dataclass(frozen=True)
class ServerYogi(DecayingStep):
    """FedYogi: `adam` with v -= (1 - beta2) D^2 sign(v - D^2), which changes v more slowly (Reddi et al. 2021).

    D is the aggregated update, w the global model, m = beta1 m + (1 - beta1) D, and w += lr m / (sqrt(v) + tau).

    Args:
        lr: server learning rate, >= 0. The paper tunes it for each task.
        beta1: decay rate of m, 0 <= beta1 < 1.
        beta2: decay rate of v, 0 <= beta2 < 1.
        tau: constant added to the denominator, > 0. A larger tau makes the step less adaptive.
        v0: initial value of v, >= 0, or "tau^2", the smallest value that the paper's analysis allows.
        bias_correction: whether m is divided by 1 - beta1^t and v by 1 - beta2^t after t steps, as in the original
            Adam, but not in the paper. Requires v0 = 0.

    Cost: a few passes over the model [d], and the states m and v [d].

    >>> fedsim.ServerOptimizer("yogi", lr=1.0, beta1=0.5, beta2=0.75, tau=1.0).step(torch.zeros(1), torch.ones(1))
    tensor([0.3333])
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        square = update.square()
        v.addcmul_(square, (v - square).sign_(), value=self.beta2 - 1)


@server_optimizer("adagrad")
@dataclass(frozen=True)
class ServerAdagrad(AdaptiveStep):
    """FedAdagrad: `adam` with v += D^2 (Reddi et al. 2021).

    D is the aggregated update, w the global model, m = beta1 m + (1 - beta1) D, and w += lr m / (sqrt(v) + tau). The
    paper's experiments use beta1 = 0.

    Args:
        lr: server learning rate, >= 0. The paper tunes it for each task.
        beta1: decay rate of m, 0 <= beta1 < 1.
        tau: constant added to the denominator, > 0. A larger tau makes the step less adaptive.
        v0: initial value of v, >= 0, or "tau^2", the smallest value that the paper's analysis allows.
        bias_correction: whether m is divided by 1 - beta1^t after t steps, as in the original Adam, but not in the
            paper.

    Cost: a few passes over the model [d], and the states m and v [d].

    >>> fedsim.ServerOptimizer("adagrad", lr=1.0, beta1=0.0, tau=1.0).step(torch.zeros(1), torch.ones(1))
    tensor([0.5000])
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        v.addcmul_(update, update)
