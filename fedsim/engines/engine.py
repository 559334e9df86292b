"""Engines: a backend (the processes that train) combined with trainers (how workers are trained)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from fedsim.config.engines import EngineTraits
from fedsim.engines.backend import Backend
from fedsim.rounds.executor import Executor, MakeExecutor, MakeTrainer
from fedsim.system.devices import resolve_device
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

Trainers = Callable[[RunTask, SharedState, int, int], tuple[MakeTrainer, dict[str, Any]]]


class Engine:
    """Base class of engines, which train the workers of one task after another.

    Use an engine in a `with` block, or call `close`.

    Args:
        backend: processes that train.
        trainers: function that takes (task, shared state, number of processes, threads). It returns a function that
            creates the trainer of a process, and a dict of facts for the run record.
        threads: number of threads that PyTorch uses in each process.
    """

    traits: ClassVar[EngineTraits] = EngineTraits()

    @classmethod
    def is_main(cls) -> bool:
        """Whether this process prints output and writes records. Of several ranks, only rank 0 does."""
        return True

    @classmethod
    def joined(cls, description: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return a context in which this process is connected to the other ranks. Without ranks, do nothing.

        Args:
            description: all settings of the experiment, which must be the same in all ranks.
        """
        return nullcontext()

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        """Return the device of this process for the device `name` of the experiment, such as "cuda".

        Raises ExperimentError if the device does not exist.
        """
        return resolve_device(name)

    def __init__(self, backend: Backend, trainers: Trainers, threads: int) -> None:
        self.backend, self._trainers, self._threads = backend, trainers, threads
        self._trainer_facts: dict[str, Any] = {}

    @property
    def shared(self) -> SharedState:
        """Tensors of the current task, which all processes read and write."""
        return self.backend.shared

    def allocate(self, task: RunTask, *data: Any) -> SharedState:
        """Allocate and return the tensors of a task.

        Args:
            task: run to compute.
            data: samples of the run and their assignment to workers, which are passed to `RunData.on`.
        """
        return SharedState.allocate(task, *data)

    def begin(self, task: RunTask, shared: SharedState, make: MakeExecutor = Executor) -> None:
        """Begin a task, and release the previous task. Raises ExperimentError if the engine cannot compute the task.

        Args:
            task: run to compute.
            shared: tensors of the task, from `allocate`.
            make: function that creates the executor of a process, whose methods `backend.run` calls.
        """
        make_trainer, self._trainer_facts = self._trainers(task, shared, self.backend.processes, self._threads)
        self.backend.begin(task, shared, make_trainer, make)

    def facts(self) -> dict[str, Any]:
        """Return a description of how the current task is computed, such as {"processes": 4}, for the run record."""
        return {"threads": self._threads, **self.backend.facts(), **self._trainer_facts}

    def replayed(self) -> bool | str:
        """Return True if the training steps run as CUDA graphs, otherwise the reason why they do not."""
        refusals = [refusal for refusal in self.backend.run(Executor.replay_refusal) if refusal is not None]
        return refusals[0] if refusals else True

    def leave(self) -> None:
        """Release the current task and its memory in every process. Do nothing if there is no task."""
        self.backend.leave()

    def close(self) -> None:
        """End the engine's child processes, if there are any."""
        self.backend.close()

    def broadcast(self, value: Any) -> Any:
        """Return the value that rank 0 passes, in every rank. Without ranks, return `value` itself."""
        return value

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
