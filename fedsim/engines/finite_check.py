"""The check after each round that the global model is finite."""

from __future__ import annotations

from fedsim.core.rows import require_finite, require_finite_buffers
from fedsim.engines.task import SharedState, TaskSpec


class FiniteCheck:
    """Checks after each round that neither the global row nor the global buffers have become NaN or infinite.

    Made before the first round, when the memory holds the model's start.
    """

    def __init__(self, task: TaskSpec, shared: SharedState) -> None:
        self._wanted, self._shared = task.nonfinite != "keep", shared
        self._finite_at_start = shared.global_buffers.isfinite()

    def __call__(self, round: int) -> None:
        """Raise DivergedError, with the round, where they have, unless the task keeps such numbers."""
        if self._wanted:
            require_finite(self._shared.global_row, round)
            require_finite_buffers(self._shared.global_buffers, self._finite_at_start, round)
