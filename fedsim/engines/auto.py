"""The engine `auto`: one of the others, chosen by what the task costs and by what the machine has; see `plan.py`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from fedsim.engines.batched import stack_width
from fedsim.engines.engine import Engine
from fedsim.engines.job import Memory, Task
from fedsim.engines.plan import (
    ExecutionPlan,
    Workload,
    execution_plan,
    simpler,
    stacks_may_pay,
    stacks_pay,
    work_of_a_round,
)
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.serial import SerialEngine
from fedsim.engines.spawn import SpawnEngine
from fedsim.engines.stack_trainer import StackTrainer
from fedsim.engines.station import MakeTrainer
from fedsim.engines.trainer import RowTrainer
from fedsim.errors import ExperimentError, FedsimWarning, first_line
from fedsim.system.devices import default_processes, release_memory


class AutoEngine(Engine):
    """Trains rows one by one or stacked, in this process or in several, whichever should be fastest.

    The choice is a pure function of the task and the machine (cores, memory, device): the same run gives the same bits
    every time, also on a busy machine. If a plan fails as it begins (no shared memory, too little memory of the device,
    a lost process), a simpler one takes its place, with one warning.
    """

    racing, stacks, chooses = SpawnEngine.racing, True, True

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return default_processes(device, cohort, threads) if device.type == "cpu" else 1

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._processes, self._threads, self._timeout = processes, threads, timeout
        self._here = SerialEngine(1, threads, timeout)
        self._pool: SpawnEngine | None = None
        self._host: SerialEngine | SpawnEngine = self._here
        self._plans: dict[str, tuple[ExecutionPlan, Rehearsal | None]] = {}
        self._plan, self._width = ExecutionPlan(1, False, ""), 0

    def begin(self, task: Task, memory: Memory) -> None:
        self.leave()
        key = _what_plans_depend_on(task, memory)
        if key not in self._plans:
            self._plans[key] = self._choose(task, memory)
        plan, trial = self._plans[key]
        reasons = list[str]()
        while reason := self._failure(plan, trial, task, memory):
            reasons.append(reason)
            self._give_up(task.device)
            plan = simpler(plan, "; ".join(dict.fromkeys(reasons)))
        if reasons:
            self._plans[key] = plan, trial
            how = "stacked" if plan.stacked else "one by one"
            warnings.warn(f"one process trains all rows, {how}: {plan.reason}", FedsimWarning, stacklevel=2)

    def _failure(self, plan: ExecutionPlan, trial: Rehearsal | None, task: Task, memory: Memory) -> str | None:
        """Begin with a task as planned. Return None, or why that failed; raise if there is no simpler plan to try."""
        try:
            self._begin(plan, trial if plan.stacked else None, task, memory)
        except Exception as error:
            if simpler(plan, "") is None:
                raise
            return first_line(error)
        return None

    def _give_up(self, device: torch.device) -> None:
        """After a failure: end the processes, and release what the attempt has left on the device."""
        self.leave()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        release_memory(device)

    def _begin(self, plan: ExecutionPlan, trial: Rehearsal | None, task: Task, memory: Memory) -> None:
        self._plan, self._width, trainer = plan, 0, RowTrainer
        if trial is not None:
            self._width = task.width or stack_width(task, memory, trial, plan.processes, self._threads)
            trainer: MakeTrainer = partial(StackTrainer, width=self._width, rehearsal=trial)
        self._host = self._host_for(plan)
        self._host.begin(task, memory, trainer)

    def _host_for(self, plan: ExecutionPlan) -> SerialEngine | SpawnEngine:
        if plan.processes == 1:
            return self._here
        if self._pool is None:
            self._pool = SpawnEngine(self._processes, self._threads, self._timeout)
        return self._pool

    def _choose(self, task: Task, memory: Memory) -> tuple[ExecutionPlan, Rehearsal | None]:
        trial, single = self._try_stacks(task, memory)
        return execution_plan(task.device, self._processes, partial(Workload.of, task, memory), single), trial

    def _try_stacks(self, task: Task, memory: Memory) -> tuple[Rehearsal | None, str | None]:
        """What a trial of stacked rows has shown, and None, if stacks pay; else None, and why they do not."""
        reason = stacks_may_pay(task, memory, self._processes)
        if reason is not None:
            return None, reason
        try:
            trial = Rehearsal.of(task, memory)
        except (ExperimentError, torch.OutOfMemoryError) as refusal:
            return None, first_line(refusal)
        if not stacks_pay(task, memory, trial.sample_bytes):
            return None, f"a batch leaves {task.schedule.batch_size * trial.sample_bytes / 1e6:.1f} MB of activations"
        return trial, None

    @property
    def memory(self) -> Memory:  # type: ignore[override]  # it is the host's
        return self._host.memory

    def facts(self) -> dict[str, Any]:
        plan = self._plan
        name = "batched" if plan.stacked else "spawn" if plan.processes > 1 else "serial"
        width = {"width": self._width} if plan.stacked else {}
        return {"engine": name, "processes": plan.processes, "threads": self._threads, **width, "reason": plan.reason}

    def _each(self, method: str, *arguments: object) -> list[Any]:
        return self._host._each(method, *arguments)

    @property
    def can_lose_processes(self) -> bool:
        return self._host.can_lose_processes

    def replace_processes(self) -> None:
        self._host.replace_processes()

    @property
    def at_work(self) -> bool:
        return self._pool is None or self._pool.at_work

    def leave(self) -> None:
        self._here.leave()
        if self._pool is not None:
            self._pool.leave()

    def close(self) -> None:
        try:
            self._here.close()
        finally:
            if self._pool is not None:
                self._pool.close()


def _what_plans_depend_on(task: Task, memory: Memory) -> str:
    """Of a task; the runs of a comparison that differ in nothing of this share a plan."""
    inputs, shards = memory.train.inputs, memory.shards
    held = len(memory.train) if shards.listed else work_of_a_round(task.schedule, memory)
    sizes = held, len(shards), len(memory.test), memory.rows.shape
    numbers = task.precision, task.compile, task.cuda_graphs
    how = task.rounds, task.gradient_rounds, task.schedule, task.solver, *numbers, task.device, task.width, task.augment
    return repr((task.model, *how, sizes, inputs.shape[1:], inputs.dtype, task.rule.takes("root")))
