"""Attacks that need no look at the honest rows, or no more than one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from fedsim.byzantine.statistics import mean_of
from fedsim.byzantine.strategy import attack_strategy
from fedsim.errors import ExperimentError
from fedsim.randomness import Draws


@attack_strategy("none")
def none(own: Tensor) -> Tensor:
    """No attack: the Byzantine workers follow the protocol.

    Rows [b, d] as they are. Cost: none.
    """
    return own


@attack_strategy("sign_flipping")
@dataclass(frozen=True)
class SignFlipping:
    """-scale times each one's own row, or with of = "mean" -scale times the mean of the honest rows (Li et al. 2019).

    Of the mean, all rows are the same, and there must be an honest row. Cost: one pass over [b, d], or [h, d].
    """

    scale: PositiveFloat = 1.0
    of: Literal["own", "mean"] = "own"

    @property
    def needs_honest(self) -> bool:
        return self.of == "mean"

    def __call__(self, honest: Tensor, own: Tensor) -> Tensor:
        """-scale times the own rows [b, d], or -scale times the mean [d] of the honest rows [h, d]."""
        return own * -self.scale if self.of == "own" else mean_of(honest).mul_(-self.scale)


@attack_strategy("gaussian")
def gaussian(own: Tensor, draws: Draws, *, s: NonNegativeFloat = 1.0) -> Tensor:
    """Noise N(0, s^2) in every coordinate, drawn anew for each Byzantine row (Blanchard et al. 2017).

    The noise is the same for every dtype and device, but for rounding. Result [b, d]. Cost: b d draws.
    """
    return draws.normal(*own.shape, dtype=own.dtype).mul_(s)


@attack_strategy("mimic")
def mimic(honest: Tensor, *, epsilon: NonNegativeInt = 0) -> Tensor:
    """Copies of honest row `epsilon`, which so gets more than its share (Karimireddy et al. 2022).

    `epsilon` is an index into the honest rows of this round, 0 <= epsilon < h; anything else is an error. Honest rows
    [h, d], result [d] for all attackers. Cost: one copy of it for each.
    """
    if epsilon >= len(honest):
        raise ExperimentError(f"attack.epsilon = {epsilon}: must be below the number of honest rows, {len(honest)}")
    return honest[epsilon]


@attack_strategy("nan")
def nan(own: Tensor) -> Tensor:
    """Rows of NaN: what a broken worker sends, and a test of whether rows are screened.

    Result [b, d]. Cost: filling it.
    """
    return torch.full_like(own, torch.nan)


@attack_strategy("inf")
def inf(own: Tensor) -> Tensor:
    """Rows of +infinity: what an overflow sends, and a test of whether rows are screened.

    Result [b, d]. Cost: filling it.
    """
    return torch.full_like(own, torch.inf)


@attack_strategy("free_rider")
def free_rider(own: Tensor, last: Tensor | None, *, what: Literal["zero", "last"] = "zero") -> Tensor:
    """No work done: zero updates, or the aggregated update of the round before (Lin et al. 2019).

    In the first round there is none before, and `what = "last"` sends zero too. Result [d] for all attackers. Cost: one
    copy of it for each.
    """
    return last if what == "last" and last is not None else own.new_zeros(own.shape[1])
