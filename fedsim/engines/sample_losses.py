"""The mean loss of a model on the samples of a worker."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.learning_task import counts_of
from fedsim.core.randomness import seed_everything
from fedsim.core.training import test
from fedsim.engines.task import TaskSpec, test_batch_size
from fedsim.engines.trainers.batches import BatchSource
from fedsim.engines.trainers.row_module import RowModule


class SampleLosses:
    """Losses on the workers' own samples, as the workers see them.

    Args:
        gradient: [d], which the module is bound to beside its row.
    """

    def __init__(self, task: TaskSpec, module: RowModule, gradient: Tensor, batch_source: BatchSource) -> None:
        self._task, self._module, self._gradient, self._batch_source = task, module, gradient, batch_source

    def __call__(self, row: Tensor, buffers: Tensor, worker: int, round: int) -> float:
        """The mean loss of a copy of a row [d] on the samples of a worker."""
        task = self._task
        self._module.load(row.clone(), self._gradient, buffers)
        seed_everything(task.device, task.seed, "losses", round, worker)
        batches = self._batch_source.samples_seen(worker, round, test_batch_size(task.device))
        return test(self._module.module, batches, task.learning_task.loss, None, counts_of(task.learning_task)).loss
