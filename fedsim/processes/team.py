"""Communication between the processes that compute a run together."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.core.rows import index_of
from fedsim.processes.process_context import ProcessContext
from fedsim.system.devices import synchronize, to_device

T = TypeVar("T")

SLOT = 2**14  # bytes of one process's mailbox, that is, of one part of a message
LENGTH = 8  # bytes that store the length of a message


class Team:
    """Processes that compute a run together, with the same tensors in shared memory; also a single process.

    All processes must call each method at the same time. Workers are given by `slots`, their positions in the cohort.
    The server's own model, if there is one, has the position after the last worker. A row is the flat vector of a
    worker's parameters, update or state. The subclass `Ranks` is for processes without shared memory.

    Args:
        process: context of this process.
        device: device of the rows.
        mailbox: shared memory through which the processes exchange objects; None for a single process.

    Attributes:
        process: context of this process.
        index, count: index of this process, and number of processes.
        computes: whether this process does the work that is done only once for all processes that share memory.
        divided: whether each process stores only some of the workers' updates and optimizer states.
    """

    divided = False

    def __init__(self, process: ProcessContext, device: torch.device, mailbox: Tensor | None = None) -> None:
        self.process, self.index, self.count = process, process.index, process.count
        self.computes, self._device = process.index == 0, device
        self._boxes = [] if mailbox is None else [box.numpy() for box in mailbox]

    def assign(self, work: Any, width: int | None) -> Any:
        """Divide the workers among the processes, and return those that this process trains, in stacks.

        The stacks do not depend on the number of processes, because stacks of different widths round differently.

        Args:
            work: `WorkItems` of all workers, with their positions in the cohort as `slots`.
            width: maximum number of workers in a stack; None to train workers one by one.
        """
        stacks, costs = divide_into_stacks(work.steps, width), work.steps.tolist()
        numbers = balance_load([sum([costs[position] for position in stack]) for stack in stacks], self.count)[
            self.index
        ]
        return in_stacks(work, [stacks[number] for number in numbers])

    def waves(self, work: Any, width: int) -> Iterator[tuple[np.ndarray, Any, Any]]:
        """Divide the workers into waves, which are trained one after another, each like a cohort with its own slots.

        A wave has one stack (workers that are trained in one batched call) per process. The stacks and their order do
        not depend on the number of processes. The caller must finish a wave before it asks for the next one.

        Args:
            work: `WorkItems` of all workers.
            width: maximum number of workers in a stack.

        Yields the positions of the wave's workers in `work`, their `WorkItems`, and those that this process trains.
        """
        stacks = divide_into_stacks(work.steps, width)
        for start in range(0, len(stacks), self.count):
            positions = stacks[start : start + self.count]
            wave = in_stacks(work, positions)
            wave = replace(wave, slots=np.arange(len(wave)))
            yield np.concatenate(positions), wave, wave[wave.stacks == self.index]

    def here(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the workers whose updates this process can access.

        Returns two lists: indices into `slots`, and the indices of the same workers in this process's tensors.
        """
        return list(range(len(slots))), list(slots)

    def columns(self, d: int) -> slice:
        """Return the range of the global parameters [d] whose optimizer state this process can access."""
        return slice(0, d)

    def of_all(self, values: Tensor, slots: Sequence[int]) -> Tensor:
        """Collect per-worker values from all processes, and return the values of n workers as a read-only tensor.

        Args:
            values: values [rows, ...] that this process stores, with one entry per row. The result is [n, ...].
            slots: positions of the workers in the cohort.
        """
        return rows_at(values, slots)

    def sum_of(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the sum [width] of several workers' vectors.

        Args:
            rows: vectors of all workers that this process stores, [n, width].
            slots: positions of the workers in the cohort.
        """
        return rows[list(slots)].sum(0)

    def columns_of(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        """Return several workers' updates, restricted to the parameters that this process aggregates.

        Args:
            rows: updates of all workers that this process stores.
            slots: positions of the workers in the cohort.
        """
        return rows

    def gather_rows(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        """Return several workers' updates in the first process. In other processes, the result is undefined.

        Args:
            rows: updates of all workers that this process stores.
            slots: positions of the workers in the cohort.
        """
        return rows

    def return_rows(self, rows: Tensor, slots: Sequence[int]) -> tuple[list[int], Tensor]:
        """Send the updates that the first process has changed back to the processes that store them.

        Args:
            rows: result of `gather_rows`, changed by the first process.
            slots: positions in the cohort of the workers whose updates have changed.

        Returns the row indices of the updates that this process must overwrite, and the new updates.
        """
        changed = list(slots) if self.computes else []
        return changed, rows[to_device(torch.tensor(changed, dtype=torch.int64), rows.device)]

    @contextlib.contextmanager
    def at_first(self) -> Iterator[list[Any]]:
        """Return a context manager for work that only the first process does. It provides a list for the results.

        At the end of the block, all ranks get the list of rank 0, or raise the ExperimentError that rank 0 raised.
        """
        yield []

    def divide(self, update: list[tuple[slice, Tensor]]) -> list[tuple[slice, Tensor]]:
        """Send the aggregated update to the processes that apply it.

        Args:
            update: in the first process, a list of one pair (all columns, whole update [d]); in other processes, an
                empty list.

        Returns a list of pairs (columns, update in these columns), for the columns that this process applies.
        """
        return update

    def complete(self, row: Tensor) -> None:
        """Fill in, in place, the parts of `row` [d] that other processes have computed."""

    def reduce(self, values: Tensor, how: Literal["sum", "max"] = "sum") -> Tensor:
        """Replace `values` by their sum or maximum over all ranks, in place, and return them.

        If the processes share memory, `values` do not change.
        """
        return values

    def sum_columns(self, row: Tensor) -> Tensor:
        """Return the sum of `row` [d] over all ranks, restricted to the parameters that this rank updates.

        If the processes share memory, `row` is returned unchanged.
        """
        return row

    def states_by_columns(self) -> dict[str, Tensor]:
        """Collect the optimizer states that are divided among the ranks. Return complete tensors [d], by name.

        If the processes share memory, the result is an empty dict.
        """
        return {}

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        """Restore the optimizer states from the complete `tensors` [d] that `states_by_columns` returned."""

    def barrier(self) -> None:
        """Wait until all processes have called this method.

        What a process wrote to shared memory before is then visible to all processes.
        """
        if self.count > 1:
            synchronize(self._device)
        self.process.barrier.wait()

    def gather(self, value: T) -> list[T]:
        """Return a list of the values that all processes pass. `value` must be picklable."""
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
            self.barrier()  # all processes have read the mailboxes before they are overwritten
        return [pickle.loads(parts) for parts in received]

    def from_first(self, value: T) -> T:
        """Return the `value` of the first process, in every process. With ranks, each rank returns its own `value`."""
        return self.gather(value if self.index == 0 else None)[0]  # type: ignore[return-value]

    def collect(self, values: Tensor) -> None:
        """Fill in, in place, the entries of `values` that other processes have computed.

        Process i of `count` processes has computed the entries values[i], values[i + count], values[i + 2 count], ...
        """

    def describe_failure(self) -> str:
        """Return which worker this process was training, for an error message, such as "worker 3 in round 2 failed"."""
        table = self.process.table
        worker = table.worker(self.index)
        return f"{worker} failed" if worker else f"failed {table.activity(self.index)}"


def new_mailbox(count: int) -> Tensor:
    """Return a byte tensor through which `count` processes can exchange objects.

    The caller must move the tensor to shared memory.
    """
    return torch.zeros(count, SLOT, dtype=torch.uint8)


def in_stacks(work: Any, stacks: Sequence[Sequence[int]]) -> Any:
    """Return the `WorkItems` of all `stacks`, one stack after another. A stack lists positions of workers in `work`."""
    numbers = np.repeat(np.arange(len(stacks)), np.array([len(stack) for stack in stacks], dtype=np.int64))
    positions = np.array([position for stack in stacks for position in stack], dtype=np.int64)
    return replace(work[positions], stacks=numbers)


def divide_into_stacks(steps: Sequence[int] | np.ndarray, width: int | None) -> list[list[int]]:
    """Divide workers into as few stacks as `width` allows. Workers with similar numbers of steps are together.

    Args:
        steps: number of local steps of each worker.
        width: maximum number of workers in a stack; None for one worker per stack.

    Returns a list of indices into `steps` for each stack, by descending number of steps unless `width` is None.
    """
    if width is None:
        return [[position] for position in range(len(steps))]
    positions = np.argsort(-np.asarray(steps), kind="stable").tolist()
    n, count = len(positions), -(-len(positions) // width)
    return [positions[n * part // count : n * (part + 1) // count] for part in range(count)]


def balance_load(costs: Sequence[int], count: int, most: int | None = None) -> list[list[int]]:
    """Distribute items over `count` processes so that the processes have similar total costs.

    Args:
        costs: cost of each item.
        count: number of processes.
        most: maximum number of items per process; None for no limit.

    Returns a list of item indices for each process, ascending.
    """
    assignments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        process = min((p for p in range(count) if len(assignments[p]) != most), key=loads.__getitem__)
        assignments[process].append(item)
        loads[process] += costs[item]
    return [sorted(items) for items in assignments]


def rows_at(rows: Tensor, slots: Sequence[int] | np.ndarray) -> Tensor:
    """Return the rows with the indices `slots`: a view if the indices are consecutive, otherwise a copy."""
    index = index_of(slots, rows.device)
    is_spread = isinstance(index, slice) and index.step not in (None, 1)
    return rows[index].clone() if is_spread else rows[index]  # users' rules may need rows that lie side by side
