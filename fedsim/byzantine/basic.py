"""Simple attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.byzantine.statistics import mean_of
from fedsim.core.randomness import Draws


@attack_strategy("none")
def none(own_updates: Tensor) -> Tensor:
    """No attack: the Byzantine workers follow the protocol.

    Returns `own_updates` [b, d]. Cost: none.

    >>> fedsim.attack(torch.ones(2, 2), 1, "none", own_updates=torch.zeros(1, 2))
    tensor([[0., 0.]])
    """
    return own_updates


@attack_strategy("sign_flipping")
@dataclass(frozen=True)
class SignFlipping:
    """-scale times each attacker's own row, or -scale times the mean of the honest rows (Li et al. 2019).

    Args:
        scale: > 0.
        of: "own" rows [b, d], or the "mean" of the honest rows [h, d], h >= 1.

    Cost: one pass over the rows.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), 2, "sign_flipping", of="mean")
    tensor([[-2.],
            [-2.]])
    """

    scale: PositiveFloat = 1.0
    of: Literal["own", "mean"] = "own"

    @property
    def needs_honest(self) -> bool:
        return self.of == "mean"

    def __call__(self, honest: Tensor, own_updates: Tensor) -> Tensor:
        """Return the rows [b, d], or the row [d] of all attackers."""
        return own_updates * -self.scale if self.of == "own" else mean_of(honest).mul_(-self.scale)


@attack_strategy("gaussian")
def gaussian(own_updates: Tensor, draws: Draws, *, std: NonNegativeFloat = 1.0) -> Tensor:
    """Noise N(0, std^2) in every coordinate, drawn for each Byzantine row (Blanchard et al. 2017).

    Args:
        own_updates: [b, d], whose shape the result has.
        draws: draws the noise, the same for every dtype and device except rounding.
        std: standard deviation, >= 0.

    Returns [b, d]. Cost: b d draws.

    >>> fedsim.attack(torch.ones(3, 2), 1, "gaussian", std=0.0)
    tensor([[0., 0.]])
    """
    return draws.normal(*own_updates.shape, dtype=own_updates.dtype).mul_(std)


@attack_strategy("nan")
def nan(own_updates: Tensor) -> Tensor:
    """Rows of NaN, which a broken worker sends: a test of the screening of rows.

    Returns [b, d], the shape of `own_updates`. Cost: one pass over the result.

    >>> fedsim.attack(torch.ones(2, 2), 1, "nan")
    tensor([[nan, nan]])
    """
    return torch.full_like(own_updates, torch.nan)


@attack_strategy("inf")
def inf(own_updates: Tensor) -> Tensor:
    """Rows of +infinity, the result of an overflow: a test of the screening of rows.

    Returns [b, d], the shape of `own_updates`. Cost: one pass over the result.

    >>> fedsim.attack(torch.ones(2, 2), 1, "inf")
    tensor([[inf, inf]])
    """
    return torch.full_like(own_updates, torch.inf)


@attack_strategy("free_rider")
def free_rider(own_updates: Tensor, last: Tensor | None, *, what: Literal["zero", "last"] = "zero") -> Tensor:
    """No training: zero updates, or the aggregated update of the last round (Lin et al. 2019).

    Args:
        own_updates: [b, d], whose shape the result has.
        last: [d]; None in the first round, in which zero is sent.
        what: "zero" or "last".

    Returns [d]. Cost: a copy for each attacker.

    >>> fedsim.attack(torch.ones(2, 2), 1, "free_rider", last=torch.tensor([3.0, 4.0]), what="last")
    tensor([[3., 4.]])
    """
    return last if what == "last" and last is not None else own_updates.new_zeros(own_updates.shape[1])
