"""Base class of engines: where workers are trained (in this process, a pool, or ranks), and by which trainers."""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedsim.config.engines import EngineTraits
from fedsim.core.registry import Registration, Registry
from fedsim.errors import FedsimError, ProcessLostError, WorkerError
from fedsim.processes.messages import sharing_error
from fedsim.processes.process_context import ProcessContext
from fedsim.processes.process_pool import ProcessPool
from fedsim.processes.shared_memory import share
from fedsim.processes.team import Team, new_mailbox
from fedsim.rounds.executor import Executor, MakeTrainer
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.rounds.worker_states import WorkerStates
from fedsim.system.c_libraries import return_freed_memory
from fedsim.system.devices import release_memory, resolve_device, synchronize
from fedsim.system.global_settings import run_settings
from fedsim.system.limits import format_failure
from fedsim.system.precision import without_recurrent_advice
from fedsim.training.sequential import RowTrainer
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

T = TypeVar("T")


class Engine:
    """Base class of engines, which train the workers of one task after another.

    An engine trains in this process, or in a pool if there are at least `traits.pool_from` processes. A subclass sets
    `traits`, and may override `trainers`. Call `close` at the end.

    Args:
        processes: number of processes in the pool.
        threads: number of threads that PyTorch uses in each process.
        timeout, start_method: see `ProcessPool`.

    Attributes:
        traits: which experiments and settings the engine supports, and whether it uses a pool.
        shared: tensors of the current task, which all processes read and write.
        states: what the workers of the current task keep between rounds, such as momentum.
    """

    traits: ClassVar[EngineTraits] = EngineTraits()
    shared: SharedState
    states: WorkerStates

    @classmethod
    def is_main(cls) -> bool:
        """Whether this process prints output and writes records. Of several ranks, only rank 0 does."""
        return True

    @classmethod
    def joined(cls, description: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return a context manager that connects this process to the other ranks. Without ranks, it does nothing.

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

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        start_method = "spawn" if self.traits.spawns else start_method
        self._new_pool = partial(ProcessPool, processes, threads, timeout, start_method)
        self._in_pool = self.traits.may_lose_processes(processes) and not self.traits.chooses
        self._pool = self._new_pool() if self._in_pool else None
        self._threads = threads
        self._state: dict[str, Any] = {}  # of this process, if there is no pool: its executor and synchronous rounds
        self._work: tuple[Any, ...] = ()  # arguments with which the processes of a pool begin the task
        self._began = False
        self._shown: dict[Any, Any] = {}  # warnings of processes that Python has shown, as in `__warningregistry__`

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return self._pool.count if self._in_pool and self._pool else 1

    def trainers(self, task: RunTask, shared: SharedState) -> tuple[MakeTrainer, dict[str, Any]]:
        """Return a function that creates the trainer of a process, and a dict of metadata for the run record.

        By default, a trainer trains one worker after another. The entry "width" of the metadata is the number of
        workers that a trainer trains at once.

        Args:
            task: run to compute.
            shared: tensors of the run.
        """
        return RowTrainer, {}

    def new_team(self, task: RunTask) -> Team:
        """Return the processes that compute a task, for an engine that starts none: by default, only this process."""
        return Team(ProcessContext.alone(), task.device)

    def new_states(self, task: RunTask, team: Team) -> WorkerStates:
        """Return the storage for what workers keep between rounds, for an engine that starts no processes."""
        return WorkerStates.of(task, self.shared)

    def allocate(self, task: RunTask, *data: Any) -> SharedState:
        """Allocate and return the tensors of a task.

        Args:
            task: run to compute.
            data: samples of the run and their assignment to workers, which are passed to `RunData.on`.
        """
        return SharedState.allocate(task, *data)

    def prepare(self, device: torch.device) -> None:
        """Make child processes import modules and initialise `device`, while this process prepares a task."""
        if self._pool:
            self._pool.prepare(_initialise, device)

    def begin(self, task: RunTask, shared: SharedState) -> None:
        """Begin a task in every process, and release the previous task.

        Args:
            task: run to compute.
            shared: tensors of the task, from `allocate`.

        Raises ExperimentError if the engine cannot compute the task.
        """
        self.leave()
        if self._in_pool and not self.at_work:  # the engine chose the pool just now, or lost its processes
            shared.share()  # forked processes would keep the memory that the tensors leave
            return_freed_memory()  # for example that of a trial of the model
            self._pool = self._new_pool()
        make_trainer, self._trainer_metadata = self.trainers(task, shared)
        if task.streams:  # a stack for each process that shares these rows
            width = min(self._trainer_metadata.get("width", 1), shared.cohort.size)
            shared.allocate_wave(task, width * (1 if self.traits.ranks else self.processes))
        if self._in_pool:
            self._begin_in_pool(task, shared, make_trainer)
            return
        self.shared = shared
        team = self.new_team(task)
        self.states, self._began = self.new_states(task, team), True
        self._state = _new_state(team, task, shared, make_trainer, self.states)

    def _begin_in_pool(self, task: RunTask, shared: SharedState, make_trainer: MakeTrainer) -> None:
        """Begin a task in the processes of the pool, and move all tensors of the run to memory that they share."""
        self.shared, mailbox = shared.share(), new_mailbox(self.processes)
        most = min(len(shared.data.shards), task.experiment.rounds * len(shared.cohort.workers))
        self.states = WorkerStates.of(task, self.shared).share(most)
        share([mailbox, *self.states.initial.values()])
        self._began = True
        self._work = mailbox, task, self.shared, make_trainer, self.states
        release_memory(task.device)  # for example the memory of a trial of the model in this process
        try:
            self._call(_make_executor, *self._work)
        except RuntimeError as error:
            if isinstance(error, FedsimError) or task.device.type == "cpu":
                raise
            raise sharing_error(task.device, error) from error

    def run(self, method: Callable[..., T], *arguments: object, of: str = "executor") -> list[T]:
        """Call a method in every process, and return one result per process, in order.

            engine.run(Executor.test, round)
            engine.run(SynchronousRounds.run_round, round, of="rounds")

        Args:
            method: method of `Executor` or `SynchronousRounds`.
            arguments: its arguments.
            of: object of each process: "executor", or in synchronous runs also "rounds".

        Raises WorkerError if a process fails.
        """
        if self._in_pool:
            answers = self._call(_run, of, method, *arguments)
            distinct = {(warning.category, str(warning.message)): warning for _, noted in answers for warning in noted}
            for warning in distinct.values():  # several processes may give the same warning
                place = warning.category, warning.filename, warning.lineno
                warnings.warn_explicit(warning.message, *place, registry=self._shown)
            return [result for result, _ in answers]
        executor = self._state["executor"]
        try:
            with executor.environment():
                return [method(self._state[of], *arguments)]
        except FedsimError:
            raise
        except Exception as error:
            raise WorkerError(f"{executor.team.describe_failure()}: {format_failure(error)}") from error

    def _call(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Call `function` in every process of the pool, and return one result per process."""
        assert self._pool is not None
        synchronize(self.shared.server.row.device)
        return self._pool.call(function, *arguments)

    def round_rows(self, cohort: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return the workers' updates in the latest aggregation, and the workers' losses before training.

        Both tensors have one entry per worker, in the order of `cohort`. Ranks other than rank 0 return None.

        Args:
            cohort: IDs of the workers of the latest round.
        """
        return self.shared.cohort.rows, self.shared.cohort.losses

    def metadata(self) -> dict[str, Any]:
        """Return a description of how the current task is computed, such as {"processes": 4}, for the run record."""
        pool = {"start_method": self._pool.start_method} if self._in_pool and self._pool else {}
        return {"threads": self._threads, "processes": self.processes, **pool, **self._trainer_metadata}

    def replayed(self) -> bool | str:
        """Return True if the training steps run as CUDA graphs, otherwise the reason why they do not."""
        refusals = [refusal for refusal in self.run(Executor.replay_refusal) if refusal is not None]
        return refusals[0] if refusals else True

    def broadcast(self, value: Any) -> Any:
        """Return the value that rank 0 passes, in every rank. Without ranks, return `value` itself."""
        return value

    @property
    def at_work(self) -> bool:
        """Whether the engine accepts tasks: it is not closed and has not lost its processes."""
        return not self._in_pool or (self._pool is not None and self._pool.at_work)

    @property
    def can_lose_processes(self) -> bool:
        """Whether the engine has child processes, which may die while this process continues."""
        return self._in_pool

    def replace_processes(self) -> None:
        """Replace all processes by new ones that begin the current task again.

        The caller must then restore the state of the run. Raises WorkerError if the processes cannot be restarted.
        """
        assert self._pool is not None
        self._pool.close()
        release_memory(self.shared.server.row.device)
        self._pool = self._new_pool()
        self._call(_make_executor, *self._work)

    def leave(self) -> None:
        """Release the current task and its memory in every process. Do nothing if there is no task."""
        if not self._began:
            return
        self._began, self._state = False, {}
        device = self.shared.server.row.device
        try:
            if self._in_pool and self._pool and self._pool.at_work:
                with contextlib.suppress(ProcessLostError):
                    self._pool.call(_drop_executor)  # no need to wait for a device, which may have failed
                self._pool.forget()
        finally:
            del self.shared, self.states
            self._work = ()
        release_memory(device)

    def close(self) -> None:
        """End the engine's child processes, if there are any."""
        try:
            self.leave()
        finally:
            if self._pool:
                self._pool.close()


class EngineRegistry(Registry):
    """Registry of engines, which are subclasses of `Engine` with the same constructor."""

    def _registration(self, name: str, target: Any) -> Registration:
        if not (isinstance(target, type) and issubclass(target, Engine)):
            raise TypeError("an engine must be a class that derives from fedsim.engines.Engine")
        if not isinstance(target.traits, EngineTraits):
            raise TypeError("the attribute traits of an engine must be a fedsim.config.engines.EngineTraits")
        try:
            inspect.signature(target).bind(*self.inputs)
        except TypeError:
            raise TypeError(f"the constructor of {target.__name__} must take ({', '.join(self.inputs)})") from None
        return super()._registration(name, target)


def _new_state(team: Team, task: RunTask, *arguments: Any) -> dict[str, Any]:
    """Return the executor of a process, and the rounds of a synchronous run, whose methods `Engine.run` calls."""
    executor = Executor(team, task, *arguments)
    rounds = {"rounds": SynchronousRounds(executor)} if task.experiment.in_rounds else {}
    return {"executor": executor, **rounds}


def _initialise(process: ProcessContext, device: torch.device) -> None:
    """Initialise a GPU and its library for matrix products. Unpickling this function imports the modules of a round."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
        matrix = torch.ones(8, 8, device=device)
        torch.mm(matrix, matrix)
        synchronize(device)


def _make_executor(process: ProcessContext, mailbox: Tensor, task: RunTask, *arguments: Any) -> None:
    if task.device.type != "cpu":
        torch.get_device_module(task.device).set_device(task.device)
    settings = process.state["settings"] = contextlib.ExitStack()
    settings.enter_context(run_settings(task.experiment.threads_per_process))
    settings.enter_context(without_recurrent_advice(task.device))
    process.state |= _new_state(Team(process, task.device, mailbox), task, *arguments)


def _run(
    process: ProcessContext, of: str, method: Callable[..., T], *arguments: object
) -> tuple[T, list[warnings.WarningMessage]]:
    """Call a method of this process's executor or rounds. Return its result, and the warnings that it caused."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("default")
        with process.state["executor"].environment():
            return method(process.state[of], *arguments), noted


def _drop_executor(process: ProcessContext) -> None:
    process.state["settings"].close()
    process.state.clear()
    gc.collect()
