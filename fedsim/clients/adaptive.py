"""Client algorithms with a step size for each parameter: Adam, AdamW, Adagrad.

They have the parameters and the numbers of PyTorch's optimizers; Adam's `betas` are beta1 and beta2. A parameter that a
step does not use has gradient 0 here, so its averages decay and it still moves; PyTorch's optimizers skip it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm
from fedsim.clients.base import Decay, NonNegative, Positive, State, client_algorithm


@client_algorithm("adam")
@dataclass(frozen=True)
class Adam(ClientAlgorithm):
    """Adam with L2 regularisation, as `torch.optim.Adam`. Kingma and Ba 2015.

    g = gradient + weight_decay w;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    w -= lr m' / (sqrt(v') + eps), with m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t) at step t = 1, 2, ...

    Args:
        lr: learning rate, >= 0.
        beta1: decay of m, 0 <= beta1 < 1.
        beta2: decay of v, 0 <= beta2 < 1.
        eps: > 0.
        weight_decay: >= 0.
        amsgrad: use the largest v so far (Reddi et al. 2018).

    Cost: a few passes over the row [d]; four states of [d], five with amsgrad.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.Adam(lr=0.1)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.9000])
    """

    lr: NonNegative = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    amsgrad: bool = False

    def start(self, rows: Tensor) -> State:
        names = ("m", "v", "m_weight", "v_weight", *(("largest_v",) if self.amsgrad else ()))
        return {name: torch.zeros_like(rows) for name in names}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        self.decay(rows, gradients)
        m = state["m"].lerp_(gradients, 1 - self.beta1)
        v = state["v"].mul_(self.beta2).addcmul_(gradients, gradients, value=1 - self.beta2)
        if self.amsgrad:
            v = torch.maximum(state["largest_v"], v, out=state["largest_v"])
        scale = v.div(averaged_weight(state["v_weight"], self.beta2)).sqrt_().add_(self.eps)
        rows.addcdiv_(m, scale.mul_(averaged_weight(state["m_weight"], self.beta1)), value=-self.lr)

    def decay(self, rows: Tensor, gradients: Tensor) -> None:
        """Apply weight decay before a step."""
        if self.weight_decay:
            gradients.add_(rows, alpha=self.weight_decay)


@client_algorithm("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient, as `torch.optim.AdamW`. Loshchilov and Hutter 2019.

    w *= 1 - lr weight_decay, then the step of `adam` along the gradient.

    Args:
        weight_decay: >= 0.
        lr, beta1, beta2, eps, amsgrad: see `Adam`.

    Cost: that of adam on a row [d].

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.AdamW(lr=0.1, weight_decay=1.0)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.8000])
    """

    weight_decay: NonNegative = 1e-2

    def decay(self, rows: Tensor, gradients: Tensor) -> None:
        rows.mul_(1 - self.lr * self.weight_decay)


def averaged_weight(weight: Tensor, beta: float) -> Tensor:
    """From 1 - beta^t to 1 - beta^(t+1), in place: the decaying mean of t + 1 ones.

    It is updated, since 1 - beta^t cancels in float32, and expm1 takes as long as the whole step.
    """
    return weight.mul_(beta).add_(1 - beta)


@client_algorithm("adagrad")
@dataclass(frozen=True)
class Adagrad(ClientAlgorithm):
    """Steps over the root of the sum of all squared gradients, as `torch.optim.Adagrad`. Duchi et al. 2011.

    g = gradient + weight_decay w;  s += g^2;  w -= lr_t g / (sqrt(s) + eps), with lr_t = lr / (1 + (t - 1) lr_decay) at
    step t = 1, 2, ...

    Args:
        lr: learning rate, >= 0.
        lr_decay: >= 0.
        weight_decay: >= 0.
        initial_accumulator_value: start of s, >= 0.
        eps: > 0.

    Cost: a few passes over the row [d]; a state of [d], two with lr_decay.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.Adagrad(lr=0.1)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.9000])
    """

    lr: NonNegative = 1e-2
    lr_decay: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: Positive = 1e-10

    def start(self, rows: Tensor) -> State:
        state = {"sum": torch.full_like(rows, self.initial_accumulator_value)}
        return {**state, "steps": torch.zeros_like(rows)} if self.lr_decay else state

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.weight_decay:
            gradients.add_(rows, alpha=self.weight_decay)
        scale = state["sum"].addcmul_(gradients, gradients).sqrt().add_(self.eps)
        if self.lr_decay:
            before = state["steps"]
            scale.mul_(before.mul(self.lr_decay).add_(1))
            before.add_(1)
        rows.addcdiv_(gradients, scale, value=-self.lr)
