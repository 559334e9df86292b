"""The engine `auto`: one of the others, by a rule on the task and the machine, never on timing or load.

1. Rows are stacked if the model can be stacked, which a trial shows. On a CPU a process must also have at least
   `SMALLEST_STACK` rows, with at most `LARGEST_BATCH` samples in a batch, whose activations stay in the caches.
2. On a CPU there are as many processes as the cores and the cohort allow if they save more time than their start takes,
   by a count of operations, and else one. On an accelerator there is one, since several would take turns on it.

The constants are nominal: measured once (`benchmarks/plans.py`), then fixed. A slow or busy machine gets the same plan
as an idle one with as many cores, so the same command gives the same bits.
"""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsim.core.randomness import preserve_random_state
from fedsim.engines.backend import InProcess
from fedsim.engines.engine import Engine, EngineTraits
from fedsim.engines.executor import Executor, MakeExecutor
from fedsim.engines.named import RACING, one_by_one, stacked
from fedsim.engines.pool.backend import InPool
from fedsim.engines.shared_state import SharedState
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.capture import OperationCheck
from fedsim.errors import ExperimentError, FedsimWarning, first_line
from fedsim.system.child_process import can_fork
from fedsim.system.devices import release_memory

LARGEST_BATCH = 100  # samples; stacks of larger batches were never faster than single rows
SMALLEST_STACK = 4  # rows; fewer do not share enough of the fixed cost
ACTIVATION_BYTES = 7.5e5  # of one row's batch in float32: with more, a stack leaves the caches
PARAMETER_SHARE = 0.35  # of a row's bytes are allowed on top, since a stack writes no gradients of weights to memory

FORK_SECONDS, SPAWN_SECONDS = 0.3, 3.0  # that processes take to start; they must save more
STEP_SECONDS = 3e-4  # fixed cost of a training step of one row: Python and the launch of operations
FLOPS_PER_SECOND = 6e10  # of one core in float32
BYTES_PER_SECOND = 2e10  # of one core, through its caches and memory
BARRIER_SECONDS = 5e-4  # that a synchronisation between processes takes
STACKED_SPEEDUP = 1.8  # of one process, about, where stacks are chosen

SAMPLES = 4  # on which floating-point operations are counted
WORKERS_SAMPLED = 500  # at most, whose numbers of steps stand for all


class Plan(NamedTuple):
    """How a task is computed.

    Attributes:
        processes: 1 means this process.
        probe: of the model, if rows are trained as stacks; else None.
        reason: one line.
    """

    processes: int
    probe: StackingProbe | None
    reason: str

    @property
    def stacked(self) -> bool:
        return self.probe is not None


def probe_if_stacks_pay(
    task: RunTask, shared: SharedState, processes: int
) -> tuple[StackingProbe, None] | tuple[None, str]:
    """Return the probe of the model and None if stacks of rows are faster; else None and the reason."""
    batch, rows, on_cpu = task.schedule.batch_size, -(-len(shared.cohort.rows) // processes), task.device.type == "cpu"
    if not on_cpu and len(shared.cohort.rows) == 1:
        return None, "there is one row"
    if on_cpu and batch > LARGEST_BATCH:
        return None, f"batches of {batch} samples are large (more than {LARGEST_BATCH})"
    if on_cpu and rows < SMALLEST_STACK:
        return None, f"a process has {rows} rows at a time (fewer than {SMALLEST_STACK})"
    if on_cpu and task.experiment.batched.max_rows is not None and task.experiment.batched.max_rows < SMALLEST_STACK:
        return None, f"batched.max_rows = {task.experiment.batched.max_rows} (less than {SMALLEST_STACK})"
    try:
        probe = StackingProbe.of(task, shared)
    except (ExperimentError, torch.OutOfMemoryError) as refusal:
        return None, first_line(refusal)
    # A stack writes no gradients of weights where rows are averaged, but its activations go through a CPU's caches.
    spared = PARAMETER_SHARE * len(shared.server.row) * task.dtype.itemsize if "parameters" in task.syncs else 0
    if on_cpu and batch * probe.sample_bytes > ACTIVATION_BYTES + spared:
        return None, f"a batch leaves {batch * probe.sample_bytes / 1e6:.1f} MB of activations"
    return probe, None


def seconds_saved(task: RunTask, shared: SharedState, processes: int, *, stacked: bool) -> float:
    """Estimate the seconds that `processes` processes save in a run, without their start-up time."""
    row_steps, samples = work_of_a_round(task, shared)
    moved = 6 * len(shared.server.row) * task.dtype.itemsize  # bytes of a step: the row, its gradient and the new row
    passes = samples + len(shared.data.test) / 3  # a forward pass is a third of a training step
    arithmetic = passes * flops_of_a_sample(task, shared) * (task.dtype.itemsize / 4) / FLOPS_PER_SECOND
    seconds = row_steps * (STEP_SECONDS + moved / BYTES_PER_SECOND) + arithmetic
    barriers = row_steps / len(shared.cohort.rows) if task.sync_in(task.experiment.rounds) == "gradients" else 1
    saved = seconds / (STACKED_SPEEDUP if stacked else 1) * (1 - 1 / processes) - barriers * BARRIER_SECONDS
    return max(0.0, task.experiment.rounds * saved)


def work_of_a_round(task: RunTask, shared: SharedState) -> tuple[float, float]:
    """Training steps of a cohort together, and the samples in them, on average over some of the workers."""
    shards = shared.data.shards
    workers = range(0, len(shards), -(-len(shards) // WORKERS_SAMPLED))
    works = [(task.schedule.of(worker, 1), shards.size(worker)) for worker in workers]
    steps, samples = (sum(one.steps_for(n) for one, n in works), sum(one.samples_for(n) for one, n in works if n))
    per_worker = len(shared.cohort.rows) / len(works)
    return per_worker * steps, per_worker * samples


def flops_of_a_sample(task: RunTask, shared: SharedState) -> float:
    """FLOPs of a forward and a backward pass; a guess for a model that does not run on a few samples."""
    count = min(SAMPLES, len(shared.data.train))
    inputs, targets = shared.data.train.gather(torch.arange(count))
    with preserve_random_state(task.device), contextlib.suppress(Exception):  # training will report what is wrong
        module = task.new_module().train()
        with FlopCount() as counter:
            task.learning_task.loss(module(inputs.clone()), targets).backward()
        if counter.total:
            return counter.total / count
    return 6.0 * len(shared.server.row)


class FlopCount(OperationCheck):
    """Counts the floating-point operations in a block, `total`, as torch.utils.flop_counter.FlopCounterMode does."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # takes a tenth of a second, and not every run needs it

        super().__init__()
        lstm, of_lstm = torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten.mkldnn_rnn_layer_backward
        self._formulas = {**flop_registry, lstm: _lstm_flops, of_lstm: lambda *args, **_: 2 * _lstm_flops(*args)}
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if formula := self._formulas.get(function.overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _lstm_flops(inputs: Tensor, weight_ih: Tensor, weight_hh: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of an LSTM layer on inputs [length, batch, i], which PyTorch's counter leaves out."""
    return 2 * inputs.shape[:2].numel() * (weight_ih.numel() + weight_hh.numel())


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

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        self._processes = processes
        self._new_pool = partial(InPool, processes, threads, timeout, start_method)
        self._start_seconds = FORK_SECONDS if start_method == "fork" and threads == 1 and can_fork() else SPAWN_SECONDS
        self._here = InProcess(threads)
        self._pool: InPool | None = None
        self._plans: dict[str, Plan] = {}
        self._plan = Plan(1, None, "")
        super().__init__(self._here, one_by_one, threads)

    def begin(self, task: RunTask, shared: SharedState, make: MakeExecutor = Executor) -> None:
        self.leave()
        key = _what_plans_depend_on(task, shared)
        plan = self._plans[key] = self._plans.get(key) or self.choose(task, shared)
        reasons = list[str]()
        while reason := self._failure(plan, task, shared, make):
            self._give_up(task.device)
            reasons = [*dict.fromkeys([*reasons, reason])]
            plan = Plan(1, plan.probe if plan.processes > 1 else None, "; ".join(reasons))
        if reasons:
            self._plans[key] = plan
            how = "stacked" if plan.stacked else "one by one"
            warnings.warn(f"one process trains all rows, {how}: {plan.reason}", FedsimWarning, stacklevel=2)

    def _failure(self, plan: Plan, task: RunTask, shared: SharedState, make: MakeExecutor) -> str | None:
        """Begin with a task as planned. Return None, or why that failed; raise if there is no simpler plan to try."""
        try:
            self._plan, self._trainers = plan, partial(stacked, probe=plan.probe) if plan.stacked else one_by_one
            if plan.processes > 1 and self._pool is None:
                self._pool = self._new_pool()
            self.backend = self._pool if plan.processes > 1 and self._pool is not None else self._here
            super().begin(task, shared, make)
        except Exception as error:
            if plan.processes == 1 and not plan.stacked:
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

    def choose(self, task: RunTask, shared: SharedState) -> Plan:
        """Choose the plan for a task, without starting processes."""
        probe, unstacked = probe_if_stacks_pay(task, shared, self._processes)
        rows = "rows are stacked" if unstacked is None else f"rows are trained one by one: {unstacked}"
        if task.device.type != "cpu":
            return Plan(1, probe, f"{rows}; one process, since several would take turns on {task.device}")
        if self._processes == 1:
            return Plan(1, probe, f"{rows}; one process is all that the cores and the cohort allow")
        saved = seconds_saved(task, shared, self._processes, stacked=unstacked is None)
        start = self._start_seconds
        reason = f"{self._processes} processes would save about {saved:.1f} s and take {start:g} s to start"
        return Plan(self._processes if saved > start else 1, probe, f"{rows}; {reason}")

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


def _what_plans_depend_on(task: RunTask, shared: SharedState) -> str:
    """Return the facts of a task that decide its plan; tasks with the same facts share a plan."""
    inputs, shards = shared.data.train.inputs, shared.data.shards
    held = len(shared.data.train) if shards.listed else work_of_a_round(task, shared)
    sizes = held, len(shards), len(shared.data.test), shared.cohort.rows.shape
    experiment = task.experiment
    how = (
        experiment.rounds,
        experiment.rounds_of_gradients,
        task.schedule,
        task.algorithm,
        experiment.rule.accepts("root"),
    )
    where = task.precision, experiment.cuda_graphs, task.device, experiment.batched.max_rows, experiment.data.transforms
    return repr((experiment.model.component, *how, *where, *sizes, inputs.shape[1:], inputs.dtype))
