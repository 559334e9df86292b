"""Backends: where workers are trained, in this process, in a pool of processes, or on the ranks of a launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.errors import FedsimError, WorkerError
from fedsim.processes.group import Group
from fedsim.processes.process_context import ProcessContext
from fedsim.rounds.executor import Executor, MakeExecutor, MakeTrainer
from fedsim.rounds.worker_states import WorkerStates
from fedsim.system.devices import release_memory
from fedsim.system.limits import format_failure
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

T = TypeVar("T")


class Backend(ABC):
    """Base class for the processes in which an engine runs a task: only this process, or several.

    Attributes:
        shared: tensors of the current task, which all processes read and write.
        states: what the workers of the current task keep between rounds, such as momentum.
        processes: number of processes.
    """

    shared: SharedState
    states: WorkerStates
    processes: int

    @abstractmethod
    def begin(self, task: RunTask, shared: SharedState, make_trainer: MakeTrainer, make: MakeExecutor) -> None:
        """Begin a task in every process.

        Args:
            task: run to compute.
            shared: tensors of the run.
            make_trainer: function that returns the trainer of a process.
            make: function that returns the executor of a process, such as the class `Executor`.

        Raises ExperimentError if this backend cannot compute the task.
        """

    @abstractmethod
    def run(self, method: Callable[..., T], *arguments: object) -> list[T]:
        """Call a method of `Executor` or `Simulation` in every process, and return one result per process, in order.

            backend.run(Simulation.run_round, round)

        Raises WorkerError if a process fails.
        """

    def prepare(self, device: torch.device, make: MakeExecutor) -> None:  # noqa: B027  # may do nothing
        """Make child processes import modules and initialise `device` while this process prepares a task.

        Args:
            device: device of the task.
            make: argument of `begin`.
        """

    @abstractmethod
    def leave(self) -> None:
        """Release the current task and its memory in every process. Do nothing if there is no task."""

    @abstractmethod
    def close(self) -> None:
        """End the backend's child processes, if there are any."""

    def facts(self) -> dict[str, Any]:
        """Return a description of the processes, such as {"processes": 4}, for the run record."""
        return {"processes": self.processes}

    @property
    def at_work(self) -> bool:
        """Whether the backend accepts tasks: it is not closed and has not lost its processes."""
        return True

    @property
    def can_lose_processes(self) -> bool:
        """Whether the backend has child processes, which may die while this process continues."""
        return False

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        """Return the workers' updates in the latest aggregation, and the workers' losses before training.

        Both tensors have one entry per worker, in the order of `cohort`. Ranks other than rank 0 return None.

        Args:
            cohort: IDs of the workers of the round.
            round: number of the latest round.
        """
        return self.shared.cohort.rows, self.shared.cohort.losses

    def replace_processes(self) -> None:
        """Replace all processes by new ones that begin the current task again.

        The caller must then restore the state of the run. Raises WorkerError if the processes cannot be restarted.
        """
        raise WorkerError(
            f"a process was lost, and {type(self).__name__} cannot start a new one; start the run again, or use "
            "engine=spawn"
        )


class InProcess(Backend):
    """Backend that runs everything in the current process.

    Args:
        threads: number of threads that PyTorch uses from now on. `close` restores the previous number.
    """

    processes: int = 1

    def __init__(self, threads: int) -> None:
        self._threads_before = torch.get_num_threads()
        self.executor: Executor | None = None
        self._began = False
        torch.set_num_threads(threads)

    def begin(self, task: RunTask, shared: SharedState, make_trainer: MakeTrainer, make: MakeExecutor) -> None:
        self.shared = shared
        group = self.new_group(task)
        self.states, self._began = self.new_states(task, group), True
        self.executor = make(group, task, shared, make_trainer, self.states)

    def new_group(self, task: RunTask) -> Group:
        return Group(ProcessContext.alone(), task.device)

    def new_states(self, task: RunTask, group: Group) -> WorkerStates:
        return WorkerStates.of(task, self.shared)

    def run(self, method: Callable[..., T], *arguments: object) -> list[T]:
        executor = self.executor
        assert executor is not None
        try:
            with executor.environment():
                return [method(executor, *arguments)]
        except FedsimError:
            raise
        except Exception as error:
            raise WorkerError(f"{executor.group.describe_failure()}: {format_failure(error)}") from error

    def leave(self) -> None:
        if not self._began:
            return
        self._began, self.executor = False, None
        device = self.shared.server.row.device
        del self.shared, self.states
        release_memory(device)

    def close(self) -> None:
        self.leave()
        torch.set_num_threads(self._threads_before)
