"""Client algorithms with an adaptive step size for each model parameter: Adam, AdamW, Adagrad.

Their arguments and results are those of PyTorch's optimizers, except that Adam's `betas` are `beta1` and `beta2`. A
model parameter that a batch does not use has gradient 0 here, so its running averages decay and it still moves.
PyTorch's optimizers skip such a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm
from fedsim.clients.base import State
from fedsim.clients.capabilities import client_algorithm
from fedsim.core.numbers import FractionBelowOne, NonNegativeFloat, PositiveFloat


@client_algorithm("adam")
@dataclass(frozen=True)
class Adam(ClientAlgorithm):
    """Adam with L2 regularisation, like `torch.optim.Adam` (Kingma and Ba 2015).

    Step t = 1, 2, ... moves the weights w of a worker's model:

        g = gradient + weight_decay w
        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
        w -= lr m' / (sqrt(v') + eps)  with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)

    Args:
        lr: learning rate, >= 0.
        beta1: decay rate of m, 0 <= beta1 < 1.
        beta2: decay rate of v, 0 <= beta2 < 1.
        eps: constant added to the denominator, > 0.
        weight_decay: factor of the L2 penalty, >= 0.
        amsgrad: whether to use the maximum of v over all steps so far instead of v (Reddi et al. 2018).

    Cost: a few passes over the row [d], and four state tensors [d], five with amsgrad.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.Adam(lr=0.1)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.9000])
    """

    lr: NonNegativeFloat = 1e-3
    beta1: FractionBelowOne = 0.9
    beta2: FractionBelowOne = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
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
        descend(rows, m, scale.mul_(averaged_weight(state["m_weight"], self.beta1)), self.lr)

    def decay(self, rows: Tensor, gradients: Tensor) -> None:
        """Apply weight decay before a step, in place: Adam adds it to `gradients`, AdamW multiplies `rows`."""
        if self.weight_decay:
            gradients.add_(rows, alpha=self.weight_decay)


@client_algorithm("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, like `torch.optim.AdamW` (Loshchilov and Hutter 2019).

    Each step multiplies the weights w by 1 - lr weight_decay, and then takes a step of `adam` without weight decay.

    Args:
        weight_decay: weight decay rate, >= 0.
        lr: learning rate, >= 0.
        beta1: decay rate of the mean of gradients, 0 <= beta1 < 1.
        beta2: decay rate of the mean of squared gradients, 0 <= beta2 < 1.
        eps: constant added to the denominator, > 0.
        amsgrad: whether to use the largest mean of squared gradients so far, not the latest (Reddi et al. 2018).

    Cost: a few passes over the row [d], and four state tensors [d], five with amsgrad.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.AdamW(lr=0.1, weight_decay=1.0)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.8000])
    """

    weight_decay: NonNegativeFloat = 1e-2

    def decay(self, rows: Tensor, gradients: Tensor) -> None:
        rows.mul_(1 - self.lr * self.weight_decay)


def descend(rows: Tensor, direction: Tensor, scale: Tensor, lr: float | Tensor) -> None:
    """Subtract lr * direction / scale from `rows`, in place. `lr`: a number, or one per worker as a tensor [..., 1]."""
    if isinstance(lr, Tensor):
        rows.addcmul_(direction / scale, -lr)
    else:
        rows.addcdiv_(direction, scale, value=-lr)


def averaged_weight(weight: Tensor, beta: float) -> Tensor:
    """Update the bias correction `weight` from 1 - beta^t to 1 - beta^(t+1) in place, and return it.

    The recursion avoids the rounding errors of computing 1 - beta^t in float32.
    """
    return weight.mul_(beta).add_(1 - beta)


@client_algorithm("adagrad")
@dataclass(frozen=True)
class Adagrad(ClientAlgorithm):
    """Adagrad, like `torch.optim.Adagrad` (Duchi et al. 2011).

    Step t = 1, 2, ... divides the gradient by the square root of s, the sum of all squared gradients so far:

        g = gradient + weight_decay w,  s += g^2
        w -= lr_t g / (sqrt(s) + eps)  with lr_t = lr / (1 + (t - 1) lr_decay)

    Args:
        lr: learning rate, >= 0.
        lr_decay: decay rate of the learning rate, >= 0.
        weight_decay: factor of the L2 penalty, >= 0.
        initial_accumulator_value: initial value of s, >= 0.
        eps: constant added to the denominator, > 0.

    Cost: a few passes over the row [d], and one state tensor [d], two with lr_decay.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.Adagrad(lr=0.1)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.9000])
    """

    lr: NonNegativeFloat = 1e-2
    lr_decay: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: PositiveFloat = 1e-10

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
        descend(rows, gradients, scale, self.lr)
