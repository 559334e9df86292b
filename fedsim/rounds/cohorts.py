"""The workers of each round, and the part of them that a process trains."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedsim.config.experiment import Experiment
from fedsim.data import Shards
from fedsim.errors import ExperimentError
from fedsim.rounds.executor import Executor
from fedsim.rounds.round_clock import Clock
from fedsim.server import Cohort, CohortSampler
from fedsim.training.batches import WorkItems
from fedsim.training.weights import AggregationContext, set_cohort_weights, weights_of


@dataclass(frozen=True)
class RoundPlan:
    """Workers that train together in a round.

    Attributes:
        round: number of the round, from 1.
        cohort: workers drawn for the round.
        work: work items of all workers.
        mine: work items of this process, including the server's training on its own samples, if any.
        context: all workers with their weights, for an aggregation in which all of them take part.
    """

    round: int
    cohort: Cohort
    work: WorkItems
    mine: WorkItems
    context: AggregationContext

    @property
    def reached(self) -> list[int]:
        """IDs of the workers that receive the model, including the workers that drop out."""
        return [*self.cohort.workers, *self.cohort.dropped]


class Cohorts:
    """Draws the workers of each round, and divides them among the processes.

    Args:
        executor: executor of this process.
        clock: virtual clock, which some cohort strategies read.
    """

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor, self._clock = executor, clock
        self.draw = sampler_of(executor.task.experiment, executor.shared.data.shards)
        self._prepared: tuple[int, Cohort, WorkItems, WorkItems] | None = None  # the next round

    def plan(self, round: int) -> RoundPlan:
        """Return the plan of a round, and store the weights of its workers.

        Raises ExperimentError if the processes have drawn different cohorts.
        """
        task, shared, team = self._executor.task, self._executor.shared, self._executor.team
        is_prepared = self._prepared is not None and self._prepared[0] == round
        cohort, work, mine = self._prepared[1:] if self._prepared and is_prepared else self._drawn(round)
        if cohort.weights is not None and team.computes:
            set_cohort_weights(shared, {worker: cohort.weights[worker] for worker in cohort.workers})
        if len(set(team.gather(hash(tuple(cohort.workers))))) > 1:
            raise ExperimentError(
                f"{self.draw.strategy.place}: returned different cohorts in different processes in round {round}; use "
                "the argument `rng` for random draws, or engine=serial"
            )
        workers, samples = work.workers.tolist(), work.sizes.tolist()
        weights = weights_of(task, shared, workers, samples)
        context = AggregationContext(range(len(work)), workers, samples, weights, (round,))
        return RoundPlan(round, cohort, work, mine, context)

    def prepare_next(self, round: int) -> None:
        """Draw the workers of the round after `round`, and their batches, while a GPU still computes `round`.

        This method does nothing if the next cohort may depend on the results of `round`, which are not known yet.
        """
        experiment, strategy = self._executor.task.experiment, self.draw.strategy
        is_useful = self._executor.task.device.type != "cpu" and not self._executor.team.divided
        # Only strategies that amplify privacy are known to choose at random, independently of the results.
        is_random = hasattr(experiment.sampling.registration.target, "amplifies")
        reads_results = "losses" in strategy.accepts or "now" in strategy.accepts
        if round == experiment.rounds or not is_useful or not is_random or reads_results:
            return
        with contextlib.suppress(Exception):  # the next round raises the same error
            self._prepared = round + 1, *self._drawn(round + 1)
            self._executor.trainer.announce(self._prepared[-1])

    def work_of(self, workers: Sequence[int], round: int) -> tuple[WorkItems, WorkItems]:
        """Return the work items of all `workers` in a round, and the items that this process trains.

        The latter include the server's training on its own samples, if any.
        """
        executor, n, root = self._executor, len(workers), self._executor.batch_source.root
        ids, slots = np.array(workers, dtype=np.int64), np.arange(n)
        if root is not None:
            ids, slots = np.append(ids, root), np.append(slots, len(executor.shared.cohort.workers))
        work = executor.batch_source.rounds_of(slots, ids, np.full_like(slots, round), np.zeros_like(slots))
        return work[:n], executor.team.assign(work, executor.trainer.width)

    def _drawn(self, round: int) -> tuple[Cohort, WorkItems, WorkItems]:
        cohort = self.draw(round, self._clock.now, partial(self._executor.global_losses, round=round))
        return cohort, *self.work_of(cohort.workers, round)


def sampler_of(experiment: Experiment, shards: Shards) -> CohortSampler:
    """Return the sampler that draws the workers of each round.

    Raises ExperimentError if the sampling strategy needs the workers' numbers of samples, and these are not known.
    """
    return CohortSampler(
        strategy=experiment.sampling.component,
        seed=experiment.seed,
        size=experiment.cohort_size,
        shards=shards,
        dropout=experiment.sampling.dropout_rate,
        weighted=experiment.aggregate.weights == "inverse_probability",
    )
