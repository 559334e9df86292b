"""Worker state that is kept between rounds, with one row per worker that has participated."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.clients import State
from fedsim.clients.algorithm import state_at_first
from fedsim.core.rows import index_of, new_rows
from fedsim.errors import ExperimentError, RecordError, show_bytes
from fedsim.processes.messages import shared_file
from fedsim.processes.shared_memory import memory_file
from fedsim.system.limits import describe_os_error
from fedsim.training.batches import WorkItems
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


class WorkerStates:
    """States that workers keep between rounds, such as momentum or a personal model.

    Before a round, each process copies the states of its workers of the cohort to tensors that training reads and
    changes. After the round, the process copies the states back.

    Args:
        initial: state of a worker before its first round, a flat tensor for each name.
        limit: maximum bytes of all states in memory; None for no limit. Above it, states are stored in temporary files.
        folder: folder of these files; None for the system's folder for temporary files.

    Raises ExperimentError if a file cannot grow.
    """

    def __init__(self, initial: State, limit: int | None = None, folder: str | None = None) -> None:
        self.initial, self._limit, self._folder = initial, limit, folder
        self.rows = {name: _room(0, row) for name, row in initial.items()}
        self._files: dict[str, int] = {}  # descriptors
        self._shared = self._in_memory = False
        self._positions: dict[int, int] = {}

    @classmethod
    def of(cls, task: RunTask, shared: SharedState) -> WorkerStates:
        """Return the worker states of a new task, in which no worker has a state yet."""
        return cls(initial_worker_state(task, shared), task.worker_state_memory, task.scratch_folder)

    def share(self, workers: int) -> WorkerStates:
        """Make the states accessible to other processes that receive this object. Return the object.

        `workers` is the number of workers for which memory is needed.
        """
        self._shared = True
        fits = self._limit is None or workers * self._worker_bytes <= self._limit
        for name in self.initial:
            descriptor = memory_file(0) if fits else None
            self._in_memory = descriptor is not None
            self._files[name] = self._new_file() if descriptor is None else descriptor
        return self

    def __getstate__(self) -> dict[str, Any]:
        files = {name: shared_file(file) for name, file in self._files.items()}
        return {**self.__dict__, "rows": {}, "_files": files, "_positions": {}, "positions": self.workers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        workers = state.pop("positions")
        self.__dict__.update(state)
        self._files = {name: file.detach() for name, file in state["_files"].items()}
        self.rows = {name: _room(0, row) for name, row in self.initial.items()}
        self.add(workers)

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def workers(self) -> list[int]:
        """IDs of the workers that have a state, in the order in which the states are stored."""
        return list(self._positions)

    @property
    def _worker_bytes(self) -> int:
        return sum(row.nbytes for row in self.initial.values())

    def load(self, workers: Sequence[int], rows: State, slots: Sequence[int] | np.ndarray) -> None:
        """Copy the states of `workers` to `rows`. A worker without a state gets the initial state.

        Args:
            workers: worker IDs.
            rows: target tensors by name.
            slots: index of each worker's row in the target tensors.
        """
        if not self.initial:
            return
        positions = np.array([self._positions.get(worker, -1) for worker in workers], dtype=np.int64)
        known, slots = positions >= 0, np.asarray(slots, dtype=np.int64)
        for name, state_rows in self.rows.items():
            rows[name][index_of(slots, rows[name].device)] = self.initial[name]
            if known.any():
                new = state_rows[index_of(positions[known], state_rows.device)]
                rows[name][index_of(slots[known], rows[name].device)] = new.to(rows[name].device)

    def load_cohort(self, cohort: Sequence[int], mine: WorkItems, rows: State) -> None:
        """Before a round, copy the states of the workers that this process trains to `rows`.

        Args:
            cohort: IDs of all workers of the round.
            mine: workers that this process trains.
            rows: target tensors by name, with one row per worker of the cohort.
        """
        self.load(mine.workers.tolist(), rows, mine.slots)

    def save(self, workers: Sequence[int], rows: State, slots: Sequence[int] | np.ndarray) -> None:
        """Store new states of `workers`, copied from `rows`.

        Args:
            workers: worker IDs.
            rows: tensors with the new states by name.
            slots: index of each worker's row in these tensors.
        """
        if not self.initial:
            return
        self.add(workers)
        positions = [self._positions[worker] for worker in workers]
        for name, state_rows in self.rows.items():
            new = rows[name][index_of(slots, rows[name].device)].to(state_rows.device)
            state_rows[index_of(positions, state_rows.device)] = new

    def save_cohort(self, cohort: Sequence[int], mine: WorkItems, excluded: Collection[int], rows: State) -> None:
        """After a round, store the states of the workers that this process has trained.

        Args:
            cohort: IDs of all workers of the round.
            mine: workers that this process trains.
            excluded: IDs of the workers that keep their old state, because their updates were excluded.
            rows: tensors with the new states by name, with one row per worker of the cohort.
        """
        if not self.initial:
            return
        saved = set(cohort).difference(excluded)  # without the server's own row
        self.add([worker for worker in cohort if worker in saved])
        members = mine[np.array([worker in saved for worker in mine.workers.tolist()], dtype=bool)]
        self.save(members.workers.tolist(), rows, members.slots)

    def of_waves(self, parts: int) -> WorkerStates:
        """Return an empty storage for the new states of a round whose cohort is trained in several parts (waves).

        Its memory limit is that of this storage divided by `parts`, the number of processes that have such a storage.
        """
        return WorkerStates(self.initial, self._limit and self._limit // parts, self._folder)

    def take_over(self, new: WorkerStates, cohort: Sequence[int], excluded: Collection[int]) -> None:
        """After a round, store the states `new`: a storage that `of_waves` returned and `save_cohort` filled."""
        self.saved_elsewhere(cohort, excluded)
        self.save(new.workers, new.rows, range(len(new)))

    def saved_elsewhere(self, cohort: Sequence[int], excluded: Collection[int]) -> None:
        """Record, after a round, for which workers other processes have stored states.

        Args:
            cohort: IDs of all workers of the round.
            excluded: IDs of the workers whose states were not stored.
        """
        if self._shared:
            self.add([worker for worker in cohort if worker not in excluded])

    def add(self, workers: Sequence[int]) -> list[int]:
        """Allocate memory for each of `workers` that has no state yet, and return their IDs."""
        new = [worker for worker in workers if worker not in self._positions] if self.initial else []
        begin, end = len(self._positions), len(self._positions) + len(new)
        if any(end > len(rows) for rows in self.rows.values()):
            self._grow(begin, end)
        self._positions |= {worker: position for position, worker in enumerate(new, begin)}
        return new

    def reserve(self, workers: Sequence[int]) -> None:
        """Give the initial state to each of `workers` that has no state yet."""
        positions = [self._positions[worker] for worker in self.add(workers)]
        for name, row in self.initial.items():
            self.rows[name][positions] = row.to(self.rows[name].device)

    def follow(self, workers: Sequence[int]) -> None:
        """Set which workers have a state to `workers`, in the order in which another process has stored the states."""
        if list(workers) != self.workers:
            self._positions = {}
            self.add(workers)

    def _grow(self, begin: int, end: int) -> None:
        """Enlarge the tensors, which store the states of `begin` workers, for at least `end` workers."""
        size, fit = max(end, 2 * begin), end
        if self._shared:
            fit = 0
        elif self._limit is not None:
            fit = self._limit // self._worker_bytes
            size = min(size, fit) if end <= fit else size
        for name, row in self.initial.items():
            before, in_file = self.rows[name], name in self._files
            self.rows[name] = _room(size, row) if end <= fit else self._map(name, size, row)
            if not in_file:
                self.rows[name][:begin] = before[:begin].to(self.rows[name].device)

    def _map(self, name: str, n: int, row: Tensor) -> Tensor:
        """Return a tensor of `n` rows in the file of the state `name`. Existing rows are kept.

        Args:
            name: name of the state.
            n: number of rows.
            row: state of one worker, which has the size and dtype of a row.
        """
        nbytes = n * row.nbytes
        if not nbytes:
            return _room(n, row)
        try:
            if name not in self._files:
                self._files[name] = self._new_file()
            file = self._files[name]
            if os.fstat(file).st_size < nbytes:
                os.ftruncate(file, nbytes)
            if not self._in_memory and hasattr(os, "posix_fallocate"):  # writing to a full disk would kill the process
                os.posix_fallocate(file, 0, nbytes)
            mapped = mmap.mmap(file, nbytes)
        except OSError as error:
            raise ExperimentError(
                f"worker_state_memory = {self._limit}: the file of worker states in "
                f"{self._folder or tempfile.gettempdir()} cannot grow to {show_bytes(nbytes)}: "
                f"{describe_os_error(error)}; use a larger worker_state_memory or a folder with more space"
            ) from error
        return torch.frombuffer(mapped, dtype=row.dtype).view(n, len(row))

    def _new_file(self) -> int:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            return os.dup(file.fileno())

    def tensors(self) -> dict[str, Tensor]:
        """Return the worker states for a checkpoint, as tensors by name.

        For t workers with a state, the tensor `workers` contains their IDs, int64 [t], and each tensor `rows.NAME`
        contains their states with the name NAME, [t, width].
        """
        if not self.initial:
            return {}
        workers = sorted(self._positions)
        positions = [self._positions[worker] for worker in workers]
        return {"workers": torch.tensor(workers, dtype=torch.int64)} | {
            f"rows.{name}": state_rows[positions] for name, state_rows in self.rows.items()
        }

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        """Replace all worker states by those of a checkpoint.

        `saved` is the result of the method `tensors`. Raises RecordError if it does not fit this run.
        """
        self._positions = {}
        if not self.initial:
            return
        workers, rows = saved.get("workers"), {name: saved.get(f"rows.{name}") for name in self.initial}
        if workers is None or workers.dtype != torch.int64 or workers.ndim != 1:
            raise RecordError('the list of workers with a state ("workers") is missing or invalid')
        numbers = workers.tolist()
        if len(set(numbers)) != len(numbers):
            raise RecordError(f"worker {max(numbers, key=numbers.count)} has two stored states")
        for name, row in self.initial.items():
            saved_rows = rows[name]
            if saved_rows is None or saved_rows.shape != (len(numbers), len(row)) or saved_rows.dtype != row.dtype:
                raise RecordError(f"the worker state {name} is missing or does not match this run")
        self.add(numbers)
        for name, saved_rows in rows.items():
            assert saved_rows is not None
            self.rows[name][: len(numbers)] = saved_rows


def initial_worker_state(task: RunTask, shared: SharedState) -> State:
    """Return the state of a worker before its first round: a flat tensor for each name."""
    own_buffers = task.experiment.buffers == "local" and shared.server.buffers.numel()
    buffers = {"buffers": shared.server.buffers.clone()} if own_buffers else {}
    chain_states = {name: rows.new_zeros(rows.shape[1]) for name, rows in shared.cohort.chain_states.items()}
    return buffers | chain_states | state_at_first(task.algorithm, shared.server.row, shared.server.buffers)


def _room(n: int, row: Tensor) -> Tensor:
    return new_rows(n, len(row), row.dtype, row.device)
