"""Base class of the kinds of rounds: copying of models, states, traffic and virtual time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from fedsim.core.rows import index_of, pull_down
from fedsim.records.record import RoundRecord
from fedsim.records.round_stats import AggregationStats, SentUpdates
from fedsim.rounds.cohort_training import CohortTraining
from fedsim.rounds.cohorts import Cohorts, RoundPlan
from fedsim.rounds.executor import Executor
from fedsim.rounds.level import Level
from fedsim.rounds.private_rounds import PrivateRounds
from fedsim.rounds.round_clock import Clock
from fedsim.training.batches import WorkItems
from fedsim.training.memory import buffer_bytes, received_bytes
from fedsim.training.shared_state import message_bytes
from fedsim.training.weights import AggregationContext


class RoundKind(ABC):
    """A kind of round. Its method `run` trains a cohort and updates the global model.

    All processes call the same methods at the same time.

    Args:
        executor: executor of this process.
        cohorts: workers of each round.
        level: server, which the kinds of a run share.

    Attributes:
        server: parameter server of the global model.
        levels: all servers, by the prefix of their states in a checkpoint.
    """

    def __init__(self, executor: Executor, cohorts: Cohorts, level: Level) -> None:
        self.executor, self.team, self.task, self.shared = executor, executor.team, executor.task, executor.shared
        self.cohorts, self.training = cohorts, CohortTraining(executor, cohorts.prepare_next)
        self.level, self.server, self.levels, self.phase = level, level.server, {"": level}, executor.phase

    @staticmethod
    def new_level(executor: Executor, privacy: PrivateRounds) -> Level:
        """Return the level of the server that updates the global model."""
        return Level(executor.team, executor.task, executor.shared, privacy, executor.processing)

    @abstractmethod
    def run(self, plan: RoundPlan) -> AggregationStats:
        """Run a round until the global model is updated. Return statistics of all its aggregations."""

    def check(self, plan: RoundPlan) -> None:
        """Raise ExperimentError if the rule cannot aggregate the updates of the cohort."""
        self.level.check_reports(plan.round, plan.cohort)

    def aggregate_at_top(self, plan: RoundPlan, stats: AggregationStats) -> AggregationStats:
        """Aggregate at the top level of a hierarchy, and return `stats` with the statistics of the top level added.

        This method is also called in a round without a cohort.
        """
        return stats

    def receive_messages(self, context: AggregationContext, excluded: Sequence[int]) -> None:
        """Pass the sum of the workers' messages to the client algorithm's method `receive`, which runs at the server.

        Messages of `excluded` workers are left out.
        """
        if not self.shared.cohort.messages:
            return
        if self.team.computes:
            pairs = zip(context.slots, context.workers, strict=True)
            slots = [slot for slot, worker in pairs if worker not in excluded]
            sums = self.level.aggregator.sums_of_messages(slots)
            algorithm, workers = self.task.algorithm_at(*context.moment), len(self.shared.data.shards)
            algorithm.receive(self.shared.server.algorithm, sums, len(slots), workers)
        self.team.barrier()

    def combine_buffers(self, plan: RoundPlan, stats: AggregationStats) -> None:
        """Set the global model's buffers to the mean of the buffers of the workers whose updates were aggregated."""
        self.level.aggregator.combine_buffers(plan.context, stats.excluded)

    def save_states(self, plan: RoundPlan, excluded: Sequence[int]) -> None:
        """Store the states of the workers that this process has trained, except `excluded` workers."""
        rows = self.shared.cohort.worker_rows
        self.executor.states.save_cohort(plan.cohort.workers, plan.mine, excluded, rows)

    def train_losses(self, plan: RoundPlan) -> Tensor:
        """Return the mean training loss of each worker of the cohort, float64 [n]."""
        return self.team.of_all(self.shared.cohort.train_loss, plan.context.slots)

    def copy_model(self, row: Tensor, buffers: Tensor, mine: WorkItems) -> None:
        """Copy parameters [d] and buffers [b] of a server to the models of the workers `mine`."""
        pull_down(row, self.shared.cohort.rows, index_of(mine.slots, self.task.device))
        self.copy_buffers(buffers, mine)

    def copy_buffers(self, buffers: Tensor, mine: WorkItems) -> None:
        """Copy buffers [b] of a server to the workers `mine`, unless workers keep their own buffers."""
        if self.task.experiment.buffers != "local":
            pull_down(buffers, self.shared.cohort.buffers, index_of(mine.slots, self.task.device))

    def parts(self, workers: list[int], round: int) -> Iterator[tuple[list[int], WorkItems]]:
        """Divide the `workers` to test into parts that are not larger than a cohort.

        Yields, for each part, its worker IDs and the work items of the workers that this process tests.
        """
        size = self.task.experiment.cohort_size
        for part in (workers[start : start + size] for start in range(0, len(workers), size)):
            yield part, self.cohorts.work_of(part, round)[1]

    def pass_time(self, clock: Clock, plan: RoundPlan, sent: SentUpdates) -> None:
        """Advance the virtual clock until the slowest worker of the cohort has finished."""
        received = 0 if self.task.experiment.downlink else received_bytes(self.task, self.shared, plan.round)
        clock.finish_round(self.task, plan.work, sent, received + self.server.broadcast_bytes)

    def bytes_up(self, plan: RoundPlan, sent: SentUpdates) -> int:
        """Return how many bytes all workers of a round send. `sent` has the sizes of their updates."""
        message = message_bytes(self.task, self.shared)[1]
        return sent.nbytes + len(plan.cohort.workers) * (message + buffer_bytes(self.task, self.shared))

    def bytes_down(self, plan: RoundPlan, sent: SentUpdates) -> int:
        """Return the number of bytes that workers receive, including workers that send no update."""
        task, nbytes = self.task, self.bytes_for_losses(plan)
        if not task.experiment.downlink:
            parameters = received_bytes(task, self.shared, plan.round)
            return nbytes + len(plan.reached) * (self.bytes_at_start() + parameters)
        of_all = task.experiment.workers * self.server.broadcast_bytes if plan.cohort.workers else 0
        return nbytes + of_all + len(plan.reached) * self.bytes_at_start()

    def bytes_at_start(self) -> int:
        """Return the number of bytes that a worker receives before its training, in addition to parameters."""
        return buffer_bytes(self.task, self.shared) + message_bytes(self.task, self.shared)[0]

    def bytes_for_losses(self, plan: RoundPlan) -> int:
        """Return the number of bytes received by workers that only compute a loss, by which the cohort is chosen."""
        only_loss = set(plan.cohort.candidates).difference(plan.reached)
        return len(only_loss) * (self.shared.server.row.nbytes + buffer_bytes(self.task, self.shared))

    def complete(self, record: RoundRecord) -> RoundRecord:
        """Return a round's record with the numbers added that only this kind of round has."""
        return record
