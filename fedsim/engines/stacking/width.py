"""How many rows a stack has."""

from __future__ import annotations

import math

from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.cuda_graphs import unsafe
from fedsim.system.devices import total_memory_of

MEMORY_SHARE = 0.5  # of the device's total memory, for stacks; results must not depend on its free memory
WIDEST_ON_CPU = 32  # more rows share no more of a step's fixed cost
NARROWEST_ON_CPU = 4  # fewer rows share too little of it, however large they are
STACK_BYTES_ON_CPU = 2**23  # of a stack's parameters, for each thread: more of them leave the caches


def stack_width(task: TaskSpec, shared: SharedState, probe: StackingProbe, processes: int, threads: int) -> int:
    """How many rows a process should stack: its share of the cohort, if that fits into memory (and, on a CPU, caches).

    On any device there are two copies of a row and of its solver state: the row's own and that in the stack. A step
    allocates a gradient and activations. On a GPU it also allocates the joined gradients, and copies of the row and its
    solver state for rows that a mask does not move. If steps are captured, the memory of a step exists twice: for the
    graphs, and for the steps before a capture.
    """
    row, kept = shared.rows.shape[1] * task.dtype.itemsize, len(task.solver.start(shared.global_row[:1]))
    on_cpu = task.device.type == "cpu"
    captured = task.cuda_graphs is not False and unsafe(task, probe) is None
    gradients = 1 + (task.clip_norm is not None) + 2 * (task.schedule.accumulate > 1)  # and joined, and their sums
    made = (gradients if on_cpu else 3 + kept) * row + 2 * task.schedule.batch_size * probe.sample_bytes
    row_bytes = (2 + 2 * kept) * row + (2 if captured else 1) * made
    most = math.inf
    if on_cpu:
        most = min(WIDEST_ON_CPU, max(NARROWEST_ON_CPU, threads * (STACK_BYTES_ON_CPU // row)))
    share = -(-len(shared.rows) // processes)
    return max(1, int(min(share, most, MEMORY_SHARE * total_memory_of(task.device) / processes / row_bytes)))
