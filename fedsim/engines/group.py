"""The processes that compute a task together, as each of them sees the others."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedsim.engines.aggregator import Aggregator, RowAggregator
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.sequential import Trainer
from fedsim.system.devices import synchronize

T = TypeVar("T")

SLOT = 2**14  # bytes that a process of a pool sends to the others at once
LENGTH = 8  # bytes of the length of a message


class Group(Protocol):
    """One process among those that compute a task. All of them call each method at the same point of a round.

    Attributes:
        process: its heartbeats.
        index, count: its share of the members and of the test batches.
        computes: whether this process computes what is computed once in each memory: the first process of those that
            share memory, and every rank.
    """

    process: ProcessContext
    index: int
    count: int
    computes: bool

    def assign(self, slots: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
        """The members that this process trains.

        Args:
            slots: of all members of the cohort.
            steps: that each of them takes.

        Returns the position of each in `slots`, and the row of `SharedState.rows` that it trains.
        """

    def aggregator(self, task: RunTask, shared: SharedState, *, has_root: bool) -> Aggregator:
        """Make the aggregator; `has_root` if the server has a row of its own."""

    def average_gradients(
        self, task: RunTask, step: int, context: AggregationContext, trainer: Trainer
    ) -> AggregationStats | None:
        """Train a step of synchronous SGD without rows of single workers; None if this needs rows."""

    def barrier(self) -> None:
        """Wait until all processes have arrived, and see what they have written."""

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in their order, in each of them."""

    def from_first(self, value: T) -> T:
        """The value of the first process, in each of them; ranks have it already."""

    def collect(self, values: Tensor) -> None:
        """Give every process all rows of `values`, of which process i has computed rows i, i + count, ..."""

    def describe_failure(self) -> str:
        """What has failed here, as part of a sentence: `worker 3 in round 2 failed`."""


class LocalGroup:
    """The processes of one machine, which work on the same tensors; one process is a group too. See `Group`.

    Args:
        mailbox: bytes [count, SLOT] that all processes map; None for one process.
    """

    def __init__(self, process: ProcessContext, device: torch.device, mailbox: Tensor | None = None) -> None:
        self.process, self.index, self.count = process, process.index, process.count
        self.computes, self._device = process.index == 0, device
        self._boxes = [] if mailbox is None else [box.numpy() for box in mailbox]

    def assign(self, slots: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
        return [(place, slots[place]) for place in balance_load(steps, self.count)[self.index]]

    def aggregator(self, task: RunTask, shared: SharedState, *, has_root: bool) -> Aggregator:
        return RowAggregator(self.process, task, shared, len(shared.cohort.rows) - 1 if has_root else None)

    def average_gradients(
        self, task: RunTask, step: int, context: AggregationContext, trainer: Trainer
    ) -> AggregationStats | None:
        return None

    def barrier(self) -> None:
        if self.count > 1:
            synchronize(self._device)
        self.process.barrier.wait()

    def gather(self, value: T) -> list[T]:
        if self.count == 1:
            return [value]
        data, received = pickle.dumps(value), [bytearray() for _ in self._boxes]
        lengths = [-1] * self.count
        while any(len(parts) != length for parts, length in zip(received, lengths, strict=True)):
            start = len(received[self.index])
            part = data[start : start + SLOT - LENGTH]
            own: Any = self._boxes[self.index]
            own[: LENGTH + len(part)] = memoryview(len(data).to_bytes(LENGTH, "little") + part)
            self.barrier()
            lengths = [int.from_bytes(box[:LENGTH].tobytes(), "little") for box in self._boxes]
            for box, parts, length in zip(self._boxes, received, lengths, strict=True):
                parts += box[LENGTH : LENGTH + length - len(parts)].tobytes()
            self.barrier()  # all have read what is overwritten next
        return [pickle.loads(parts) for parts in received]

    def from_first(self, value: T) -> T:
        return self.gather(value if self.index == 0 else None)[0]  # type: ignore[return-value]

    def collect(self, values: Tensor) -> None:
        """Do nothing: all processes write to the same memory."""

    def describe_failure(self) -> str:
        table = self.process.table
        worker = table.worker(self.index)
        return f"{worker} failed" if worker else f"failed {table.activity(self.index)}"


def new_mailbox(count: int) -> Tensor:
    """The bytes in which the processes of a pool give each other small objects; share it with them."""
    return torch.zeros(count, SLOT, dtype=torch.uint8)


def balance_load(costs: Sequence[int], count: int, most: int | None = None) -> list[list[int]]:
    """Assign items to `count` processes: the costliest first, each to the process with the least load.

    Args:
        costs: of each item.
        most: maximum number of items for a process.

    Returns the numbers of each process's items, ascending; the same for the same costs.
    """
    assignments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        process = min((p for p in range(count) if len(assignments[p]) != most), key=loads.__getitem__)
        assignments[process].append(item)
        loads[process] += costs[item]
    return [sorted(items) for items in assignments]
