"""The seconds of each phase of a round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class PhaseTimer:
    """Adds up seconds by phase: `with clock("train"): ...`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from zero, with a new dict: an earlier `seconds` keeps its values."""
        self.seconds = {"pull_down": 0.0, "train": 0.0, "aggregate": 0.0, "test": 0.0}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start
