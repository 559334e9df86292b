"""Tests of the models of single workers on the workers' own test samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedsim.clients import PersonalModel
from fedsim.config.schema import OWN
from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.data import Shards
from fedsim.errors import ExperimentError
from fedsim.records.worker_results import Tested, WorkerResults
from fedsim.rounds.executor import Executor
from fedsim.rounds.round_kind import RoundKind
from fedsim.training.batches import WorkItems
from fedsim.training.task import RunTask


class LocalTests:
    """Tests the models of single workers on the workers' own test samples.

    The tests overwrite the tensors that contain the cohort's updates, so test only after these have been used.

    Args:
        executor: executor of this process.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._settings = executor, executor.task.experiment.worker_evaluation
        self._workers, self._unseen = workers_to_evaluate(executor.task, executor.shared.data.worker_tests)

    def are_due(self, round: int) -> bool:
        """Whether single workers are tested after `round`."""
        return bool(self._workers or self._unseen) and round % self._settings.every == 0

    def __call__(self, round: int, kind: RoundKind) -> WorkerResults | None:
        """Test after a round of the given `kind`, and return the results; None if the experiment tests no workers."""
        if not (self._workers or self._unseen):
            return None
        team, tested, task = self._executor.team, dict[int, Tested](), self._executor.task
        for workers, mine in kind.parts(self._workers, round):
            for part in team.gather(self._test(workers, mine, round)):
                tested |= part
        owners = self._unseen[team.index :: team.count]
        unseen = self._executor.worker_tests.of_global(owners, round)
        unseen = {owner: values for part in team.gather(unseen) for owner, values in part.items()}
        tests = self._executor.shared.data.worker_tests
        samples = {worker: tests.size(worker) for worker in [*tested, *unseen]}
        results = WorkerResults.of(round, samples, tested, task.worker_names)
        of_unseen = WorkerResults.of(round, samples, unseen, task.worker_names) if unseen else None
        return replace(results, unseen=of_unseen) if unseen else results

    def _test(self, workers: Sequence[int], mine: WorkItems, round: int) -> dict[int, Tested]:
        """Test the models of this process's share of `workers`, and return the results by worker ID.

        Args:
            workers: worker IDs, at most as many as are in a cohort.
            mine: workers that this process tests.
            round: number of the round.
        """
        executor, task = self._executor, self._executor.task
        executor.load_states(workers, mine)
        members = mine[mine.workers < len(executor.shared.data.shards)]  # without the server's own row
        executor.worker_tests.load(members)
        tested = executor.worker_tests.before_training(members)
        if self._settings.fine_tune:
            ends = isinstance(task.algorithm, PersonalModel)  # the worker state is part of the personal model
            steps = task.schedule.of(members.workers, members.rounds).batches_per_epoch(members.sizes)
            members = replace(members, steps=self._settings.fine_tune * steps, ends=ends)
            executor.train(members)
            for worker, results in executor.worker_tests.after_training(members).items():
                tested[worker] |= results
        return tested


def workers_to_evaluate(task: RunTask, tests: Shards) -> tuple[list[int], list[int]]:
    """Return the IDs of the workers whose models are tested, and the numbers of the owners without training samples.

    `worker_evaluation.workers` workers and as many of these owners are drawn at random. Byzantine workers and workers
    without test samples are left out. Both lists are empty if the experiment tests no workers.

    Raises ExperimentError if no worker with held-out test samples remains.
    """
    experiment, most, byzantine = task.experiment, task.experiment.worker_evaluation.workers, task.byzantine.fixed
    fraction = experiment.data.local_test_fraction

    def drawn(candidates: Sequence[int], purpose: str) -> list[int]:
        rng, n = numpy_generator(experiment.seed, purpose), len(candidates)
        return [candidates[position] for position in sample_workers(rng, n, min(n, most)).tolist()]

    if not fraction:
        return [], []
    if fraction == OWN:
        able = [worker for worker in range(experiment.workers) if tests.size(worker) and worker not in byzantine]
        return drawn(able, "evaluated"), drawn(range(experiment.workers, len(tests)), "unseen")
    able = [worker for worker in drawn(range(experiment.workers), "evaluated") if tests.size(worker)]
    workers = [worker for worker in able if worker not in byzantine]
    if not workers:
        raise ExperimentError(
            f"data.local_test_fraction = {fraction}: no evaluated worker has test samples; use a larger fraction"
        )
    return workers, []
