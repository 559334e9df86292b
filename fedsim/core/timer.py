"""Measure the seconds spent in each phase of a round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class PhaseTimer:
    """Timer that sums up the seconds of each phase of a run. Usage: `with timer("train"): ...`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all phases to zero. Earlier references to `seconds` keep their values."""
        self.seconds = {"broadcast": 0.0, "train": 0.0, "aggregate": 0.0, "test": 0.0}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start
