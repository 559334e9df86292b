"""How the engine `auto` computes a task: a pure function of the task and the machine, never of timing or load.

The constants are nominal: measured once (`benchmarks/plans.py`), then fixed. A slow or busy machine gets the same
plan as an idle one with as many cores, so the same command gives the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedsim.core.randomness import preserve_random_state
from fedsim.engines.operation_check import FlopCount
from fedsim.engines.task import Schedule, SharedState, TaskSpec

START_SECONDS = 3.0  # that processes take to start; they must save more
STEP_SECONDS = 3e-4  # fixed cost of a training step of one row: Python and the launch of operations
FLOPS_PER_SECOND = 6e10  # of one core in float32
BYTES_PER_SECOND = 2e10  # of one core, through its caches and memory
BARRIER_SECONDS = 5e-4  # that a synchronisation between processes takes
STACKED_SPEEDUP = 1.8  # of one process, about, where stacks are chosen

LARGEST_BATCH = 100  # samples; stacks of larger batches were never faster than single rows
SMALLEST_STACK = 4  # rows; fewer do not share enough of the fixed cost
ACTIVATION_BYTES = 7.5e5  # of one row's batch in float32: with more, a stack leaves the caches
PARAMETER_SHARE = 0.35  # of a row's bytes are allowed on top, since a stack writes no gradients of weights to memory

SAMPLES = 4  # on which floating-point operations are counted
WORKERS_SAMPLED = 500  # at most, whose numbers of steps stand for all


@dataclass(frozen=True)
class ExecutionPlan:
    """How a task is computed.

    Attributes:
        processes: 1 means this process.
        stacked: whether rows are trained as stacks.
        reason: one line.
    """

    processes: int
    stacked: bool
    reason: str


@dataclass(frozen=True)
class Workload:
    """What a run has to compute.

    Attributes:
        rounds: of the run.
        cohort: rows trained in a round.
        row_steps, samples: training steps of a round, and samples in these, of all rows together.
        barriers: synchronisations of a round.
        parameters: of the model.
        itemsize: bytes of a value of a row.
        flops: floating-point operations of a sample's training step.
        test_samples: tested after each round.
    """

    rounds: int
    cohort: int
    row_steps: float
    samples: float
    barriers: float
    parameters: int
    itemsize: int
    flops: float
    test_samples: int

    @classmethod
    def of(cls, task: TaskSpec, shared: SharedState) -> Workload:
        """Count the work of a run, with one training step on a few samples."""
        d = len(shared.global_row)
        row_steps, samples = work_of_a_round(task.schedule, shared)
        return cls(
            rounds=task.rounds,
            cohort=len(shared.rows),
            row_steps=row_steps,
            samples=samples,
            barriers=row_steps / len(shared.rows) if task.sync_in(task.rounds) == "gradients" else 1,
            parameters=d,
            itemsize=task.dtype.itemsize,
            flops=_flops_of_a_sample(task, shared, default=6.0 * d),
            test_samples=len(shared.test),
        )

    @property
    def seconds_of_a_round(self) -> float:
        """The estimated seconds of one core for the training and the test of a round."""
        moved = 6 * self.parameters * self.itemsize  # bytes of a step: the row, its gradient and the new row
        samples = self.samples + self.test_samples / 3  # a forward pass is a third of a training step
        arithmetic = samples * self.flops * (self.itemsize / 4) / FLOPS_PER_SECOND
        return self.row_steps * (STEP_SECONDS + moved / BYTES_PER_SECOND) + arithmetic


def execution_plan(
    device: torch.device, most: int, workload: Callable[[], Workload], unstacked: str | None = None
) -> ExecutionPlan:
    """The plan for a task.

    One process is enough for an accelerator: it can stack all rows and replay their steps as CUDA graphs, while several
    processes take turns on the device and each need memory for a context of its own.

    Args:
        device: to compute on.
        most: processes at most.
        workload: gives the task's workload, if several processes may pay.
        unstacked: why rows are trained one by one; None if they are stacked.
    """
    rows = "rows are stacked" if unstacked is None else f"rows are trained one by one: {unstacked}"
    if device.type != "cpu":
        processes, reason = 1, f"one process, since several would take turns on {device}"
    elif most == 1:
        processes, reason = 1, "one process is all that the cores and the cohort allow"
    else:
        processes, reason = plan_processes(workload(), most, stacked=unstacked is None)
    return ExecutionPlan(processes, unstacked is None, f"{rows}; {reason}")


def simpler(plan: ExecutionPlan, reason: str) -> ExecutionPlan | None:
    """The plan to try after this one has failed: one process, then rows one by one; None after both.

    `reason` says why this one has failed.
    """
    if plan.processes > 1:
        return ExecutionPlan(1, plan.stacked, reason)
    return ExecutionPlan(1, False, reason) if plan.stacked else None


def plan_processes(work: Workload, most: int, *, stacked: bool) -> tuple[int, str]:
    """One process or `most`, and why: several only if they save more than their start takes."""
    seconds = work.seconds_of_a_round / (STACKED_SPEEDUP if stacked else 1)
    saved = work.rounds * (seconds * (1 - 1 / most) - work.barriers * BARRIER_SECONDS)
    estimate = f"{most} processes would save about {max(0.0, saved):.1f} s and take {START_SECONDS:g} s to start"
    return (most if saved > START_SECONDS else 1), estimate


def stacks_may_pay(task: TaskSpec, shared: SharedState, processes: int) -> str | None:
    """Why stacks cannot pay, as far as known without a trial; None if they may."""
    rows = -(-len(shared.rows) // processes)
    if task.device.type != "cpu":
        return None if len(shared.rows) > 1 else "there is one row"
    if task.schedule.batch_size > LARGEST_BATCH:
        return f"batches of {task.schedule.batch_size} samples are large (more than {LARGEST_BATCH})"
    if rows < SMALLEST_STACK:
        return f"a process has {rows} rows at a time (fewer than {SMALLEST_STACK})"
    if task.width is not None and task.width < SMALLEST_STACK:
        return f"batched.width = {task.width} (less than {SMALLEST_STACK})"
    return None


def stacks_pay(task: TaskSpec, shared: SharedState, sample_bytes: int) -> bool:
    """Whether stacks of a model with these activations of a sample are faster than single rows.

    A stack shares the fixed cost of a step among its rows, and on a CPU writes no gradient of weights to memory where
    rows are averaged; but it takes the activations of all its rows at once through the caches.
    """
    if task.device.type != "cpu":
        return True
    activations = task.schedule.batch_size * sample_bytes
    spared = PARAMETER_SHARE * len(shared.global_row) * task.dtype.itemsize if "parameters" in task.syncs else 0
    return activations <= ACTIVATION_BYTES + spared


def work_of_a_round(schedule: Schedule, shared: SharedState) -> tuple[float, float]:
    """Training steps of a cohort together, and the samples in them, on average over some of the workers."""
    shards = shared.shards
    workers = range(0, len(shards), -(-len(shards) // WORKERS_SAMPLED))
    works = [(schedule.of(worker, 1), shards.size(worker)) for worker in workers]
    steps, samples = (sum(one.steps_for(n) for one, n in works), sum(one.samples_for(n) for one, n in works if n))
    per_worker = len(shared.rows) / len(works)
    return per_worker * steps, per_worker * samples


def _flops_of_a_sample(task: TaskSpec, shared: SharedState, default: float) -> float:
    """FLOPs of a forward and a backward pass; `default` for a model that does not run on a few samples."""
    count = min(SAMPLES, len(shared.train))
    inputs, targets = shared.train.gather(torch.arange(count))
    with preserve_random_state(task.device), contextlib.suppress(Exception):  # training will report what is wrong
        module = task.new_module().train()
        with FlopCount() as counter:
            task.learning_task.loss(module(inputs.clone()), targets).backward()
        return counter.total / count or default
    return default
