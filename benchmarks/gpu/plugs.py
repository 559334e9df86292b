"""Plugs that cases of other modules name by import path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Looking:
    """SGD that reads a number of each gradient on the host, which no captured step can do."""

    lr: float = 0.1

    def start(self, rows: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, rows: Tensor, gradients: Tensor, state: dict[str, Tensor]) -> None:
        gradients.sum().item()
        rows.sub_(gradients, alpha=self.lr)


def tokens_beyond(root: Path) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """Sequences for `tests.models:Embedded`; some, but not the first, have a token without a row in its embedding."""
    samples = [(torch.arange(k, k + 7) % 50, k % 3) for k in range(60)]
    return [(tokens + 50 * (k > 20), label) for k, (tokens, label) in enumerate(samples)], samples
