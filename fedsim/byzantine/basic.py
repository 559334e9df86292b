"""Simple attacks that do not depend on the aggregation rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.byzantine.statistics import mean_of
from fedsim.core.numbers import NonNegativeFloat, PositiveFloat
from fedsim.core.randomness import Draws


@attack_strategy("none")
def none(own_updates: Tensor) -> Tensor:
    """Return the attackers' own updates unchanged, so that the Byzantine workers follow the protocol.

    Args:
        own_updates: updates that the b Byzantine workers computed by training, [b, d].

    Returns `own_updates` [b, d]. Cost: none.

    >>> fedsim.attack(torch.ones(2, 2), "none", 1, own_updates=torch.zeros(1, 2))
    tensor([[0., 0.]])
    """
    return own_updates


none.alters_rows = False


@attack_strategy("sign_flipping")
@dataclass(frozen=True)
class SignFlipping:
    """Sign-flipping attack, which sends updates multiplied by -scale (Li et al. 2019).

    Args:
        scale: magnitude of the factor, > 0.
        of: which updates are multiplied: each attacker's "own" update, or the "mean" of the honest updates [h, d],
            h >= 1.

    Cost: one pass over the updates.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), "sign_flipping", 2, of="mean")
    tensor([[-2.],
            [-2.]])
    """

    scale: PositiveFloat = 1.0
    of: Literal["own", "mean"] = "own"

    @property
    def needs_honest(self) -> bool:
        return self.of == "mean"

    @property
    def row_by_row(self) -> bool:
        return self.of == "own"

    def __call__(self, honest: Tensor, own_updates: Tensor) -> Tensor:
        """Return the attackers' updates [b, d], or one update [d] that all attackers send."""
        return own_updates * -self.scale if self.of == "own" else mean_of(honest).mul_(-self.scale)


@attack_strategy("gaussian")
def gaussian(own_updates: Tensor, draws: Draws, *, std: NonNegativeFloat = 1.0) -> Tensor:
    """Return Gaussian noise N(0, std^2), drawn independently for each attacker (Blanchard et al. 2017).

    Args:
        own_updates: updates that the b Byzantine workers computed by training, [b, d], used only for the shape.
        draws: draws the noise, which is the same for all dtypes and devices up to rounding.
        std: standard deviation, >= 0.

    Returns the noise [b, d]. Cost: b d draws.

    >>> fedsim.attack(torch.ones(3, 2), "gaussian", 1, std=0.0)
    tensor([[0., 0.]])
    """
    return draws.normal(*own_updates.shape, dtype=own_updates.dtype).mul_(std)


@attack_strategy("nan")
def nan(own_updates: Tensor) -> Tensor:
    """Return updates that contain only NaN, like those of a broken worker, to test how NaN is treated.

    Returns a tensor of the shape of `own_updates` [b, d]. Cost: one pass over the result.

    >>> fedsim.attack(torch.ones(2, 2), "nan", 1)
    tensor([[nan, nan]])
    """
    return torch.full_like(own_updates, torch.nan)


@attack_strategy("inf")
def inf(own_updates: Tensor) -> Tensor:
    """Return updates that contain only +infinity, as after an overflow, to test how infinity is treated.

    Returns a tensor of the shape of `own_updates` [b, d]. Cost: one pass over the result.

    >>> fedsim.attack(torch.ones(2, 2), "inf", 1)
    tensor([[inf, inf]])
    """
    return torch.full_like(own_updates, torch.inf)


@attack_strategy("free_rider")
def free_rider(own_updates: Tensor, last: Tensor | None, *, what: Literal["zero", "last"] = "zero") -> Tensor:
    """Return an update that needs no training: zero, or the previous aggregated update (Lin et al. 2019).

    Args:
        own_updates: updates that the b Byzantine workers computed by training, [b, d], used only for the shape.
        last: aggregated update of the previous round, [d]. None in the first round, in which zero is sent.
        what: "zero" or "last".

    Returns the update [d] that all attackers send. Cost: a copy for each attacker.

    >>> fedsim.attack(torch.ones(2, 2), "free_rider", 1, last=torch.tensor([3.0, 4.0]), what="last")
    tensor([[3., 4.]])
    """
    return last if what == "last" and last is not None else own_updates.new_zeros(own_updates.shape[1])


nan.row_by_row = inf.row_by_row = free_rider.row_by_row = True
