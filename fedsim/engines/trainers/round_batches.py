"""The batches of a worker's round, for a function that trains a model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from fedsim.engines.trainers.batches import Batches
from fedsim.errors import ExperimentError


class RoundBatches:
    """An iterable of the (inputs, targets) of a round, which can be read once.

    Args:
        count: number of batches.
        masks: the context in which the forward passes of a batch run, given its number and its number of samples.
    """

    def __init__(self, batches: Batches, count: int, masks: Callable[[int, int], AbstractContextManager[Any]]) -> None:
        self._batches, self._count, self._masks = batches, count, masks
        self._reader: Generator[tuple[Tensor, Tensor], None, None] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        if self._reader is not None:
            raise ExperimentError(
                "local.solver: the function reads its batches a second time; read them once, and set the number of "
                "passes over a worker's samples by local.epochs"
            )
        self._reader = self._read()
        return self._reader

    def close(self) -> None:
        """Leave the context of the last batch, if the function has not read all of them."""
        if self._reader is not None:
            self._reader.close()

    def _read(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        for step, (inputs, targets) in enumerate(self._batches):
            with self._masks(step, len(inputs)):
                yield inputs, targets
