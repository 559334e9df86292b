"""A round whose cohort trains in waves, because the updates of all workers together would need too much memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedsim.records.round_stats import AggregationStats, SentUpdates
from fedsim.rounds.aggregator import StreamedSums
from fedsim.rounds.cohort_training import CohortTraining
from fedsim.rounds.cohorts import Cohorts, RoundPlan
from fedsim.rounds.executor import Executor
from fedsim.rounds.level import Level
from fedsim.rounds.parameter_round import ParameterRound
from fedsim.rounds.private_rounds import PrivateRounds
from fedsim.training.batches import WorkItems


class WaveRound(ParameterRound):
    """Round that trains one part of the cohort (a wave) after another, and adds up the updates."""

    def __init__(self, executor: Executor, cohorts: Cohorts, level: Level) -> None:
        super().__init__(executor, cohorts, level)
        self.training = CohortTraining(executor)  # a wave leaves no time to draw the next round

    @staticmethod
    def new_level(executor: Executor, privacy: PrivateRounds) -> Level:
        parts = executor.team, executor.task, executor.shared, privacy, executor.processing
        return Level(*parts, new_aggregator=StreamedSums)

    @property
    def sums(self) -> StreamedSums:
        assert isinstance(self.level.aggregator, StreamedSums)
        return self.level.aggregator

    def run(self, plan: RoundPlan) -> AggregationStats:
        sent, self.new_states = SentUpdates(), self.executor.states.of_waves(self.team.process.count)
        with self.phase("broadcast"):
            self.server.send(plan.round)
        self.sums.begin(plan.context)
        for positions, work, mine in self.waves_of(plan.work):
            wave = replace(plan, work=work, mine=mine, context=plan.context.of_wave(positions.tolist()))
            with self.phase("broadcast"):
                self.pull_down(wave)
            with self.phase("train"):
                self.training.train(wave)
                self.begin_updates(wave)
                self.team.barrier()
            with self.phase("aggregate"):
                self.add(wave, positions, sent)
        with self.phase("aggregate"):
            return self.update_model(plan.context, sent)

    def add(self, wave: RoundPlan, positions: np.ndarray, sent: SentUpdates) -> None:
        """Add the updates of a wave to the sums, and keep the new states of its workers.

        Args:
            wave: workers of the wave.
            positions: index in the cohort of each worker of the wave.
            sent: receives the sizes of the updates.
        """
        self.level.change_updates(wave.context, wave.mine, sent)
        excluded = self.sums.add(wave.context, positions, wave.work.stacks)
        saved = wave.context.workers if self.team.divided else wave.mine.workers.tolist()
        self.new_states.save_cohort(saved, wave.mine, excluded, self.shared.cohort.worker_rows)
        self.team.barrier()  # all processes have used the rows

    def waves_of(self, work: WorkItems) -> Iterator[tuple[np.ndarray, WorkItems, WorkItems]]:
        """Divide the workers into parts that are trained one after another; see `Team.waves` for the result."""
        return self.team.waves(work, len(self.shared.cohort.train_loss) // self.team.process.count)

    def save_states(self, plan: RoundPlan, excluded: Sequence[int]) -> None:
        self.executor.states.take_over(self.new_states, plan.cohort.workers, excluded)
        del self.new_states

    def train_losses(self, plan: RoundPlan) -> Tensor:
        return self.sums.train_losses(plan.context)

    def parts(self, workers: list[int], round: int) -> Iterator[tuple[list[int], WorkItems]]:
        for _, wave, mine in self.waves_of(self.cohorts.work_of(workers, round)[0]):
            yield wave.workers.tolist(), mine
