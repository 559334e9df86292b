"""What the processes of an engine share: which rows each of them trains, and how they wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from fedsim.engines.aggregator import Aggregator
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats, SentUpdates
from fedsim.engines.row_aggregator import RowAggregator
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.sequential import Trainer
from fedsim.system.devices import synchronize

T = TypeVar("T")


class Exchange(Protocol):
    """One process among those that compute a task.

    Attributes:
        process: its heartbeats.
        index, count: its share of the members and of the test batches.
    """

    process: ProcessContext
    index: int
    count: int

    def assign(self, slots: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
        """The members that this process trains.

        Args:
            slots: of all members of the cohort.
            steps: that each of them takes.

        Returns the position of each in `slots`, and the row of `SharedState.rows` that it trains.
        """

    def aggregator(self, task: TaskSpec, shared: SharedState, *, has_root: bool) -> Aggregator:
        """Make the aggregator; `has_root` if the server has a row of its own."""

    def average_gradients(
        self, task: TaskSpec, step: int, context: AggregationContext, trainer: Trainer
    ) -> AggregationStats | None:
        """Train a step of synchronous SGD without rows of single workers; None if this needs rows."""

    def barrier(self, task: TaskSpec) -> None:
        """Wait until all processes have arrived, and see what they have written."""

    def collect(self, values: Tensor) -> None:
        """Give every process all rows of `values`, of which process i has computed rows i, i + count, ..."""

    def total(self, sent: SentUpdates) -> SentUpdates:
        """The sum of `sent` over all ranks; in processes of one machine `sent` itself, which the engine adds up."""

    def gather(self, found: dict[int, T]) -> dict[int, T]:
        """The union of `found` over all ranks; in processes of one machine `found` itself, which the engine joins."""

    def describe_failure(self) -> str:
        """What has failed here, as part of a sentence: `worker 3 in round 2 failed`."""


class SharedMemory:
    """The processes of one machine work on the same tensors; see `Exchange`."""

    def __init__(self, process: ProcessContext) -> None:
        self.process, self.index, self.count = process, process.index, process.count

    def assign(self, slots: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
        return [(place, slots[place]) for place in balance_load(steps, self.count)[self.index]]

    def aggregator(self, task: TaskSpec, shared: SharedState, *, has_root: bool) -> Aggregator:
        return RowAggregator(self.process, task, shared, len(shared.rows) - 1 if has_root else None)

    def average_gradients(
        self, task: TaskSpec, step: int, context: AggregationContext, trainer: Trainer
    ) -> AggregationStats | None:
        return None

    def barrier(self, task: TaskSpec) -> None:
        if self.count > 1:
            synchronize(task.device)
        self.process.barrier.wait()

    def collect(self, values: Tensor) -> None:
        """Do nothing: all processes write to the same memory."""

    def total(self, sent: SentUpdates) -> SentUpdates:
        return sent

    def gather(self, found: dict[int, T]) -> dict[int, T]:
        return found

    def describe_failure(self) -> str:
        table = self.process.table
        worker = table.worker(self.index)
        return f"{worker} failed" if worker else f"failed {table.activity(self.index)}"


def balance_load(costs: Sequence[int], count: int, most: int | None = None) -> list[list[int]]:
    """Assign items to `count` processes: the costliest first, each to the process with the least load.

    Args:
        costs: of each item.
        most: items that a process gets at most.

    Returns the numbers of each process's items, ascending; the same for the same costs.
    """
    assignments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        process = min((p for p in range(count) if len(assignments[p]) != most), key=loads.__getitem__)
        assignments[process].append(item)
        loads[process] += costs[item]
    return [sorted(items) for items in assignments]
