"""Communication between the processes that compute a task together."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedsim.engines.pool.process_context import ProcessContext
from fedsim.system.devices import synchronize, to_device

T = TypeVar("T")

SLOT = 2**14  # bytes that a process of a pool sends to the others at once
LENGTH = 8  # bytes of the length of a message


class Group:
    """The processes that compute a task, with the same tensors in shared memory; one process is a group too.

    All processes call each method at the same point of a round. Rows are addressed by slot: the number of a member in
    the cohort, and after the cohort the server's own row. Here the rows of all members lie in memory that all processes
    share, so most methods return what they get. `Ranks` overrides those that differ where each process has the rows of
    its own members.

    Args:
        mailbox: bytes [count, SLOT] that all processes map; None for one process.

    Attributes:
        process: its heartbeats, and its share of what the processes that share memory divide among them.
        index, count: its share of the members and of the test batches.
        computes: whether this process computes what is computed once in each memory: the first process of those that
            share memory, and every rank. What only one of all processes does is done where `index` is 0.
        divided: whether each process has rows of its own, and its own columns of the optimizer's state.
    """

    divided = False

    def __init__(self, process: ProcessContext, device: torch.device, mailbox: Tensor | None = None) -> None:
        self.process, self.index, self.count = process, process.index, process.count
        self.computes, self._device = process.index == 0, device
        self._boxes = [] if mailbox is None else [box.numpy() for box in mailbox]

    def assign(self, slots: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
        """Return the members that this process trains.

        Args:
            slots: of all members of the cohort.
            steps: that each of them takes.

        Returns the position of each in `slots`, and the row of `CohortRows.rows` that it trains.
        """
        return [(place, slots[place]) for place in balance_load(steps, self.count)[self.index]]

    def here(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the positions of the slots whose rows are in this memory, and the numbers of these rows."""
        return list(range(len(slots))), list(slots)

    def columns(self, d: int) -> slice:
        """Return the columns of the global row [d] whose optimizer state is in this memory."""
        return slice(0, d)

    def of_all(self, values: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the values [n, ...] of these slots, from `values` [rows, ...] of each memory; read only."""
        return rows_at(values, slots)

    def sum_of(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the sum [w] of the rows at these slots, of `rows` [rows, w] in each memory."""
        return rows[list(slots)].sum(0)

    def columns_of(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        """All rows at these slots, in the `columns` of this process; by slot."""
        return rows

    def gather_rows(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        """All rows at these slots, whole and by slot, in the first process; elsewhere the result is of no use."""
        return rows

    def return_rows(self, rows: Tensor, slots: Sequence[int]) -> tuple[list[int], Tensor]:
        """What the first process has at these slots, in the processes that write it to their rows.

        Args:
            rows: the result of `gather_rows`.

        Returns the numbers of the rows to write here, and a copy of what to write.
        """
        mine = list(slots) if self.computes else []
        return mine, _copies_of(rows, mine)

    @contextlib.contextmanager
    def at_first(self) -> Iterator[list[Any]]:
        """Around what only the first process does; it may put results into the list.

        Ranks get that list, and all raise the ExperimentError that the first one raises; after any other error of the
        first one they end as after the loss of a rank.
        """
        yield []

    def divide(self, update: list[tuple[slice, Tensor]]) -> list[tuple[slice, Tensor]]:
        """Columns, and the update in them, of those that this process moves.

        Args:
            update: all columns and the whole update in the first process, elsewhere nothing.
        """
        return update

    def complete(self, row: Tensor) -> None:
        """Set the columns of the other processes in a row [d] in which each process has set its `columns`."""

    def reduce(self, values: Tensor, how: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum or the maximum over processes that have different rows or columns, in place."""
        return values

    def sum_columns(self, row: Tensor) -> Tensor:
        """Return the sum over such processes of rows [d], in the `columns` of this process."""
        return row

    def states_by_columns(self) -> dict[str, Tensor]:
        """Copies [d] of the optimizer states that ranks divide by columns; empty where memory is shared."""
        return {}

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        """Set these states from such tensors."""

    def barrier(self) -> None:
        """Wait until all processes have arrived, and see what they have written."""
        if self.count > 1:
            synchronize(self._device)
        self.process.barrier.wait()

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in their order, in each of them."""
        if self.count == 1:
            return [value]
        data, received = pickle.dumps(value), [bytearray() for _ in self._boxes]
        lengths = [-1] * self.count
        while any(len(parts) != length for parts, length in zip(received, lengths, strict=True)):
            start = len(received[self.index])
            part = data[start : start + SLOT - LENGTH]
            own_box: Any = self._boxes[self.index]
            own_box[: LENGTH + len(part)] = memoryview(len(data).to_bytes(LENGTH, "little") + part)
            self.barrier()
            lengths = [int.from_bytes(box[:LENGTH].tobytes(), "little") for box in self._boxes]
            for box, parts, length in zip(self._boxes, received, lengths, strict=True):
                parts += box[LENGTH : LENGTH + length - len(parts)].tobytes()
            self.barrier()  # all have read what is overwritten next
        return [pickle.loads(parts) for parts in received]

    def from_first(self, value: T) -> T:
        """Return the value of the first process, in each of them; ranks have it already."""
        return self.gather(value if self.index == 0 else None)[0]  # type: ignore[return-value]

    def collect(self, values: Tensor) -> None:
        """Give every process all rows of `values`, of which process i has computed rows i, i + count, ..."""

    def describe_failure(self) -> str:
        """Describe the failure in this process for an error message, such as `worker 3 in round 2 failed`."""
        table = self.process.table
        worker = table.worker(self.index)
        return f"{worker} failed" if worker else f"failed {table.activity(self.index)}"


def new_mailbox(count: int) -> Tensor:
    """Return the bytes in which the processes of a pool give each other small objects; share it with them."""
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


def rows_at(rows: Tensor, slots: Sequence[int]) -> Tensor:
    """Return the rows at these slots; a view if the slots are consecutive."""
    slots = list(slots)
    if not slots or slots == list(range(slots[0], slots[-1] + 1)):
        return rows[slots[0] : slots[-1] + 1] if slots else rows[:0]
    return _copies_of(rows, slots)


def _copies_of(rows: Tensor, slots: list[int]) -> Tensor:
    return rows[to_device(torch.tensor(slots, dtype=torch.int64), rows.device)]
