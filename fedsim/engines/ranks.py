"""Team of ranks. Each rank stores the rows of the workers that it trains, and a part of the optimizer state."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.clients import State
from fedsim.core.rows import ALIGNMENT, new_rows
from fedsim.errors import ExperimentError, FedsimWarning, show
from fedsim.processes.process_context import ProcessContext
from fedsim.processes.process_group import RankGroup
from fedsim.processes.team import Team, balance_load, divide_into_stacks, in_stacks, rows_at
from fedsim.rounds.worker_states import WorkerStates
from fedsim.training.batches import WorkItems
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

T = TypeVar("T")


class Ranks(Team):
    """Team of ranks (processes without shared memory); see `Team` for the methods.

    Each rank stores only the updates of the workers that it trains, and the optimizer state for a part of the global
    parameters.

    Args:
        ranks: connection to the other ranks.
        task: run to compute.
        shared: tensors of this rank. The constructor adds the optimizer states for this rank's part of the parameters.
    """

    divided = True

    def __init__(self, ranks: RankGroup, task: RunTask, shared: SharedState) -> None:
        super().__init__(ProcessContext.alone(), task.device)
        self.index, self.count, self.computes = ranks.index, ranks.count, True
        self._ranks, self._task, self._shared = ranks, task, shared
        d, line = len(shared.server.row), ALIGNMENT // task.dtype.itemsize
        width = line * math.ceil(d / self.count / line)
        self._parts = [slice(min(d, rank * width), min(d, (rank + 1) * width)) for rank in range(self.count)]
        self._widths = [part.stop - part.start for part in self._parts]
        self._part, self._width = self._parts[self.index], self._widths[self.index]
        self._rooms: dict[int, Tensor] = {}  # receive buffers for the rows of all ranks, by number of columns
        self._stored_at: dict[int, tuple[int, int]] = {}  # rank and row number of each slot of the current cohort
        # With a communication hook, every rank has the whole mean gradient and updates the whole global row.
        self._whole_states = {"gradients"} if task.experiment.gradient_hook else set[str]()
        if task.experiment.groups is not None:  # the top level of groups is computed by every rank
            self._whole_states.add("parameters")
        shared.server.states = {
            sync: task.stepper(sync).start(shared.server.row[slice(None) if sync in self._whole_states else self._part])
            for sync in task.syncs
        }

    def assign(self, work: WorkItems, width: int | None) -> WorkItems:
        assignments = balance_load(work.steps.tolist(), self.count, most=-(-len(work) // self.count))
        slots = work.slots.tolist()
        self._stored_at = {
            slots[position]: (rank, row)
            for rank, positions in enumerate(assignments)
            for row, position in enumerate(positions)
        }
        mine = work[assignments[self.index]]
        return in_stacks(replace(mine, slots=np.arange(len(mine))), divide_into_stacks(mine.steps, width))

    def waves(self, work: WorkItems, width: int) -> Iterator[tuple[np.ndarray, WorkItems, WorkItems]]:
        for positions in divide_into_stacks(work.steps, width * self.count):
            wave = replace(work[positions], slots=np.arange(len(positions)))
            yield np.array(positions), wave, self.assign(wave, width)

    def by_rank(self, slots: Sequence[int]) -> list[list[int]]:
        """Return, for each rank, the `slots` (positions of workers in the cohort) whose updates the rank stores."""
        held: list[list[int]] = [[] for _ in range(self.count)]
        for slot in slots:
            held[self._stored_at[slot][0]].append(slot)
        return held

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """Return the index of each worker's update in the tensor of the rank that stores the update.

        `slots` are positions of workers in the cohort.
        """
        return [self._stored_at[slot][1] for slot in slots]

    def here(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        positions = [position for position, slot in enumerate(slots) if self._stored_at[slot][0] == self.index]
        return positions, self.rows_of([slots[position] for position in positions])

    def columns(self, d: int) -> slice:
        return self._part

    def of_all(self, values: Tensor, slots: Sequence[int]) -> Tensor:
        positions, rows = self.here(slots)
        result = values.new_zeros(len(slots), *values.shape[1:])
        result[positions] = values[rows]
        return self._ranks.all_reduce(result)

    def sum_of(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        return self._ranks.all_reduce(rows[self.here(slots)[1]].sum(0))

    def columns_of(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        held = self.by_rank(slots)
        own_rows = rows_at(rows, self.rows_of(held[self.index]))
        return self._receive([own_rows[:, part] for part in self._parts], held, self._width)

    def gather_rows(self, rows: Tensor, slots: Sequence[int]) -> Tensor:
        held = self.by_rank(slots)
        own_rows = rows_at(rows, self.rows_of(held[self.index]))
        first = self.index == 0
        return self._receive(
            [own_rows] + [own_rows[:0]] * (self.count - 1), held if first else [[]] * self.count, rows.shape[1]
        )

    def _receive(self, parts: list[Tensor], held: list[list[int]], width: int) -> Tensor:
        """Send `parts[i]` to rank i, for all ranks, and return the received vectors, in the order of the cohort.

        Args:
            parts: vectors of some workers to send to each rank.
            held: for each rank, the positions in the cohort of the workers whose vectors it sends to this rank.
            width: length of a received vector.
        """
        received = self._ranks.exchange(parts, [len(slots) * width for slots in held])
        if not any(held):
            return parts[0][:0]
        if width not in self._rooms:
            n_rows = self.count * len(self._shared.cohort.train_loss)
            self._rooms[width] = new_rows(n_rows, width, self._task.dtype, self._task.device)
        for slots, rows in zip(held, received, strict=True):
            self._rooms[width][slots] = rows.view(len(slots), width)
        return self._rooms[width]

    def return_rows(self, rows: Tensor, slots: Sequence[int]) -> tuple[list[int], Tensor]:
        held, d = self.by_rank(slots), len(self._shared.server.row)
        own_rows = self.rows_of(held[self.index])
        parts = [rows[theirs if self.index == 0 else []] for theirs in held]
        received = self._ranks.exchange(parts, [len(own_rows) * d] + [0] * (self.count - 1))[0]
        return own_rows, received.view(len(own_rows), d)

    @contextlib.contextmanager
    def at_first(self) -> Iterator[list[Any]]:
        """Return a context manager for work that only rank 0 does. Its results are sent to all ranks; see `Team`."""
        told: list[Any] = []
        error = None
        try:
            yield told
        except ExperimentError as refusal:
            error = refusal
        error, told[:] = self._ranks.broadcast_object((error, told))
        if error is not None:
            raise error

    def divide(self, update: list[tuple[slice, Tensor]]) -> list[tuple[slice, Tensor]]:
        row = update[0][1] if update else self._shared.server.row[:0]
        parts = [row[part] for part in self._parts]
        return [(self._part, self._ranks.exchange(parts, [self._width] + [0] * (self.count - 1))[0])]

    def complete(self, row: Tensor) -> None:
        received = self._ranks.exchange([row[self._part]] * self.count, self._widths)
        for part, values in zip(self._parts, received, strict=True):
            row[part] = values

    def reduce(self, values: Tensor, how: Literal["sum", "max"] = "sum") -> Tensor:
        return self._ranks.all_reduce(values, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[how])

    def sum_columns(self, row: Tensor) -> Tensor:
        received = self._ranks.exchange([row[part] for part in self._parts], [self._width] * self.count)
        return torch.stack(received).sum(0)

    def states_by_columns(self) -> dict[str, Tensor]:
        tensors = {}
        for name, part in self._divided_states():
            row = tensors[name] = torch.empty_like(self._shared.server.row)
            row[self._part] = part
            self.complete(row)
        return tensors

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        hook = self._task.experiment.gradient_hook
        if hook is not None and hook.keeps:
            line = f"distributed.hook = {show(hook.name)}: the state of this hook is not in the checkpoint and is reset"
            warnings.warn(line, FedsimWarning, stacklevel=2)
        for name, part in self._divided_states():
            part.copy_(tensors[name][self._part])

    def _divided_states(self) -> Iterator[tuple[str, Tensor]]:
        for sync, state in self._shared.server.states.items():
            for name, part in state.items() if sync not in self._whole_states else ():
                yield f"{sync}.{name}", part

    def barrier(self) -> None:
        """Do nothing, because ranks already wait for each other when they communicate."""

    def gather(self, value: T) -> list[T]:
        return self._ranks.gather_objects(value)

    def from_first(self, value: T) -> T:
        return value

    def collect(self, values: Tensor) -> None:
        own_values = values[self.index :: self.count].clone()
        values.zero_()
        values[self.index :: self.count] = own_values
        self._ranks.all_reduce(values)

    def describe_failure(self) -> str:
        worker = self.process.table.worker(0)
        return f"{worker} failed (rank {self.index})" if worker else f"rank {self.index} failed"


class RankWorkerStates(WorkerStates):
    """Worker states that one rank stores between rounds.

    With P ranks, rank r stores the states of the workers whose ID mod P is r. All ranks must call each method at the
    same time.

    Args:
        initial: state of a worker before its first round: a flat tensor for each name.
        team: all ranks; it assigns the workers to the ranks that train them.
        ranks: connection to the other ranks.
        limit: maximum bytes of all states in this rank's memory; None for no limit. Above it, states are stored in
            files.
        folder: folder of these files; None for the system's folder for temporary files.
    """

    def __init__(
        self, initial: State, team: Ranks, ranks: RankGroup, limit: int | None = None, folder: str | None = None
    ) -> None:
        super().__init__(initial, limit, folder)
        self._team, self._ranks = team, ranks

    def of_waves(self, parts: int) -> WorkerStates:
        return RankWorkerStates(self.initial, self._team, self._ranks, self._limit, self._folder)

    def load_cohort(self, cohort: Sequence[int], mine: WorkItems, rows: State) -> None:
        trained, owned = self._exchanged(cohort, range(len(cohort)))
        loaded = [{name: row.new_empty(len(slots), len(row)) for name, row in self.initial.items()} for slots in owned]
        for part, slots in zip(loaded, owned, strict=True):
            self.load([cohort[slot] for slot in slots], part, range(len(slots)))
        for name, initial in self.initial.items():
            rows[name][:] = initial
            sizes = [len(slots) * len(initial) for slots in trained]
            received = self._ranks.exchange([part[name] for part in loaded], sizes)
            for slots, values in zip(trained, received, strict=True):
                rows[name][self._team.rows_of(slots)] = values.view(-1, len(initial))

    def save_cohort(self, cohort: Sequence[int], mine: WorkItems, excluded: Collection[int], rows: State) -> None:
        slots = [slot for slot, worker in enumerate(cohort) if worker not in excluded]
        trained, owned = self._exchanged(cohort, slots)
        self.add([cohort[slot] for slots in owned for slot in slots])
        for name, initial in self.initial.items():
            parts = [rows[name][self._team.rows_of(slots)] for slots in trained]
            received = self._ranks.exchange(parts, [len(slots) * len(initial) for slots in owned])
            index = [self._positions[cohort[slot]] for slots in owned for slot in slots]
            self.rows[name][index] = torch.cat(received).view(-1, len(initial)).to(self.rows[name].device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the worker states for a checkpoint.

        Rank 0 returns the states of all workers. Every other rank returns only the states that it stores.
        """
        own_tensors = super().tensors()
        if not own_tensors:
            return own_tensors
        counts = self._ranks.gather_objects(len(self))
        whole = {}
        for name, tensor in own_tensors.items():
            if name != "workers":
                tensor = tensor.to(self.initial[name.removeprefix("rows.")].device)
            sizes = [count * tensor[:1].numel() if self._ranks.first else 0 for count in counts]
            parts = [tensor] + [tensor[:0]] * (self._ranks.count - 1)
            whole[name] = torch.cat(self._ranks.exchange(parts, sizes)).view(-1, *tensor.shape[1:])
        if not self._ranks.first:
            return own_tensors
        ascending = whole["workers"].argsort()
        return {name: tensor[ascending.to(tensor.device)] for name, tensor in whole.items()}

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        workers = saved.get("workers")
        if workers is not None and workers.ndim == 1 and all(len(rows) == len(workers) for rows in saved.values()):
            is_owned = workers % self._ranks.count == self._ranks.index
            saved = {name: rows[is_owned] for name, rows in saved.items()}
        super().resume(saved)

    def _exchanged(self, cohort: Sequence[int], slots: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Return which worker states this rank exchanges with each rank before and after a round.

        A worker may be trained by one rank, while its state is stored by another. Returns two lists with one entry for
        each rank r: workers trained here whose states r stores, and workers trained by r whose states are stored here.
        Workers are given by their positions in the cohort.
        """
        index, count = self._ranks.index, self._ranks.count
        held = self._team.by_rank(slots)
        trained = [[slot for slot in held[index] if cohort[slot] % count == owner] for owner in range(count)]
        return trained, [[slot for slot in theirs if cohort[slot] % count == index] for theirs in held]
