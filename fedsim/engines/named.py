"""The engines `serial`, `spawn` and `batched`: pairs of a backend and trainers."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedsim.engines.backend import InProcess
from fedsim.engines.engine import Engine, EngineTraits
from fedsim.engines.executor import MakeTrainer
from fedsim.engines.pool.backend import InPool
from fedsim.engines.shared_state import SharedState
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.cuda_graphs import unsafe
from fedsim.engines.trainers.sequential import RowTrainer
from fedsim.engines.trainers.stacked import StackTrainer, stack_width
from fedsim.errors import ExperimentError

RACING = "spawn"  # the engine of races


def one_by_one(task: RunTask, shared: SharedState, processes: int, threads: int) -> tuple[MakeTrainer, dict[str, Any]]:
    """Trainers that train one row after another."""
    return RowTrainer, {}


def stacked(
    task: RunTask, shared: SharedState, processes: int, threads: int, probe: StackingProbe | None = None
) -> tuple[MakeTrainer, dict[str, Any]]:
    """Trainers that train stacks of rows, as wide as fits; a probe of the model is made unless one is given.

    Raises ExperimentError if the rows of the model cannot be stacked.
    """
    probe = StackingProbe.of(task, shared) if probe is None else probe
    if task.experiment.cuda_graphs and (reason := unsafe(task, probe)):
        raise ExperimentError(f"cuda_graphs = true: steps cannot be captured here: {reason}")
    width = task.experiment.batched.max_rows or stack_width(task, shared, probe, processes, threads)
    return partial(StackTrainer, width=width, probe=probe), {"width": width}


class SerialEngine(Engine):
    """One process, one row after another. The reference for all other engines."""

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        super().__init__(InProcess(threads), one_by_one, threads)


class SpawnEngine(Engine):
    """P processes, started once, which share the rows, the columns and the test batches.

    On a CPU the results are bit-identical to those of the engine `serial`.
    """

    traits = EngineTraits(frozenset({"processes"}), pool_from=1, races_on=RACING)

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        super().__init__(InPool(processes, threads, timeout, start_method), one_by_one, threads)


class BatchedEngine(Engine):
    """Stacks of rows in one set of kernels: one process by default on a GPU; on a CPU as many as cores.

    Agrees with the engine `serial` up to rounding.
    """

    traits = EngineTraits(
        frozenset({"processes", "batched", "cuda_graphs"}), pool_from=2, one_process_on_gpu=True, stacks=True
    )

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        backend = InProcess(threads) if processes == 1 else InPool(processes, threads, timeout, start_method)
        super().__init__(backend, stacked, threads)
