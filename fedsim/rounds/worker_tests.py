"""Tests of models on the samples of single workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.capabilities import PersonalModel, personal_model
from fedsim.core.learning_task import Correct, correct_of, counts_of, joint_of
from fedsim.core.randomness import seed_everything
from fedsim.core.rows import index_of, pull_down
from fedsim.core.training import MetricSums, test
from fedsim.processes.process_context import ProcessContext
from fedsim.records.worker_results import Tested
from fedsim.training.batches import LOCAL_TESTS, LOSSES, BatchSource, WorkItem, WorkItems
from fedsim.training.row_module import RowModule
from fedsim.training.shared_state import SharedState, test_batch_size
from fedsim.training.stacked_tests import ModelTests, StackedTests
from fedsim.training.task import RunTask

GLOBAL, PERSONAL, FINE_TUNED = "global", "personal", "fine_tuned"


class WorkerTests:
    """Tests models on the samples of single workers, in one process.

    Each method reads its results once, which waits for the device.

    Args:
        process: context of this process.
        task, shared: run and its tensors.
        module: module that receives a copy of the tested parameters [d].
        gradient: tensor [d] for the gradients of the module.
        batch_source: source of each worker's batches.
        stacked: tests of several models at once; None to test one model after another.
    """

    def __init__(
        self,
        process: ProcessContext,
        task: RunTask,
        shared: SharedState,
        module: RowModule,
        gradient: Tensor,
        batch_source: BatchSource,
        stacked: StackedTests | None,
    ) -> None:
        self._process, self._task, self._shared, self._batch_source = process, task, shared, batch_source
        self._module, self._gradient, self._stacked, self._objective = module, gradient, stacked, task.objective

    def training_losses(self, *several: ModelTests) -> list[list[float]]:
        """Return the mean training loss of each model on a worker's training samples, without augmentation."""
        return [[sums.loss for sums in of_tests] for of_tests in self._sums(several, LOSSES)]

    def global_losses(self, workers: Sequence[int], round: int) -> list[float]:
        """Return the mean loss of the global model on each worker's training samples."""
        server, members = self._shared.server, [WorkItem(0, worker, round) for worker in workers]
        return self.training_losses(self._of_server(members, server.row, server.buffers))[0]

    def load(self, members: WorkItems) -> None:
        """Copy the global model to the tensors that contain the workers' models.

        If there are several global models, each worker gets the one with the least loss on its training samples.
        """
        cohort, local = self._shared.cohort, self._task.experiment.buffers == "local"
        models = [*map(self._shared.server.model, range(self._task.algorithm.clusters))]
        chosen = np.zeros(len(members), dtype=np.int64)
        if len(models) > 1:
            tests = [self._of_server(members, *model, local=local) for model in models]
            losses = zip(*self.training_losses(*tests), strict=True)
            chosen[:] = [min(range(len(models)), key=lambda k: (math.isnan(of[k]), of[k])) for of in losses]
        cohort.clusters[torch.from_numpy(members.slots)] = torch.from_numpy(chosen)
        for cluster, (row, buffers) in enumerate(models):
            index = index_of(members.slots[chosen == cluster], self._task.device)
            pull_down(row, cohort.rows, index)
            if not local:
                pull_down(buffers, cohort.buffers, index)

    def of_global(self, workers: Sequence[int], round: int) -> dict[int, Tested]:
        """Test the global model on the local test samples of workers, or of owners without training samples.

        Returns the loss and accuracy of each worker under the key "global".
        """
        members = [WorkItem(0, worker, round) for worker in workers]
        return self._tested({GLOBAL: self._of_server(members, self._shared.server.row, self._shared.server.buffers)})

    def before_training(self, members: WorkItems) -> dict[int, Tested]:
        """Test the global model, and the personal models if there are any, on the workers' local test samples.

        Call `load` before. Returns the loss and accuracy of each model, under the keys "global" and "personal".
        """
        server = self._shared.server
        tests = {GLOBAL: self._of_server(members, server.row, server.buffers)}
        if isinstance(self._task.algorithm, PersonalModel):
            tests[PERSONAL] = ModelTests(members, self._personal)
        return self._tested(tests)

    def after_training(self, members: WorkItems) -> dict[int, Tested]:
        """Test the models that workers have just trained, on the workers' local test samples.

        Returns the loss and accuracy of each worker under the key "fine_tuned".
        """
        return self._tested({FINE_TUNED: ModelTests(members, self._personal)})

    def _of_server(
        self, members: Sequence[WorkItem], row: Tensor, buffers: Tensor, *, local: bool = False
    ) -> ModelTests:
        """Return tests of a global model on workers' samples, with each worker's own buffers if `local` is true."""
        own = self._shared.cohort.buffers
        return ModelTests(members, lambda member: (row, own[member.slot] if local else buffers), shared=not local)

    def _personal(self, member: WorkItem) -> tuple[Tensor, Tensor]:
        cohort, slot = self._shared.cohort, member.slot
        worker_state = {name: rows[slot] for name, rows in cohort.kept.items()}
        return personal_model(self._task.algorithm, cohort.rows[slot], cohort.buffers[slot], worker_state)

    def _tested(self, tests: dict[str, ModelTests]) -> dict[int, Tested]:
        """Test models on the workers' local test samples. Return the loss and accuracy by worker and key."""
        correct, tested = correct_of(self._task.learning_task), dict[int, Tested]()
        results = self._sums([*tests.values()], LOCAL_TESTS, correct)
        for (key, (members, *_)), of_tests in zip(tests.items(), results, strict=True):
            for member, sums in zip(members, of_tests, strict=True):
                tested.setdefault(member.worker, {})[key] = sums.loss, None if correct is None else sums.accuracy
        return tested

    def _sums(
        self, several: Sequence[ModelTests], purpose: str, correct: Correct | None = None
    ) -> list[list[MetricSums]]:
        """Test models. Return, for each element of `several`, the metric sums of each worker, on the host.

        See `StackedTests.__call__` for the arguments.
        """
        if self._stacked is not None and self._stacked.are_possible:
            return self._stacked(several, purpose, correct)
        sums = list[MetricSums]()
        for tests in several:
            for member in tests.members:
                with self._process.working_on(member.worker, member.round):
                    sums.append(self._test(*tests.model_of(member), member, purpose, correct))
        on_host = iter(MetricSums.on_host(sums))
        return [[*islice(on_host, len(tests.members))] for tests in several]

    def _test(
        self, row: Tensor, buffers: Tensor, member: WorkItem, purpose: str, correct: Correct | None
    ) -> MetricSums:
        """Test a model with parameters `row` [d] and `buffers` [b] on a worker's samples."""
        task, learning, source = self._task, self._task.learning_task, self._batch_source
        loss_of = self._objective.loss if correct is None else learning.loss
        is_joint, joint_batches = joint_of(learning), list[tuple[Tensor, Tensor]]()

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            if is_joint is None or not is_joint(outputs, targets):
                return loss_of(outputs, targets)
            joint_batches.append((outputs, targets))
            return outputs.new_zeros(())

        samples = source.test_samples if purpose == LOCAL_TESTS else source.samples_seen
        batches = samples(member.worker, member.round, test_batch_size(task.device))
        self._module.load(row.clone(), self._gradient, buffers)
        seed_everything(task.device, task.experiment.seed, purpose, member.round, member.worker)
        sums = test(self._module.module, batches, loss, correct, counts_of(learning))
        if joint_batches:
            outputs, targets = map(torch.cat, zip(*joint_batches, strict=True))
            sums = sums._replace(loss_sum=learning.loss(outputs, targets).to(sums.loss_sum.dtype) * len(targets))
        return sums
