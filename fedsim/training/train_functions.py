"""Local training of one worker by a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any, cast

from torch import Tensor

from fedsim.clients.adapters import TrainFunction
from fedsim.core.model_inputs import Inputs
from fedsim.errors import ExperimentError
from fedsim.training.batches import Batches
from fedsim.training.local_training import LocalModel
from fedsim.training.task import RunTask


def train_by_function(task: RunTask, local: LocalModel, batches: Batches) -> float:
    """Train a worker's model with the user's training function, and return the mean loss."""
    worker, round = local.member.worker, local.member.round
    function = cast(TrainFunction, task.algorithm_at(round, settings=task.step_settings(worker, round)))
    round_batches = RoundBatches(batches, local.batches, local.dropout.at)
    with local.module.lent() as model, task.precision.forwards_of(model, task.device), closing(round_batches):
        return function(model, round_batches, worker)


class RoundBatches:
    """Iterable over a worker's batches (inputs, targets) in a round, which a user's training function receives.

    It can be iterated only once.

    Args:
        batches: batches of the round.
        count: number of batches, which `len` returns.
        masks: `masks(step, samples)` returns a context manager in which a model uses the dropout masks of batch number
            `step` (from 0), which has `samples` samples.
    """

    def __init__(self, batches: Batches, count: int, masks: Callable[[int, int], AbstractContextManager[Any]]) -> None:
        self._batches, self._count, self._masks = batches, count, masks
        self._reader, self._begun = self._read(), False
        self.close = self._reader.close

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        if self._begun:
            raise ExperimentError(
                "local.algorithm: the function iterates over its batches twice; iterate once, and use local.epochs to "
                "set the number of passes over a worker's samples"
            )
        self._begun = True
        return self._reader

    def _read(self) -> Generator[tuple[Inputs, Tensor], None, None]:
        for step, (inputs, targets) in enumerate(self._batches):
            with self._masks(step, len(targets)):
                yield inputs, targets
