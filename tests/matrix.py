"""Matrices of test cases of which only a part runs by default, and cases that some CPUs cannot compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def _computes_bf16_lstm():
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True


needs_bf16_lstm = pytest.mark.skipif(
    not _computes_bf16_lstm(), reason="oneDNN has no LSTM in bfloat16 for this CPU, which lacks AVX-512"
)


def in_turn(names, firsts, seconds):
    """Parametrize by pairs: each of `firsts` with one of `seconds`, alternating. The other pairs are slow tests."""
    seconds = list(seconds)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(first, second),
                marks=() if (i - j) % len(seconds) == 0 else pytest.mark.slow,
                id=f"{first.name}-{second}" if hasattr(first, "name") else None,
            )
            for i, first in enumerate(firsts)
            for j, second in enumerate(seconds)
        ],
    )
