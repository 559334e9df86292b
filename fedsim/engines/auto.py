"""The engine `auto`: one of the others, chosen by what the task costs and by what the machine has; see `plan.py`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from fedsim.engines.engine import Engine
from fedsim.engines.executor import Executor, MakeExecutor
from fedsim.engines.in_process import InProcess
from fedsim.engines.named import RACING, one_by_one, stacked
from fedsim.engines.plan import (
    ExecutionPlan,
    Workload,
    execution_plan,
    simpler,
    stacks_may_pay,
    stacks_pay,
    work_of_a_round,
)
from fedsim.engines.pool.backend import InPool
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.traits import EngineTraits
from fedsim.errors import ExperimentError, FedsimWarning, first_line
from fedsim.system.devices import release_memory


class AutoEngine(Engine):
    """Trains rows one by one or stacked, in this process or in several, whichever should be fastest.

    The choice is a pure function of the task and the machine (cores, memory, device): the same run gives the same bits
    every time, also on a busy machine. If a plan fails as it begins (no shared memory, too little memory of the device,
    a lost process), a simpler one takes its place, with one warning.
    """

    traits = EngineTraits(
        frozenset({"processes", "batched"}),
        pool_from=1,
        one_process_on_gpu=True,
        stacks=True,
        chooses=True,
        races_on=RACING,
    )

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._processes, self._timeout = processes, timeout
        self._here = InProcess(threads)
        self._pool: InPool | None = None
        self._plans: dict[str, tuple[ExecutionPlan, StackingProbe | None]] = {}
        self._plan = ExecutionPlan(1, False, "")
        super().__init__(self._here, one_by_one, threads)

    def begin(self, task: TaskSpec, shared: SharedState, make: MakeExecutor = Executor) -> None:
        self.leave()
        key = _what_plans_depend_on(task, shared)
        if key not in self._plans:
            self._plans[key] = self.choose(task, shared)
        plan, probe = self._plans[key]
        reasons = list[str]()
        while reason := self._failure(plan, probe, task, shared, make):
            reasons.append(reason)
            self._give_up(task.device)
            next_plan = simpler(plan, "; ".join(dict.fromkeys(reasons)))
            assert next_plan is not None, "`_failure` raises if there is no simpler plan"
            plan = next_plan
        if reasons:
            self._plans[key] = plan, probe
            how = "stacked" if plan.stacked else "one by one"
            warnings.warn(f"one process trains all rows, {how}: {plan.reason}", FedsimWarning, stacklevel=2)

    def _failure(
        self,
        plan: ExecutionPlan,
        probe: StackingProbe | None,
        task: TaskSpec,
        shared: SharedState,
        make: MakeExecutor,
    ) -> str | None:
        """Begin with a task as planned. Return None, or why that failed; raise if there is no simpler plan to try."""
        try:
            self._plan, self._trainers = plan, partial(stacked, probe=probe) if plan.stacked else one_by_one
            self.backend = self._backend_for(plan)
            super().begin(task, shared, make)
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

    def _backend_for(self, plan: ExecutionPlan) -> InProcess | InPool:
        if plan.processes == 1:
            return self._here
        if self._pool is None:
            self._pool = InPool(self._processes, self._threads, self._timeout)
        return self._pool

    def choose(self, task: TaskSpec, shared: SharedState) -> tuple[ExecutionPlan, StackingProbe | None]:
        """The plan for a task, and the probe of its model if rows are stacked; starts no process."""
        probe, single = self._try_stacks(task, shared)
        return execution_plan(task.device, self._processes, partial(Workload.of, task, shared), single), probe

    def _try_stacks(self, task: TaskSpec, shared: SharedState) -> tuple[StackingProbe | None, str | None]:
        """The probe of stacked rows and None, if stacks pay; else None and the reason why they do not."""
        reason = stacks_may_pay(task, shared, self._processes)
        if reason is not None:
            return None, reason
        try:
            probe = StackingProbe.of(task, shared)
        except (ExperimentError, torch.OutOfMemoryError) as refusal:
            return None, first_line(refusal)
        if not stacks_pay(task, shared, probe.sample_bytes):
            return None, f"a batch leaves {task.schedule.batch_size * probe.sample_bytes / 1e6:.1f} MB of activations"
        return probe, None

    def facts(self) -> dict[str, Any]:
        plan = self._plan
        name = "batched" if plan.stacked else "spawn" if plan.processes > 1 else "serial"
        return {"engine": name, "threads": self._threads, **super().facts(), "reason": plan.reason}

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


def _what_plans_depend_on(task: TaskSpec, shared: SharedState) -> str:
    """The facts of a task that decide its plan; tasks with the same facts share a plan."""
    inputs, shards = shared.train.inputs, shared.shards
    held = len(shared.train) if shards.listed else work_of_a_round(task.schedule, shared)
    sizes = held, len(shards), len(shared.test), shared.rows.shape
    numbers = task.precision, task.cuda_graphs
    how = task.rounds, task.gradient_rounds, task.schedule, task.solver, *numbers, task.device, task.width, task.augment
    return repr((task.model, *how, sizes, inputs.shape[1:], inputs.dtype, task.rule.accepts("root")))
