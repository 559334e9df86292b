"""FedOpt, adaptive server optimizers: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

All three keep a mean m of the updates and per coordinate a measure v of their size, and step by their quotient:

    m = beta1 m + (1 - beta1) D        w += lr m / (sqrt(v) + tau)

They differ in v. tau, the paper's degree of adaptivity, keeps the quotient finite; the larger it is the less adaptive
is the step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.aggregation.server import ServerStep, server_optimizer
from fedsim.errors import ExperimentError
from fedsim.local import Decay, NonNegative, Positive, State
from fedsim.local.adaptive import averaged_weight


@dataclass(frozen=True)
class AdaptiveStep(ServerStep):
    """What adam, yogi and adagrad have in common.

    lr: the server's learning rate, which the paper tunes to each task; the defaults are fedsim's own, a place to begin.
    v0: where v starts; 0, as is common, or any number >= 0, or "tau^2", the least the paper's analysis allows.
    bias_correction: divide m by 1 - beta1^t after t steps (and v by 1 - beta2^t where it has beta2), as Adam does for a
        single process; the paper does not.
    """

    lr: NonNegative = 0.1
    beta1: Decay = 0.9
    _: KW_ONLY  # so that beta2 of those who have it comes after beta1
    tau: Positive = 1e-3
    v0: NonNegative | Literal["tau^2"] = 0.0
    bias_correction: bool = False

    def start(self, rows: Tensor) -> State:
        v0 = self.tau**2 if self.v0 == "tau^2" else self.v0
        state = {"m": torch.zeros_like(rows), "v": torch.full_like(rows, v0)}
        if self.bias_correction:
            state["m_weight"] = torch.zeros_like(rows)
        return state

    def step(self, rows: Tensor, update: Tensor, state: State) -> None:
        m = state["m"].mul_(self.beta1).add_(update, alpha=1 - self.beta1)
        self.accumulate(state["v"], update)
        v = state["v"]
        if self.bias_correction:
            m, v = self.corrected(state)
        rows.addcdiv_(m, v.sqrt().add_(self.tau), value=self.lr)

    @abstractmethod
    def accumulate(self, v: Tensor, update: Tensor) -> None:
        """Take the update into v, in place."""

    def corrected(self, state: State) -> tuple[Tensor, Tensor]:
        """m and v without the pull of their start at 0."""
        return state["m"] / averaged_weight(state["m_weight"], self.beta1), state["v"]


@dataclass(frozen=True)
class DecayingStep(AdaptiveStep):
    """What adam and yogi have in common: a v that forgets, so steps that do not grow shorter by themselves."""

    lr: NonNegative = 0.03
    beta2: Decay = 0.99

    def __post_init__(self) -> None:
        if self.bias_correction and self.v0 != 0:
            raise ExperimentError(
                f"server.bias_correction = true: makes up for a v that starts at 0, but server.v0 = {self.v0}"
            )

    def start(self, rows: Tensor) -> State:
        state = super().start(rows)
        if self.bias_correction:
            state["v_weight"] = torch.zeros_like(rows)
        return state

    def corrected(self, state: State) -> tuple[Tensor, Tensor]:
        m, v = super().corrected(state)
        return m, v / averaged_weight(state["v_weight"], self.beta2)


@server_optimizer("adam")
@dataclass(frozen=True)
class ServerAdam(DecayingStep):
    """FedAdam: v = beta2 v + (1 - beta2) D^2; m the mean of D; w += lr m / (sqrt(v) + tau). Reddi et al. 2021.

    m = beta1 m + (1 - beta1) D. 0 <= beta1, beta2 < 1, tau > 0. `AdaptiveStep` says what lr, v0 and bias_correction
    are; bias_correction needs v0 = 0. Cost: a few passes over [d]; m and v [d] are kept.
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        v.mul_(self.beta2).addcmul_(update, update, value=1 - self.beta2)


@server_optimizer("yogi")
@dataclass(frozen=True)
class ServerYogi(DecayingStep):
    """FedYogi: as adam with v -= (1 - beta2) D^2 sign(v - D^2), which grows and shrinks evenly. Reddi et al. 2021.

    m = beta1 m + (1 - beta1) D; w += lr m / (sqrt(v) + tau). 0 <= beta1, beta2 < 1, tau > 0. `AdaptiveStep` says what
    lr, v0 and bias_correction are; bias_correction needs v0 = 0. Cost: a few passes over [d]; m and v [d] are kept.
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        square = update.square()
        v.addcmul_(square, (v - square).sign_(), value=self.beta2 - 1)


@server_optimizer("adagrad")
@dataclass(frozen=True)
class ServerAdagrad(AdaptiveStep):
    """FedAdagrad: as adam with v += D^2, which never forgets. Reddi et al. 2021.

    m = beta1 m + (1 - beta1) D; w += lr m / (sqrt(v) + tau). 0 <= beta1 < 1 (the paper's experiments have beta1 = 0
    here), tau > 0. `AdaptiveStep` says what lr, v0 and bias_correction are; the latter concerns m alone.
    Cost: a few passes over [d]; m and v [d] are kept.
    """

    def accumulate(self, v: Tensor, update: Tensor) -> None:
        v.addcmul_(update, update)
