"""The engine `auto`, which chooses how workers are trained and, given the number of cores, in how many processes.

1. How: workers are trained in stacks if a trial shows that the model can be stacked. On a CPU, the cohort must also
   fill at least two stacks of `SMALLEST_STACK` workers, a batch must have at most `LARGEST_BATCH` samples, the
   activations must fit in cache, and workers must not differ too much in their numbers of steps. A stack rounds
   differently than single workers, so this choice depends only on the experiment, and not on cores, processes or free
   memory. On a GPU, the width of a stack also depends on the total memory of the GPU.
2. In how many processes: on a CPU, the engine uses as many processes as the cores and the cohort allow, or only one
   process if starting them would take longer than they save. The time is estimated from the numbers of steps, bytes and
   floating-point operations. On an accelerator, the engine always uses one process, because several processes would not
   run in parallel.

The constants were measured once (`benchmarks/plans.py`) and are fixed.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.config.engines import TRAITS
from fedsim.core.model_inputs import leaves, on_each, outputs_of
from fedsim.core.randomness import preserve_random_state
from fedsim.engines.base import Engine
from fedsim.engines.named import stacked
from fedsim.errors import ExperimentError, FedsimWarning, first_line, show_bytes
from fedsim.processes.child_process import forks
from fedsim.rounds.executor import MakeTrainer
from fedsim.system.devices import release_memory
from fedsim.training.capture import OperationCheck
from fedsim.training.probe import StackingProbe
from fedsim.training.shared_state import SharedState
from fedsim.training.stacked import STACK_BYTES_ON_CPU, stack_width
from fedsim.training.task import RunTask

LARGEST_BATCH = 100  # samples; with larger batches, stacks were never faster than single workers
SMALLEST_STACK = 4  # workers; with fewer, a stack saves too little of the fixed cost per step
SMALLEST_COHORT = 2 * SMALLEST_STACK  # workers; with fewer, two processes that train single workers are as fast
ACTIVATION_BYTES = 7.5e5  # maximum for one worker's batch in float32; with more, a stack does not fit in cache
LEAST_FILLED = 0.55  # minimum share of a stack's steps that its workers take; with less, workers alone are faster
MATRIX_SHARE = 1.3  # bytes added to this maximum per byte of linear layers, whose gradients a stack does not write

FORK_SECONDS, SPAWN_SECONDS = 0.3, 3.0  # start-up time of processes; they must save more than this
STEP_SECONDS = 3e-4  # fixed cost of one worker's training step: Python and the launch of operations
FLOPS_PER_SECOND = 6e10  # one core in float32
BYTES_PER_SECOND = 2e10  # one core, average over caches and memory
BARRIER_SECONDS = 5e-4  # time of one synchronisation between processes
STACKED_SPEEDUP = 1.8  # approximate speed-up of one process where stacks are chosen

SAMPLES = 4  # number of samples on which floating-point operations are counted
WORKERS_SAMPLED = 500  # maximum number of workers whose steps are counted to estimate the total


class Plan(NamedTuple):
    """How the engine `auto` trains the workers of a task.

    Attributes:
        processes: number of processes; 1 means the current process.
        probe: result of the model's trial run if several workers are trained at once; None if workers are trained one
            by one.
        reason: explanation of the choice in one line.
    """

    processes: int
    probe: StackingProbe | None
    reason: str

    @property
    def stacked(self) -> bool:
        return self.probe is not None


def probe_if_stacks_pay(task: RunTask, shared: SharedState) -> tuple[StackingProbe, None] | tuple[None, str]:
    """Return (probe, None) if it is faster to train several workers at once as a stack, otherwise (None, reason).

    `probe` is the result of the model's trial run. `reason` says in one line why no stack is used.
    """
    batch, workers, on_cpu = task.schedule.largest_batch, shared.cohort.size, task.device.type == "cpu"
    if workers == 1:
        return None, "there is only one worker per round"
    if on_cpu and batch > LARGEST_BATCH:
        return None, f"batches of {batch} samples are large (more than {LARGEST_BATCH})"
    if on_cpu and task.streams and task.row_bytes > STACK_BYTES_ON_CPU:  # stacks would only take memory
        return None, f"models are too large for the caches ({show_bytes(task.row_bytes)})"
    if on_cpu and workers < SMALLEST_COHORT:
        return None, f"a round has {workers} workers (fewer than {SMALLEST_COHORT})"
    if on_cpu and (width := task.experiment.batched.stack_size) is not None and width < SMALLEST_STACK:
        return None, f"batched.stack_size = {width} (less than {SMALLEST_STACK})"
    try:
        probe = StackingProbe.of(task, shared)
    except ExperimentError as refusal:
        return None, first_line(refusal)
    # If parameters are aggregated, a stack writes no gradients of linear layers. Its activations must fit in cache.
    spared = probe.matrix_bytes if "parameters" in task.syncs else 0
    if on_cpu and batch * probe.sample_bytes > ACTIVATION_BYTES + MATRIX_SHARE * spared:
        return None, f"the activations of a batch are too large ({batch * probe.sample_bytes / 1e6:.1f} MB)"
    if on_cpu and "parameters" in task.syncs and (filled := share_of_steps(task, shared)) < LEAST_FILLED:
        return None, f"workers differ in their number of steps, so stacks would be filled to {100 * filled:.0f} percent"
    return probe, None


def share_of_steps(task: RunTask, shared: SharedState) -> float:
    """Estimate the mean number of steps of a worker, divided by that of the stack in which it is trained.

    A stack takes as many steps as its longest worker. The estimate is for two stacks of workers sorted by their steps:
    the longest worker of the cohort is in the first stack, and that of the second stack has the median number of steps.
    """
    steps, cohort = np.sort(steps_of_workers(task, shared)[0]), shared.cohort.size
    longest = steps[len(steps) * cohort // (cohort + 1)]  # where the largest of `cohort` random ranks is on average
    return float(2 * steps.mean() / (longest + np.median(steps))) if longest else 1.0


def seconds_saved(task: RunTask, shared: SharedState, processes: int, *, stacked: bool) -> float:
    """Estimate how many seconds a run with `processes` busy processes saves compared to one process.

    `stacked` says whether several workers are trained at once.
    """
    row_steps, samples = work_of_a_round(task, shared)
    moved = 6 * len(shared.server.row) * task.dtype.itemsize  # memory traffic of a step, in bytes
    passes = samples + len(shared.data.test) / 3  # a forward pass costs a third of a training step
    arithmetic = passes * flops_of_a_sample(task, shared) * (task.dtype.itemsize / 4) / FLOPS_PER_SECOND
    seconds = row_steps * (STEP_SECONDS + moved / BYTES_PER_SECOND) + arithmetic
    barriers = row_steps / shared.cohort.size if task.sync_in(task.experiment.rounds) == "gradients" else 1
    saved = seconds / (STACKED_SPEEDUP if stacked else 1) * (1 - 1 / processes) - barriers * BARRIER_SECONDS
    return max(0.0, task.experiment.rounds * saved)


def work_of_a_round(task: RunTask, shared: SharedState) -> tuple[float, float]:
    """Estimate (number of training steps, number of training samples) of all workers in one round."""
    steps, samples = steps_of_workers(task, shared)
    per_worker = shared.cohort.size / len(steps)
    return per_worker * sum(steps), per_worker * sum(samples)


def steps_of_workers(task: RunTask, shared: SharedState) -> tuple[list[int], list[int]]:
    """Return the numbers of (training steps, training samples) of at most `WORKERS_SAMPLED` workers in a round."""
    shards = shared.data.shards
    workers = range(0, len(shards), -(-len(shards) // WORKERS_SAMPLED))
    sizes = [shards.size(worker) for worker in workers]
    schedules = [task.schedule.of(worker, 1) for worker in workers]
    steps = [schedule.steps_for(size) for schedule, size in zip(schedules, sizes, strict=True)]
    columns = zip(schedules, steps, sizes, strict=True)
    return steps, [schedule.samples_in(count, size) if size else 0 for schedule, count, size in columns]


def flops_of_a_sample(task: RunTask, shared: SharedState) -> float:
    """Estimate the floating-point operations of a forward and backward pass for one sample."""
    count = min(SAMPLES, len(shared.data.train))
    inputs, targets = shared.data.train.gather(torch.arange(count))
    with preserve_random_state(task.device), contextlib.suppress(Exception):  # training will report the error
        module = task.new_module().train()
        with FlopCount() as counter:
            task.learning_task.loss(outputs_of(module, on_each(Tensor.clone, inputs)), targets).backward()
        if counter.total:
            return counter.total / count
    return 6.0 * len(shared.server.row)


class FlopCount(OperationCheck):
    """Context manager that counts floating-point operations, like torch.utils.flop_counter.FlopCounterMode.

    Attributes:
        total: number of floating-point operations counted so far.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imported here because it takes a tenth of a second

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
    """Return the FLOPs of an LSTM layer on inputs [length, batch, i]. PyTorch's counter does not count them."""
    return 2 * inputs.shape[:2].numel() * (weight_ih.numel() + weight_hh.numel())


class AutoEngine(Engine):
    """Engine that chooses the fastest way to train: workers one by one or several at once, in one or several processes.

    The same experiment is always computed in the same way, in any number of processes. If the processes cannot start,
    the engine warns once and trains in one process.
    """

    traits = TRAITS["auto"]

    def __init__(self, processes: int, threads: int, timeout: float, start_method: str) -> None:
        super().__init__(processes, threads, timeout, start_method)
        self._processes = processes
        self._start_seconds = FORK_SECONDS if forks(start_method, threads) else SPAWN_SECONDS
        self._plans: dict[str, Plan] = {}
        self._plan = Plan(1, None, "")

    def trainers(self, task: RunTask, shared: SharedState) -> tuple[MakeTrainer, dict[str, Any]]:
        if self._plan.probe is None:
            return super().trainers(task, shared)
        return stacked(task, shared, self.processes, self._threads, self._plan.probe)

    def begin(self, task: RunTask, shared: SharedState) -> None:
        self.leave()
        key = _plan_key(task, shared)
        self._plan = plan = self._plans[key] = self._plans.get(key) or self.choose(task, shared)
        self._in_pool = plan.processes > 1
        try:
            super().begin(task, shared)
        except Exception as error:
            if not self._in_pool:
                raise
            self.leave()
            if self._pool:
                self._pool.close()
            release_memory(task.device)
            self._in_pool = False
            self._plan = self._plans[key] = Plan(1, plan.probe, first_line(error))
            super().begin(task, shared)
            warnings.warn(f"one process trains all workers: {self._plan.reason}", FedsimWarning, stacklevel=2)

    def choose(self, task: RunTask, shared: SharedState) -> Plan:
        """Return the plan for a task: the number of processes, and whether several workers are trained at once."""
        probe, unstacked = probe_if_stacks_pay(task, shared)
        rows = "workers are trained in stacks" if unstacked is None else f"workers are trained one by one: {unstacked}"
        if task.device.type != "cpu":
            return Plan(1, probe, f"{rows}; one process, because several would not run in parallel on {task.device}")
        if self._processes == 1:
            return Plan(1, probe, f"{rows}; one process, because the cores or the cohort do not allow more")
        workers, width = shared.cohort.size, stack_width(task, shared, probe, self._threads) if probe else 1
        parallel = min(self._processes, -(-workers // width))
        saved = seconds_saved(task, shared, parallel, stacked=unstacked is None)
        start = self._start_seconds
        reason = f"{self._processes} processes would save about {saved:.1f} s and take {start:g} s to start"
        return Plan(self._processes if saved > start else 1, probe, f"{rows}; {reason}")

    def metadata(self) -> dict[str, Any]:
        plan = self._plan
        name = "batched" if plan.stacked else "processes" if plan.processes > 1 else "serial"
        return {"engine": name, **super().metadata(), "reason": plan.reason}


def _plan_key(task: RunTask, shared: SharedState) -> str:
    """Return a string that is equal for tasks that get the same plan."""
    inputs, shards = leaves(shared.data.train.inputs), shared.data.shards
    work = len(shared.data.train) if shards.listed else work_of_a_round(task, shared)
    sizes = work, len(shards), len(shared.data.test), shared.cohort.size, len(shared.server.row)
    experiment = task.experiment
    how = (
        experiment.rounds,
        experiment.rounds_of_gradients,
        task.schedule,
        task.algorithm,
        task.streams,
        experiment.rule.accepts("root"),
    )
    where = task.precision, experiment.cuda_graphs, task.device, experiment.batched, experiment.data.transforms
    return repr(
        (
            experiment.model.component,
            experiment.model.lora,
            experiment.local.trainable,
            *how,
            *where,
            *sizes,
            *((tensor.shape[1:], tensor.dtype) for tensor in inputs),
        )
    )
