"""Accumulation of gradients: one step along the mean gradient of several batches (`local.accumulation_steps`)."""

from __future__ import annotations

from fedsim.training.local_training import LocalOptimizer


class AccumulatingOptimizer:
    """Optimizer that takes one step along the mean gradient of several batches.

    The last step of a round may have fewer batches.

    Args:
        optimizer: optimizer of the worker's model, which takes the steps.
        batches_per_step: number of batches per step.
    """

    def __init__(self, optimizer: LocalOptimizer, batches_per_step: int) -> None:
        self._optimizer, self._batches_per_step = optimizer, batches_per_step
        self._accumulated, self._batches_left = 0, optimizer.local.batches

    def zero_grad(self) -> None:
        if not self._accumulated:
            self._optimizer.zero_grad()

    def step(self) -> None:
        self._accumulated, self._batches_left = self._accumulated + 1, self._batches_left - 1
        if self._accumulated == self._batches_per_step or not self._batches_left:
            self._optimizer.local.gradient.div_(self._accumulated)
            self._optimizer.step()
            self._accumulated = 0
