"""The backend of one rank: this process, and the exchange with the other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fedsim.engines.distributed.parallel_trainer import ParallelTrainer
from fedsim.engines.distributed.process_group import RankGroup, no_heartbeats
from fedsim.engines.distributed.rank_aggregator import RankAggregator, RowPlacement
from fedsim.engines.distributed.rank_worker_states import RankWorkerStates
from fedsim.engines.group import Group, T, balance_load
from fedsim.engines.in_process import InProcess
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.sequential import Trainer
from fedsim.engines.worker_states import WorkerStates, initial_worker_state


class Ranks:
    """One rank among others; see `Group`. Its members' rows are its own, in the order of their slots.

    Args:
        n_rows: number of rows in all ranks.
    """

    computes = True
    rank_aggregator: RankAggregator

    def __init__(self, group: RankGroup, n_rows: int) -> None:
        self.process, self.index, self.count = ProcessContext.alone(), group.index, group.count
        self._group, self._n_rows = group, n_rows

    def assign(self, slots: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
        assignments = balance_load(steps, self.count, most=-(-len(slots) // self.count))
        self.rank_aggregator.placement = RowPlacement(assignments)
        return [(place, row) for row, place in enumerate(assignments[self.index])]

    def aggregator(self, task: TaskSpec, shared: SharedState, *, has_root: bool) -> RankAggregator:
        root_slot = self._n_rows - 1 if has_root else None
        self.rank_aggregator = RankAggregator(self._group, task, shared, self._n_rows, root_slot)
        return self.rank_aggregator

    def average_gradients(
        self, task: TaskSpec, step: int, context: AggregationContext, trainer: Trainer
    ) -> AggregationStats | None:
        if task.hook is None:
            return None
        assert isinstance(trainer, ParallelTrainer)
        aggregator = self.rank_aggregator
        shares = aggregator.linear_shares(context)
        with task.precision.training(task.device):
            mean = trainer.mean_gradient(step, aggregator.own_values(context, shares))
            if task.nonfinite != "keep" and not math.isfinite(mean.sum()):
                aggregator.refuse(context, trainer.not_finite(step))
        aggregator.move_along(context.moment, mean)
        return AggregationStats(shares, [])

    def barrier(self) -> None:
        """Do nothing: ranks wait for each other by what they send."""

    def gather(self, value: T) -> list[T]:
        return self._group.gather_objects(value)

    def from_first(self, value: T) -> T:
        return value

    def collect(self, values: Tensor) -> None:
        own = values[self.index :: self.count].clone()
        values.zero_()
        values[self.index :: self.count] = own
        self._group.all_reduce(values)

    def describe_failure(self) -> str:
        worker = self.process.table.worker(0)
        return f"{worker} failed (rank {self.index})" if worker else f"rank {self.index} failed"


class InRank(InProcess):
    """This process as one of several ranks.

    Attributes:
        n_rows: number of rows in all ranks; set it before a task begins.
    """

    n_rows: int

    def __init__(self, group: RankGroup, threads: int) -> None:
        super().__init__(threads)
        self._group, self.processes = group, group.count

    def new_group(self, task: TaskSpec) -> Ranks:
        ranks = Ranks(self._group, self.n_rows)
        self._group.heartbeats = lambda: ranks.process.heartbeats
        return ranks

    def new_states(self, task: TaskSpec, group: Group) -> WorkerStates:
        assert isinstance(group, Ranks)
        initial, limit = initial_worker_state(task, self.shared), task.worker_state_memory
        placement = lambda: group.rank_aggregator.placement  # noqa: E731
        return RankWorkerStates(initial, self._group, placement, limit, task.scratch_folder)

    def leave(self) -> None:
        self._group.heartbeats = no_heartbeats
        super().leave()
