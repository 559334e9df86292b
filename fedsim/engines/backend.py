"""Where rows are trained: in this process, in a pool of processes, or in the ranks that a launcher has started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from fedsim.engines.executor import MakeExecutor, MakeTrainer
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.worker_states import WorkerStates
from fedsim.errors import WorkerError

T = TypeVar("T")


class Backend(ABC):
    """Runs the methods of an `Executor` in one process or in several, one task after another.

    Attributes:
        shared: the tensors of the current task, which all processes work on.
        states: the state that workers keep between their rounds of the current task.
        processes: how many there are.
    """

    shared: SharedState
    states: WorkerStates
    processes: int

    @abstractmethod
    def begin(self, task: TaskSpec, shared: SharedState, make_trainer: MakeTrainer, make: MakeExecutor) -> None:
        """Make an executor in every process. Raises ExperimentError if this backend cannot do the task."""

    @abstractmethod
    def run(self, method: Callable[..., T], *arguments: object) -> list[T]:
        """Call a method of the executor in every process.

            backend.run(Simulation.run_round, round)

        Returns the results in the order of the processes. Raises WorkerError if a process fails.
        """

    @abstractmethod
    def leave(self) -> None:
        """Release the task and its memory in every process; do nothing without a task."""

    @abstractmethod
    def close(self) -> None:
        """End the processes, if there are any."""

    @property
    def at_work(self) -> bool:
        """Whether it takes tasks: it was not closed, and has not lost its processes."""
        return True

    @property
    def can_lose_processes(self) -> bool:
        """Whether its processes may end while this one continues; see ProcessLostError."""
        return False

    def replace_processes(self) -> None:
        """Restart all processes on the current task and state. Raises WorkerError if that fails."""
        raise WorkerError(f"{type(self).__name__} has no processes to replace")
