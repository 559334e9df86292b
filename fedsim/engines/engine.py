"""Engines: a backend (the processes that train) combined with trainers (how workers are trained)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedsim.engines.backend import Backend
from fedsim.rounds.executor import Executor, MakeExecutor, MakeTrainer
from fedsim.system.devices import default_processes, resolve_device
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

SETTINGS_OF_POOLS = frozenset(("start_method", "timeout", "process_retries"))


@dataclass(frozen=True)
class EngineTraits:
    """Properties of an engine that decide which experiments and settings it supports.

    Attributes:
        own_settings: engine-specific settings that this engine uses, such as `cuda_graphs`, except the settings of
            process pools.
        pool_from: minimum number of processes for which the engine starts a process pool; None if it never does.
        one_process_on_gpu: whether the engine uses one process by default if the device is not a CPU.
        stacks: whether the engine may train several workers at once.
        ranks: whether a launcher such as torchrun starts the engine's processes.
        chooses: whether the engine itself chooses how a task is computed, as the engine `auto` does.
        races_on: name of the engine that runs experiments with `mode = "race"` in place of this engine; None if this
            engine does not support them.
    """

    own_settings: frozenset[str] = frozenset()
    pool_from: int | None = None
    one_process_on_gpu: bool = False
    stacks: bool = False
    ranks: bool = False
    chooses: bool = False
    races_on: str | None = None

    def may_lose_processes(self, processes: int) -> bool:
        """Whether the engine, with up to `processes` processes, starts child processes, which may die."""
        return self.pool_from is not None and processes >= self.pool_from

    def settings(self, processes: int) -> frozenset[str]:
        """Return the settings, such as `processes`, that this engine uses with up to `processes` processes."""
        return self.own_settings | (SETTINGS_OF_POOLS if self.may_lose_processes(processes) else frozenset())

    def default_processes(self, device: torch.device, cohort: int, threads: int) -> int:
        """Return the default number of processes for `cohort` workers per round and `threads` threads per process."""
        if self.pool_from is None or (self.one_process_on_gpu and device.type != "cpu"):
            return 1
        return default_processes(device, cohort, threads)


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
