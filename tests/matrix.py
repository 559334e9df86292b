"""Matrices of test cases of which only a part runs by default."""

from __future__ import annotations

import pytest


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
