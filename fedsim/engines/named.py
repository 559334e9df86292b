"""The engines `serial`, `spawn` and `batched`: pairs of a backend and trainers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from fedsim.engines.engine import Engine
from fedsim.engines.executor import MakeTrainer
from fedsim.engines.in_process import InProcess
from fedsim.engines.pool.backend import InPool
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.stacking.width import stack_width
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.cuda_graphs import unsafe
from fedsim.engines.trainers.sequential import RowTrainer
from fedsim.engines.trainers.stacked import StackTrainer
from fedsim.errors import ExperimentError
from fedsim.system.devices import default_processes

T = TypeVar("T")


def one_by_one(task: TaskSpec, shared: SharedState, processes: int, threads: int) -> tuple[MakeTrainer, dict[str, Any]]:
    """Trainers that train one row after another."""
    return RowTrainer, {}


def stacked(
    task: TaskSpec, shared: SharedState, processes: int, threads: int, probe: StackingProbe | None = None
) -> tuple[MakeTrainer, dict[str, Any]]:
    """Trainers that train stacks of rows, as wide as fits; a probe of the model is made unless one is given.

    Raises ExperimentError where the rows of the model cannot be stacked.
    """
    probe = StackingProbe.of(task, shared) if probe is None else probe
    if task.cuda_graphs and (reason := unsafe(task, probe)):
        raise ExperimentError(f"cuda_graphs = true: steps cannot be captured here: {reason}")
    width = task.width or stack_width(task, shared, probe, processes, threads)
    return partial(StackTrainer, width=width, probe=probe), {"width": width}


class SerialEngine(Engine):
    """One process, one row after another. The reference for all other engines."""

    one_process = True

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return 1

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        super().__init__(InProcess(threads), one_by_one, threads)


class SpawnEngine(Engine):
    """P processes, started once, among which the rows, the columns and the test batches are dealt.

    On a CPU the results are bit-identical to the engine `serial`.
    """

    racing: ClassVar[str] = "spawn"
    _backend: InPool

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        super().__init__(InPool(processes, threads, timeout), one_by_one, threads)

    def call(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Run `function(process, executor, *arguments)` in every process, as a race does; the results in order."""
        return self._backend.call(function, *arguments)


class BatchedEngine(Engine):
    """Stacks of rows in one set of kernels: one process by default on a GPU; on a CPU as many as cores.

    Agrees with the engine `serial` up to rounding.
    """

    stacks = True

    @classmethod
    def may_lose_processes(cls, most: int) -> bool:
        return most > 1

    @classmethod
    def settings(cls, most: int) -> set[str]:
        return {*super().settings(most), "cuda_graphs"}

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return default_processes(device, cohort, threads) if device.type == "cpu" else 1

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        backend = InProcess(threads) if processes == 1 else InPool(processes, threads, timeout)
        super().__init__(backend, stacked, threads)
