"""Where rows are trained: in this process, in a pool of processes, or in the ranks that a launcher has started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from fedsim.core.snapshot import Snapshot
from fedsim.engines.executor import MakeTrainer
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.worker_states import WorkerStates
from fedsim.errors import WorkerError

T = TypeVar("T")


class Backend(ABC):
    """Runs the methods of `Executor` in one process or in several, one task after another.

    Attributes:
        shared: the tensors of the current task.
        processes: how many there are.
    """

    shared: SharedState
    processes: int

    @abstractmethod
    def begin(self, task: TaskSpec, shared: SharedState, make_trainer: MakeTrainer) -> None:
        """Make an executor in every process. Raises ExperimentError if this backend cannot do the task."""

    @abstractmethod
    def run(self, method: Callable[..., T], *arguments: object) -> list[T]:
        """Call a method of `Executor` in every process.

            backend.run(Executor.train, cohort, round)

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

    def train_losses(self) -> Tensor:
        """Mean training losses of the last round [cohort], float64, by slot."""
        return self.shared.train_loss

    def round_rows(self, cohort: Sequence[int], round: int) -> tuple[Tensor, Tensor] | None:
        """The rows after the last aggregation and the losses before training, by slot; None in ranks but the first."""
        return self.shared.rows, self.shared.losses

    def new_worker_states(self, task: TaskSpec) -> WorkerStates:
        """The state that workers keep, before the first round."""
        return WorkerStates.of(task, self.shared)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that one round leaves to the next, whole, by name."""
        return self.shared.state_dict()

    def restore(self, state: Snapshot, without: tuple[str, ...]) -> None:
        """Copy the tensors of a state to those of `state_dict`, except those whose names begin with one of `without`.

        Raises RecordError if they do not fit.
        """
        put_back(state, self.shared.state_dict(), without)


def put_back(state: Snapshot, tensors: dict[str, Tensor], without: tuple[str, ...]) -> None:
    """Give tensors their values in a state, except those whose names begin with one of `without`."""
    state.put_back({name: tensor for name, tensor in tensors.items() if not name.startswith(without)})
