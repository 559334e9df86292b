"""The engine `auto`: the fastest of the others for the task in hand, found out by a few steps of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fedsim.engines.batched import stack_width
from fedsim.engines.engine import Engine
from fedsim.engines.job import Memory, Schedule, Task
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.serial import SerialEngine
from fedsim.engines.spawn import SpawnEngine
from fedsim.engines.stack_trainer import StackTrainer
from fedsim.engines.station import MakeTrainer
from fedsim.engines.trainer import RowTrainer
from fedsim.errors import ExperimentError, WorkerError
from fedsim.system.devices import default_processes, shares_memory

STEPS = 2  # of each row in a measurement
ROWS_STACKED = 16  # at most, in a measurement
LOOKED_AT = 500  # workers at most, whose steps stand for everybody's
START_SECONDS = 3.0  # about what starting processes takes, which they must save
LOSSLESS = 0.7  # of the time of stacks in one process, at best, is what as many processes take as that has threads
HOPELESS = 1.5  # times as long as one row after another: stacks are not tried in several processes then
GAIN = 0.9  # of the time of plain rows, at most, must another way take: their results are the same bits everywhere


@dataclass(frozen=True)
class Way:
    """One way to compute a task: what it would be called, the processes, the threads of each, the trainer."""

    engine: str
    processes: int
    threads: int
    trainer: MakeTrainer
    width: int = 0

    @property
    def label(self) -> str:
        parts = [self.engine]
        if self.processes > 1 and self.width:
            parts.append(f"{self.processes} processes")
        if self.threads > 1:
            parts.append(f"{self.threads} threads")
        return ", ".join(parts)


class AutoEngine(Engine):
    """Measures a few steps of serial, batched and spawn at the start of a task, and does it in the fastest way.

    Processes are started where the whole of the training is long enough for that to pay. A task that differs from an
    earlier one in nothing that its speed depends on is done in the same way.
    """

    racing, stacks, chooses = SpawnEngine.racing, True, True

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return default_processes(device, cohort, threads) if shares_memory(device) else 1

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._processes, self._threads, self._timeout = processes, threads, timeout
        self._here = SerialEngine(1, threads, timeout)
        self._crew: SpawnEngine | None = None
        self._chosen: dict[str, tuple[Way, dict[str, Any]]] = {}
        self._way, self._figures = Way("serial", 1, threads, RowTrainer), dict[str, Any]()

    def begin(self, task: Task, memory: Memory) -> None:
        self.leave()
        key = _what_speed_depends_on(task, memory)
        if key not in self._chosen:
            self._chosen[key] = self._choose(task, memory)
        self._way, self._figures = self._chosen[key]
        self._host_for(self._way).begin(task, memory, self._way.trainer)

    @property
    def memory(self) -> Memory:  # type: ignore[override]  # it is the host's
        return self._host.memory

    def facts(self) -> dict[str, Any]:
        width = {"width": self._way.width} if self._way.width else {}
        way = {"engine": self._way.engine, "processes": self._way.processes, "threads": self._way.threads}
        return {**way, **width, "probe": self._figures}

    @property
    def _host(self) -> SerialEngine | SpawnEngine:
        return self._here if self._way.processes == 1 or self._crew is None else self._crew

    def _host_for(self, way: Way) -> SerialEngine | SpawnEngine:
        """The engine that a way needs, made ready for it."""
        if way.processes == 1:
            torch.set_num_threads(way.threads)
            return self._here
        if self._crew is None:
            self._crew = SpawnEngine(self._processes, self._threads, self._timeout)
        return self._crew

    def _choose(self, task: Task, memory: Memory) -> tuple[Way, dict[str, Any]]:
        """The best way, and the seconds that a round of training was found to take in each."""
        figures: dict[str, Any] = {}
        seconds: dict[Way, float] = {}
        plain = Way("serial", 1, self._threads, RowTrainer)
        all_threads = self._threads * (self._processes if task.device.type == "cpu" else 1)

        def measure(way: Way) -> float:
            seconds[way] = self._seconds_per_round(way, task, memory)
            figures[way.label] = round(seconds[way], 4)
            return seconds[way]

        def stacked(processes: int, threads: int) -> Way:
            width = task.width or stack_width(task, memory, rehearsal, processes, threads)
            return Way("batched", processes, threads, partial(StackTrainer, width=width, rehearsal=rehearsal), width)

        one_by_one = measure(plain)
        if all_threads > self._threads:
            measure(replace(plain, threads=all_threads))
        stacks_may_pay = True
        try:
            rehearsal = Rehearsal.of(task, memory)
            stacks_may_pay = measure(stacked(1, all_threads)) < HOPELESS * one_by_one
        except (ExperimentError, WorkerError) as refusal:  # the latter where only stacks fail, as for want of memory
            figures["batched"], stacks_may_pay = _first_line(refusal), False
        best = min(seconds.values())
        at_best = min(one_by_one / self._processes, LOSSLESS * best)
        if self._processes > 1 and (self._crew or (best - at_best) * task.rounds > START_SECONDS):
            try:
                measure(Way("spawn", self._processes, self._threads, RowTrainer))
            except ExperimentError as refusal:  # no room in shared memory
                figures["spawn"], stacks_may_pay = str(refusal), False
            if stacks_may_pay:
                way = stacked(self._processes, self._threads)
                try:
                    measure(way)
                except (ExperimentError, WorkerError) as refusal:
                    figures[way.label] = _first_line(refusal)
                    if self._crew is not None and not self._crew.at_work:
                        self._crew.close()
                        self._crew = None
        return min(seconds, key=lambda way: seconds[way] / (1.0 if self._is_exact(way) else GAIN)), figures

    def _is_exact(self, way: Way) -> bool:
        """Whether a way gives the same bits as one row after another."""
        return not way.width and way.threads == self._threads

    def _seconds_per_round(self, way: Way, task: Task, memory: Memory) -> float:
        """What training takes of a round, by a few steps of as many rows as go together."""
        host = self._host_for(way)
        steps = replace(task.schedule, epochs=None, steps=STEPS)
        of_the_server = int(task.rule.takes("root"))  # it trains along, on the row behind those of the workers
        workers = min(len(memory.rows) - of_the_server, way.processes * min(way.width or 1, ROWS_STACKED))
        host.begin(replace(task, gradient_rounds=0, schedule=steps), memory, way.trainer)
        try:
            taken = max(host._each("time_training", range(workers)))
        finally:
            host.leave()
        return taken / ((workers + of_the_server) * STEPS) * _steps_of_a_round(task.schedule, memory)

    def _each(self, method: str, *arguments: object) -> list[Any]:
        return self._host._each(method, *arguments)

    @property
    def can_lose_processes(self) -> bool:
        return self._host.can_lose_processes

    def replace_processes(self) -> None:
        self._host.replace_processes()

    @property
    def at_work(self) -> bool:
        return self._crew is None or self._crew.at_work

    def leave(self) -> None:
        self._here.leave()
        if self._crew is not None:
            self._crew.leave()

    def close(self) -> None:
        try:
            self._here.close()
        finally:
            if self._crew is not None:
                self._crew.close()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _what_speed_depends_on(task: Task, memory: Memory) -> str:
    """Of a task; equal for the runs of a comparison that differ in other things only."""
    inputs, shards = memory.train.inputs, memory.shards
    held = len(memory.train) if shards.listed else _steps_of_a_round(task.schedule, memory)
    sizes = held, len(shards), len(memory.root), memory.rows.shape
    numbers = task.precision, task.compile, task.cuda_graphs
    how = task.rounds, task.schedule, task.solver, *numbers, task.device, task.width, task.augment
    return repr((task.model, *how, sizes, inputs.shape[1:], inputs.dtype, task.rule.takes("root")))


def _steps_of_a_round(schedule: Schedule, memory: Memory) -> float:
    """Of all members of a cohort together, on average over some of the workers."""
    shards = memory.shards
    looked_at = range(0, len(shards), -(-len(shards) // LOOKED_AT))
    steps = sum(schedule.steps_for(shards.size(worker)) for worker in looked_at)
    return len(memory.rows) * steps / len(looked_at)
