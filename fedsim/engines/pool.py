"""InPool: the backend of engines with several processes on one machine."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.engines.backend import Backend
from fedsim.errors import ExperimentError, FedsimError, ProcessLostError, one_line, show
from fedsim.processes.group import Group, new_mailbox
from fedsim.processes.process_context import ProcessContext
from fedsim.processes.process_pool import ProcessPool
from fedsim.processes.shared_memory import share
from fedsim.rounds.executor import MakeExecutor, MakeTrainer
from fedsim.rounds.worker_states import WorkerStates
from fedsim.system.devices import release_memory, synchronize
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

T = TypeVar("T")


class InPool(Backend):
    """Backend that runs a task in a pool of processes.

    All tensors of the run are in memory that the processes share.
    """

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        self._new_pool = partial(ProcessPool, processes, threads, timeout, start_method)
        self._pool = self._new_pool()
        self._began = False

    @property
    def processes(self) -> int:  # type: ignore[override]
        return self._pool.count

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "start_method": self._pool.start_method}

    def prepare(self, device: torch.device, make: MakeExecutor) -> None:
        self._pool.prepare(_initialise, device, make)

    def begin(self, task: RunTask, shared: SharedState, make_trainer: MakeTrainer, make: MakeExecutor) -> None:
        self.leave()
        if not self.at_work:  # an earlier task lost processes at its start
            self._pool = self._new_pool()
        self.shared, mailbox = shared.share(), new_mailbox(self.processes)
        most = min(len(shared.data.shards), task.experiment.rounds * len(shared.cohort.workers))
        self.states = WorkerStates.of(task, self.shared).share(most)
        share([mailbox, *self.states.initial.values()])
        self._began = True
        self._work = make, task, self.shared, make_trainer, self.states, mailbox
        release_memory(task.device)  # for example the memory of a trial of the model in this process
        try:
            self._call(_make_executor, *self._work)
        except RuntimeError as error:
            if isinstance(error, FedsimError) or task.device.type == "cpu":
                raise
            raise ExperimentError(
                f"device = {show(str(task.device))}: processes cannot share memory of this device "
                f"({one_line(error)}); use engine=serial"
            ) from error

    def run(self, method: Callable[..., T], *arguments: object) -> list[T]:
        answers = self._call(_run, method, *arguments)
        distinct = {(warning.category, str(warning.message)): warning for _, noted in answers for warning in noted}
        for warning in distinct.values():  # several processes may give the same warning
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return [result for result, _ in answers]

    def _call(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Call `function` in every process of the pool, and return one result per process."""
        synchronize(self.shared.server.row.device)
        return self._pool.call(function, *arguments)

    @property
    def can_lose_processes(self) -> bool:
        return True

    def replace_processes(self) -> None:
        """Replace all processes by new ones that begin the current task again; see `Backend`."""
        self._pool.close()
        release_memory(self.shared.server.row.device)
        self._pool = self._new_pool()
        self.shared.cohort.unfit.zero_()  # new executors count aggregations from 1 again
        self._call(_make_executor, *self._work)

    @property
    def at_work(self) -> bool:
        return self._pool.at_work

    def leave(self) -> None:
        """Release the task and its memory in all processes."""
        if not self._began:
            return
        self._began = False
        device = self.shared.server.row.device
        try:
            if self._pool.at_work:
                with contextlib.suppress(ProcessLostError):
                    self._pool.call(_drop_executor)  # no need to wait for a device, which may have failed
                self._pool.forget()
        finally:
            del self.shared, self.states, self._work
        release_memory(device)

    def close(self) -> None:
        try:
            self.leave()
        finally:
            self._pool.close()


def _initialise(process: ProcessContext, device: torch.device, make: MakeExecutor) -> None:
    """Create a GPU's context, and that of its library for matrix products. Unpickling `make` has imported modules."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
        matrix = torch.ones(8, 8, device=device)
        torch.mm(matrix, matrix)
        synchronize(device)


def _make_executor(
    process: ProcessContext,
    make: MakeExecutor,
    task: RunTask,
    shared: SharedState,
    make_trainer: MakeTrainer,
    states: WorkerStates,
    mailbox: Tensor,
) -> None:
    if task.device.type != "cpu":
        torch.get_device_module(task.device).set_device(task.device)
    group = Group(process, task.device, mailbox)
    process.state["executor"] = make(group, task, shared, make_trainer, states)


def _run(
    process: ProcessContext, method: Callable[..., T], *arguments: object
) -> tuple[T, list[warnings.WarningMessage]]:
    """Call a method of this process's executor. Return its result, and the warnings that it caused."""
    executor = process.state["executor"]
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("default")
        with executor.environment():
            return method(executor, *arguments), noted


def _drop_executor(process: ProcessContext) -> None:
    process.state.clear()
    gc.collect()
