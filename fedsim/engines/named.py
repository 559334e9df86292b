"""The engines `serial`, `processes`, `spawn` and `batched`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedsim.config.engines import TRAITS
from fedsim.engines.base import Engine
from fedsim.errors import ExperimentError
from fedsim.rounds.executor import MakeTrainer
from fedsim.system.devices import require_memory
from fedsim.training.cuda_graphs import unsafe
from fedsim.training.probe import StackingProbe
from fedsim.training.shared_state import SharedState
from fedsim.training.stacked import StackTrainer, bytes_per_worker, stack_width
from fedsim.training.task import RunTask


def stacked(
    task: RunTask, shared: SharedState, processes: int, threads: int, probe: StackingProbe | None = None
) -> tuple[MakeTrainer, dict[str, Any]]:
    """Return a function that creates a trainer for several workers at once (a stack), and metadata for the run record.

    Args:
        task, shared: run and its tensors.
        processes: number of processes that share the device.
        threads: number of PyTorch threads per process.
        probe: result of a trial run of the model; None to make the trial run here.

    Raises ExperimentError if the model cannot be trained in stacks, or if memory is too small for the stacks.
    """
    probe = StackingProbe.of(task, shared) if probe is None else probe
    if task.experiment.cuda_graphs and (reason := unsafe(task, probe)):
        raise ExperimentError(f"cuda_graphs = true: training steps cannot be captured as CUDA graphs: {reason}")
    width, workers = stack_width(task, shared, probe, threads, processes), shared.cohort.size
    if task.device.type == "cpu":
        at_once = min(workers, width * processes)
        needed = at_once * bytes_per_worker(task, shared, probe)
        purpose = f"training {at_once} workers at once (batched.stack_size = {width}, processes = {processes})"
        require_memory(needed, purpose, "a smaller batched.stack_size, fewer processes or engine=serial")
    return partial(StackTrainer, width=width, probe=probe), {"width": width}


class SerialEngine(Engine):
    """Engine that trains one worker after another in one process. It is the reference for all other engines."""


class ProcessesEngine(Engine):
    """Engine that divides the workers among several processes, which are forked where that is safe.

    On a CPU, the results are bit-identical to the results of the engine `serial`. `start_method` says how the processes
    start.
    """

    traits = TRAITS["processes"]


class SpawnEngine(Engine):
    """Engine like `processes` that always spawns its processes, as on a GPU: each process is a new Python interpreter.

    Use it on a CPU to test whether a program works with spawned processes, which take seconds to start.
    """

    traits = TRAITS["spawn"]


class BatchedEngine(Engine):
    """Engine that trains several workers (a stack) at once with batched operations.

    By default, it uses one process on a GPU, and as many processes as cores on a CPU. Results agree with the engine
    `serial` up to rounding.
    """

    traits = TRAITS["batched"]

    def trainers(self, task: RunTask, shared: SharedState) -> tuple[MakeTrainer, dict[str, Any]]:
        return stacked(task, shared, self.processes, self._threads)
