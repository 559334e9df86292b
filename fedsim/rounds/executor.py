"""Executor: training of a process's workers, and evaluation of the global model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from fedsim.clients.algorithm import state_at_first
from fedsim.core.rows import new_rows, require_finite, require_finite_buffers
from fedsim.core.timer import PhaseTimer
from fedsim.errors import workers_named
from fedsim.processes.process_context import ProcessContext
from fedsim.processes.team import Team
from fedsim.rounds.evaluation import Evaluation, EvaluationResult
from fedsim.rounds.update_steps import ProcessingStep
from fedsim.rounds.worker_states import WorkerStates
from fedsim.rounds.worker_tests import WorkerTests
from fedsim.system.c_libraries import keep_freed_memory
from fedsim.system.devices import synchronize
from fedsim.system.precision import full_precision
from fedsim.training.batches import BatchSource, WorkItem, WorkItems
from fedsim.training.capture import can_capture
from fedsim.training.memory import explain_oom
from fedsim.training.row_module import RowModule
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.trainer import Trainer

MakeTrainer = Callable[[ProcessContext, RunTask, SharedState, BatchSource], Trainer]


class Executor:
    """Trains workers and tests the global model in one process of a run.

    Methods must be called inside the context manager `environment`, which applies PyTorch's settings for the run.

    Args:
        team: processes that compute the run together.
        task: run to compute.
        shared: tensors of the run, which receive the results.
        make_trainer: function that returns the trainer of this process.
        states: states of the workers, kept between rounds.

    Attributes:
        processing: step that applies compressors and other processors to updates.
        timer: seconds of each phase of the current round.
    """

    def __init__(
        self, team: Team, task: RunTask, shared: SharedState, make_trainer: MakeTrainer, states: WorkerStates
    ) -> None:
        if task.device.type == "cpu":
            keep_freed_memory()
        self.team, self.process, self.task, self.shared, self.states = team, team.process, task, shared, states
        self.processing, self.timer = ProcessingStep(team, task, shared), PhaseTimer()
        self.module = RowModule(task.new_module)
        self.gradient = new_rows(1, self.module.layout.d, task.dtype, task.device)[0]
        self.batch_source = BatchSource(task, shared)
        # A step captured as a CUDA graph keeps the precision that was set during the capture.
        with explain_oom(task, self.process.count), self.in_precision():
            self.trainer = make_trainer(self.process, task, shared, self.batch_source)
        captured = self.trainer.replays is not None and can_capture(task.device)
        captured = captured and task.experiment.cuda_graphs is not False
        buffers = torch.zeros_like(shared.server.buffers)
        self.module.layout.read_buffers(self.module.module, out=buffers)
        self._buffers_finite_at_start = buffers.isfinite()
        evaluation = partial(Evaluation, task, shared, self.module, team.index, team.count, captured=captured)
        self._evaluations = [evaluation("test"), evaluation("validation")]
        parts = self.module, self.gradient, self.batch_source, self.trainer.stacked_tests
        self.worker_tests = WorkerTests(self.process, task, shared, *parts)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Return a context manager in which all other methods must be called.

        In its block, TF32 is off, and out-of-memory errors name the settings to reduce.
        """
        named, task = workers_named(self.task.worker_names), self.task
        with explain_oom(task, self.process.count, self.trainer.width), full_precision(task.device), named:
            yield

    def in_precision(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that sets the floating-point precision of training, such as TF32."""
        return self.task.precision.training(self.task.device)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context manager that measures the time of a phase, such as "train"."""
        with self.timer(name):
            yield
            synchronize(self.task.device)

    def load_states(self, cohort: Sequence[int], mine: WorkItems) -> None:
        """Load the states that this process's workers have kept from earlier rounds.

        Args:
            cohort: IDs of all workers of the round.
            mine: workers that this process trains.
        """
        server, algorithm = self.shared.server, self.task.algorithm
        if algorithm.starts_from_current:
            self.states.initial |= state_at_first(algorithm, server.row, server.buffers)
        self.states.load_cohort(cohort, mine, self.shared.cohort.worker_rows)

    def global_losses(self, workers: Sequence[int], round: int) -> np.ndarray:
        """Return the mean loss of the global model on each worker's training samples, float64 [k] for k `workers`."""
        losses, mine = np.zeros(len(workers)), slice(self.team.index, None, self.team.count)
        losses[mine] = self.worker_tests.global_losses(workers[mine], round)
        return np.sum(self.team.gather(losses), axis=0)  # each loss is 0 in all processes but one

    def train(self, members: Sequence[WorkItem]) -> None:
        """Train the given workers in this process.

        Training starts from each worker's parameters in `CohortRows.rows`, and overwrites them.
        """
        with self.in_precision():
            if self.task.algorithm.full_gradient:
                self.trainer.full_gradients(members)
            self.trainer.train(members)
        synchronize(self.task.device)

    def train_apart(self, members: Sequence[WorkItem]) -> None:
        """Divide the given workers among the processes, and train this process's share.

        Training starts from each worker's parameters in `CohortRows.rows`, and overwrites them. The workers may be in
        different rounds.
        """
        index, count, width = self.team.index, self.team.count, self.trainer.width
        # Single steps of a worker stay in one process, which keeps the order of its samples.
        by_step = [
            member._replace(stack=member.slot // (width or 1))
            for member in sorted(members, key=lambda member: member.slot)
            if member.step is not None
        ]
        mine = [member for member in by_step if member.stack % count == index]
        if len(by_step) < len(members):
            rounds = self.batch_source.work([member for member in members if member.step is None])
            mine = [*self.team.assign(rounds, width), *mine]
        self.train(mine)

    def require_finite(self, round: int) -> None:
        """Raise DivergedError if the global model contains NaN or infinity after `round`."""
        if self.team.computes and self.task.experiment.nonfinite != "keep":
            for cluster in range(self.task.algorithm.clusters):
                row, buffers = self.shared.server.model(cluster)
                require_finite(row, round)
                require_finite_buffers(buffers, self._buffers_finite_at_start, round)

    def check_and_test(self, round: int) -> None:
        """Test the global model after `round`. Raises DivergedError if the model contains NaN or infinity."""
        self.require_finite(round)
        self.test(round)

    def test(self, round: int) -> None:
        """Test the global model on this process's share of the test and validation batches, and store the results."""
        for evaluation in self._evaluations:
            evaluation(round, self.process.heartbeat)
            for values in evaluation.results:
                self.team.collect(values)

    def tested(self) -> EvaluationResult:
        """Return the results of the latest test of the global model."""
        return EvaluationResult.of(self.task, self.shared)

    def replay_refusal(self) -> str | None:
        """Return why this process trains without CUDA graphs; None if it uses CUDA graphs."""
        replays = self.trainer.replays
        return "workers are not trained in stacks" if replays is None else replays.refusal
