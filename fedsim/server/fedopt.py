"""FedOpt, adaptive server optimizers: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

All three keep a mean m of the updates and per coordinate a mean v of their squares:

    m = beta1 m + (1 - beta1) D        w += lr m / (sqrt(v) + tau)

They differ in v. tau > 0 keeps the quotient finite; a larger tau makes the step less adaptive.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.clients import Decay, NonNegative, Positive, State
from fedsim.clients.adaptive import averaged_weight
from fedsim.errors import ExperimentError
from fedsim.server.optimizer import ServerStep, server_optimizer


@dataclass(frozen=True)
class AdaptiveStep(ServerStep):
    """The common part of adam, yogi and adagrad.

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
