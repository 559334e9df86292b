"""Per-worker evaluation: mean loss on a worker's training samples, and tests on the worker's held-out samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.clients.capabilities import PersonalModel, personal_model
from fedsim.core.learning_task import Correct, correct_of, counts_of, joint_of
from fedsim.core.randomness import seed_everything
from fedsim.core.training import MetricSums, test
from fedsim.records.worker_results import Tested
from fedsim.training.batches import Batches, BatchSource, WorkItem
from fedsim.training.row_module import RowModule
from fedsim.training.shared_state import SharedState, test_batch_size
from fedsim.training.task import RunTask

GLOBAL, PERSONAL, FINE_TUNED = "global", "personal", "fine_tuned"


class WorkerTests:
    """Tests models on the samples of one worker at a time, in one process.

    Args:
        task, shared: run and its tensors.
        module: module that receives a copy of the tested parameters [d].
        gradient: tensor [d] for the gradients of the module.
        batch_source: source of each worker's batches.
    """

    def __init__(
        self, task: RunTask, shared: SharedState, module: RowModule, gradient: Tensor, batch_source: BatchSource
    ) -> None:
        self._task, self._shared, self._batch_source = task, shared, batch_source
        self._module, self._gradient = module, gradient

    def training_loss(self, row: Tensor, buffers: Tensor, worker: int, round: int) -> float:
        """Return the mean loss of a model on a worker's training samples, without augmentation.

        Args:
            row: parameters [d] of the model.
            buffers: buffers [b] of the model.
            worker: worker ID.
            round: number of the round, on which random numbers depend.
        """
        batches = self._batch_source.samples_seen(worker, round, test_batch_size(self._task.device))
        return self._sums(row, buffers, batches, ("losses", round, worker)).loss

    def before_training(self, member: WorkItem) -> Tested:
        """Test the global model, and the worker's personal model if there is one, on the worker's local test samples.

        Returns the loss and accuracy of each model.
        """
        shared = self._shared
        tested = {GLOBAL: self._test(shared.server.row, shared.server.buffers, member)}
        if isinstance(self._task.algorithm, PersonalModel):
            local_buffers = self._task.experiment.buffers == "local"
            buffers = shared.cohort.buffers[member.slot] if local_buffers else shared.server.buffers
            tested[PERSONAL] = self._test(*self._personal(shared.server.row, buffers, member), member)
        return tested

    def after_training(self, member: WorkItem) -> Tested:
        """Test the model that a worker has just trained, on the worker's local test samples.

        Returns the loss and accuracy of the model, which is called "fine_tuned".
        """
        cohort = self._shared.cohort
        personal = self._personal(cohort.rows[member.slot], cohort.buffers[member.slot], member)
        return {FINE_TUNED: self._test(*personal, member)}

    def _personal(self, row: Tensor, buffers: Tensor, member: WorkItem) -> tuple[Tensor, Tensor]:
        worker_state = {name: rows[member.slot] for name, rows in self._shared.cohort.kept.items()}
        return personal_model(self._task.algorithm, row, buffers, worker_state)

    def _test(self, row: Tensor, buffers: Tensor, member: WorkItem) -> tuple[float, float | None]:
        moment, correct = (member.round, member.worker), correct_of(self._task.learning_task)
        batches = self._batch_source.test_samples(member.worker, member.round, test_batch_size(self._task.device))
        sums = self._sums(row, buffers, batches, ("local_test_fraction", *moment), correct)
        return sums.loss, None if correct is None else sums.accuracy

    def _sums(
        self, row: Tensor, buffers: Tensor, batches: Batches, drawn: tuple[Any, ...], correct: Correct | None = None
    ) -> MetricSums:
        """Test a model on some batches. Return the sum of losses, and the number of correct predictions.

        Args:
            row: parameters [d] of the model.
            buffers: buffers [b] of the model.
            batches: batches (inputs, targets).
            drawn: name of the test, round and worker, which together seed the random numbers.
            correct: function that decides which predictions are correct; None to count none.
        """
        task, learning = self._task, self._task.learning_task
        is_joint, joint_batches = joint_of(learning), list[tuple[Tensor, Tensor]]()

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if is_joint is None or not is_joint(outputs, targets):
                return learning.loss(outputs, targets)
            joint_batches.append((outputs, targets))
            return outputs.new_zeros(())

        self._module.load(row.clone(), self._gradient, buffers)
        seed_everything(task.device, task.experiment.seed, *drawn)
        sums = test(self._module.module, batches, loss, correct, counts_of(learning))
        if joint_batches:
            outputs, targets = map(torch.cat, zip(*joint_batches, strict=True))
            sums = sums._replace(loss_sum=learning.loss(outputs, targets).to(sums.loss_sum.dtype) * len(targets))
        return sums
