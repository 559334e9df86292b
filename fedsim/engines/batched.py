"""The engine `batched`: whole cohorts in one set of kernels, in one process or in several."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from fedsim.engines.engine import Engine
from fedsim.engines.graphs import unsafe
from fedsim.engines.job import Memory, Task
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.serial import SerialEngine
from fedsim.engines.spawn import SpawnEngine
from fedsim.engines.stack_trainer import StackTrainer
from fedsim.errors import ExperimentError
from fedsim.system.devices import default_processes, total_memory_of

MEMORY_SHARE = 0.5  # of what the device has, for stacks; not of what is free, on which no bit may depend
WIDEST_ON_CPU = 32  # more rows share no more of a step's fixed cost
NARROWEST_ON_CPU = 4  # fewer rows share too little of it, however large they are
STACK_BYTES_ON_CPU = 2**23  # of a stack's parameters, for each thread: more of them leave the caches


class BatchedEngine(Engine):
    """Stacks of rows: one process by default on a card, where it fills the card; on a CPU as many as cores.

    Agrees with the engine `serial` up to rounding.
    """

    stacks = True

    @classmethod
    def may_lose_processes(cls, most: int) -> bool:
        return most > 1

    @classmethod
    def settings(cls, most: int) -> set[str]:
        return {*super().settings(most), "cuda_graphs"}

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._processes, self._threads = processes, threads
        self._host = (SerialEngine if processes == 1 else SpawnEngine)(processes, threads, timeout)
        self._width = 0

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return default_processes(device, cohort, threads) if device.type == "cpu" else 1

    def begin(self, task: Task, memory: Memory) -> None:
        rehearsal = Rehearsal.of(task, memory)
        if task.cuda_graphs and (reason := unsafe(task, rehearsal)):
            raise ExperimentError(f"cuda_graphs = true: steps cannot be captured here: {reason}")
        self._width = task.width or stack_width(task, memory, rehearsal, self._processes, self._threads)
        self._host.begin(task, memory, partial(StackTrainer, width=self._width, rehearsal=rehearsal))

    @property
    def memory(self) -> Memory:  # type: ignore[override]  # it is the host's
        return self._host.memory

    def facts(self) -> dict[str, Any]:
        return {**self._host.facts(), "width": self._width}

    def _each(self, method: str, *arguments: object) -> list[Any]:
        return self._host._each(method, *arguments)

    @property
    def can_lose_processes(self) -> bool:
        return self._host.can_lose_processes

    def replace_processes(self) -> None:
        self._host.replace_processes()

    @property
    def at_work(self) -> bool:
        return self._host.at_work

    def leave(self) -> None:
        self._host.leave()

    def close(self) -> None:
        self._host.close()


def stack_width(task: Task, memory: Memory, rehearsal: Rehearsal, processes: int, threads: int) -> int:
    """How many rows a process should stack: its share of the cohort, if that fits into memory (and, on a CPU, caches).

    On any device there are a row and its copy in the stack, and twice what the solver keeps of it. A step makes a
    gradient and activations. Off the CPU it also makes the joined gradients, and copies of the row and of what the
    solver keeps of it, where a mask or a loss scale may keep the row from moving. Where steps are captured, the memory
    of a step exists twice: for the graphs, and for the steps before a capture.
    """
    row, kept = memory.rows.shape[1] * task.dtype.itemsize, len(task.solver.start(memory.global_row[:1]))
    on_cpu = task.device.type == "cpu"
    captured = task.cuda_graphs is not False and unsafe(task, rehearsal) is None
    made = (1 if on_cpu else 3 + kept) * row + 2 * task.schedule.batch_size * rehearsal.sample_bytes
    row_bytes = (2 + 2 * kept) * row + (2 if captured else 1) * made
    most = math.inf
    if on_cpu:
        most = min(WIDEST_ON_CPU, max(NARROWEST_ON_CPU, threads * (STACK_BYTES_ON_CPU // row)))
    share = -(-len(memory.rows) // processes)
    return max(1, int(min(share, most, MEMORY_SHARE * total_memory_of(task.device) / processes / row_bytes)))
