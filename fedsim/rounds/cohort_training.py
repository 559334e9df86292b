"""Training of the workers of a round, and values that some client algorithms and rules need before the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fedsim.clients import CohortGradient
from fedsim.rounds.cohorts import RoundPlan
from fedsim.rounds.executor import Executor
from fedsim.training.stacked_tests import ModelTests

BeforeTraining = Callable[[Executor, RoundPlan], None]


class CohortTraining:
    """Trains the workers of a round in one process. `CohortRows.rows` then contains their trained parameters.

    Args:
        executor: executor of this process.
        meanwhile: function that is called with the number of the round while a GPU still computes.

    Attributes:
        first: functions that are called before the training, in this order.
    """

    def __init__(self, executor: Executor, meanwhile: Callable[[int], None] = lambda round: None) -> None:
        self._executor, self._meanwhile = executor, meanwhile
        self.first: list[BeforeTraining] = []
        if executor.task.algorithm.full_gradient:
            self.first.append(compute_full_gradients)
        if executor.task.experiment.rule.accepts("losses"):
            self.first.append(compute_losses)

    def train(self, plan: RoundPlan) -> None:
        """Train this process's workers, each on its own samples."""
        for function in self.first:
            function(self._executor, plan)
        with self._executor.in_precision():
            self._executor.trainer.train(plan.mine, partial(self._meanwhile, plan.round))


def compute_full_gradients(executor: Executor, plan: RoundPlan) -> None:
    """Compute each worker's gradient over all its samples. Some client algorithms receive the mean over the cohort."""
    team, shared, algorithm = executor.team, executor.shared, executor.task.algorithm_at(plan.round)
    with executor.in_precision():
        executor.trainer.full_gradients(plan.mine)
    if not isinstance(algorithm, CohortGradient):
        return
    team.barrier()
    if team.computes:
        total = team.sum_of(shared.cohort.full_gradients, plan.context.slots)
        algorithm.receive_gradients(shared.server.algorithm, total / len(plan.context.slots))
    team.barrier()


def compute_losses(executor: Executor, plan: RoundPlan) -> None:
    """Compute the loss of the received model on each worker's training samples, for the aggregation rule."""
    cohort, rows = executor.shared.cohort, executor.shared.cohort.rows
    tests = ModelTests(plan.mine, lambda member: (rows[member.slot], cohort.buffers[member.slot]))
    [losses] = executor.worker_tests.training_losses(tests)
    cohort.losses[torch.from_numpy(plan.mine.slots)] = torch.tensor(losses, dtype=torch.double)
