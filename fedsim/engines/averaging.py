"""How the cohort's rows move the global row: the weights, the rule, the server's step, and what becomes of buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.aggregation.rules import mean
from fedsim.devices import wide_dtype
from fedsim.engines.crew import Seat
from fedsim.engines.job import Memory, Task


class Averaging:
    """One process's share of an aggregation."""

    def __init__(self, seat: Seat, task: Task, memory: Memory) -> None:
        self._seat, self._task, self._memory = seat, task, memory
        self._blocks = list(column_blocks(len(memory.global_row), seat.index, seat.count))
        if not task.rule.columnwise:  # a rule that looks at whole rows is one process's work
            self._blocks = [slice(0, len(memory.global_row))] if seat.index == 0 else []

    def weights(self, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
        """The weights [n] that the rule is given for these workers, or None for equal ones.

        `samples` are what each of them went through, for weights by samples.
        """
        task = self._task
        if not task.rule.takes_weights or (task.weights == "uniform" and not task.rule.needs_weights):
            return None
        if task.weights == "samples":
            values: Sequence[float] = samples
        else:
            values = [1.0 if task.weights == "uniform" else task.weights[worker] for worker in workers]
        return torch.tensor(values, dtype=wide_dtype(task.device), device=task.device)

    def move_global_row(self, slots: Sequence[int], weights: Tensor | None) -> None:
        """Aggregate this process's columns of the rows in `slots`, and move the global row there.

        With sync = "parameters" this turns the rows into updates, in place.
        """
        task, memory = self._task, self._memory
        for block in self._blocks:
            rows = memory.rows[:, block] if len(slots) == len(memory.rows) else memory.rows[list(slots), block]
            global_part = memory.global_row[block]
            if task.sync == "parameters":
                rows -= global_part
            state = {name: tensor[block] for name, tensor in memory.state.items()}
            task.stepper.step(global_part, task.rule(rows, weights), state)

    def combine_buffers(self, cohort: Sequence[int], weights: Tensor | None) -> None:
        """What becomes of the cohort's buffers, by policy; their mean is weighted as the rows are. For one process."""
        memory, policy = self._memory, self._task.buffers
        if not memory.global_buffers.numel() or policy == "server":
            return
        if policy == "local":
            memory.own_buffers[list(cohort)] = memory.buffers
        memory.global_buffers.copy_(mean(memory.buffers, weights))
