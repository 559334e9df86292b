"""An engine: a backend (where rows are trained) and trainers (how they are trained)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedsim.engines.backend import Backend
from fedsim.engines.executor import Executor, MakeExecutor, MakeTrainer
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask
from fedsim.system.devices import default_processes, resolve_device

SETTINGS_OF_POOLS = frozenset(("start_method", "timeout", "process_retries"))


@dataclass(frozen=True)
class EngineTraits:
    """Facts about an engine for the checks of an experiment.

    Attributes:
        own_settings: the keys of `SETTINGS_OF_ENGINES` that it uses, besides those of process pools.
        pool_from: the number of processes from which it starts a pool, whose processes may die; None: never.
        one_process_on_gpu: whether one process is the default on an accelerator.
        stacks: whether it may train stacks of rows.
        ranks: whether it is one of several programs that a launcher has started.
        chooses: whether it runs a task as another engine, which it chooses.
        races_on: the engine whose processes race if this one is named; None: it cannot race.
    """

    own_settings: frozenset[str] = frozenset()
    pool_from: int | None = None
    one_process_on_gpu: bool = False
    stacks: bool = False
    ranks: bool = False
    chooses: bool = False
    races_on: str | None = None

    def may_lose_processes(self, processes: int) -> bool:
        """Whether one of at most so many processes may die while the run continues."""
        return self.pool_from is not None and processes >= self.pool_from

    def settings(self, processes: int) -> frozenset[str]:
        """Return the keys of `SETTINGS_OF_ENGINES` that the engine uses with at most so many processes."""
        return self.own_settings | (SETTINGS_OF_POOLS if self.may_lose_processes(processes) else frozenset())

    def default_processes(self, device: torch.device, cohort: int, threads: int) -> int:
        """Return the number of processes for a cohort if the experiment does not set it."""
        if self.pool_from is None or (self.one_process_on_gpu and device.type != "cpu"):
            return 1
        return default_processes(device, cohort, threads)


Trainers = Callable[[RunTask, SharedState, int, int], tuple[MakeTrainer, dict[str, Any]]]


class Engine:
    """Trains cohorts of rows, one task after another. Use it in a `with` block, or call `close`.

    Args:
        backend: where rows are trained.
        trainers: how they are trained: from (task, shared state, processes, threads) it returns the function that makes
            the trainer of a process, and facts for the run record.
        threads: threads that PyTorch uses in each process.
    """

    traits: ClassVar[EngineTraits] = EngineTraits()

    @classmethod
    def is_main(cls) -> bool:
        """Whether this process prints and writes records."""
        return True

    @classmethod
    def joined(cls, description: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Join the other programs of a run for its duration, if there are any.

        Args:
            description: the resolved experiment.
        """
        return nullcontext()

    @classmethod
    def device_for(cls, name: str) -> torch.device:
        """Return the device of this process if the experiment names this one.

        Raises ExperimentError if there is none.
        """
        return resolve_device(name)

    def __init__(self, backend: Backend, trainers: Trainers, threads: int) -> None:
        self.backend, self._trainers, self._threads = backend, trainers, threads
        self._trainer_facts: dict[str, Any] = {}

    @property
    def shared(self) -> SharedState:
        """The tensors of the current task, which all processes work on."""
        return self.backend.shared

    def allocate(self, task: RunTask, *data: Any) -> SharedState:
        """Return the state of a task; `data` as in `SharedState.allocate`."""
        return SharedState.allocate(task, *data)

    def begin(self, task: RunTask, shared: SharedState, make: MakeExecutor = Executor) -> None:
        """Begin a task and release the one before. Raises ExperimentError if the engine cannot do it.

        Args:
            make: makes the executor of each process; its methods are called by `backend.run`.
        """
        make_trainer, self._trainer_facts = self._trainers(task, shared, self.backend.processes, self._threads)
        self.backend.begin(task, shared, make_trainer, make)

    def facts(self) -> dict[str, Any]:
        """How the current task is computed, for the run record: `processes` and others."""
        return {"processes": self.backend.processes, **self._trainer_facts}

    def replayed(self) -> bool | str:
        """Whether the steps of the current task are captured and replayed; if not, the reason."""
        refusals = [refusal for refusal in self.backend.run(Executor.replay_refusal) if refusal is not None]
        return refusals[0] if refusals else True

    def leave(self) -> None:
        """Release the task and its memory in every process; do nothing without a task."""
        self.backend.leave()

    def close(self) -> None:
        """End the processes, if there are any."""
        self.backend.close()

    def broadcast(self, value: Any) -> Any:
        """Return a picklable object of the process that writes the records, in all programs of the run."""
        return value

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
