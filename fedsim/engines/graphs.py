"""`cuda_graphs`: one local step of a stack of rows, captured as a CUDA graph and replayed for every step.

A replay launches all kernels of a step at once, which matters where kernels are shorter than launching them takes.
It works on the same memory each time, so what a step reads and writes lies in tensors that stay (`ReplayedStack`).
Members that have finished have samples of weight 0 from then on, and are kept from moving by a mask.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedsim.engines.job import Memory, Task
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.scaling import LossScale
from fedsim.engines.stack import Lot, Stack
from fedsim.engines.stack_step import Batch, StackState, StackStep, gather
from fedsim.engines.stacked_module import StackedModule
from fedsim.errors import ExperimentError, FedsimWarning, one_line
from fedsim.rows import new_rows

WARM_UPS = 3  # steps before a capture, in which libraries make room for themselves

Step = Callable[[], None]


def unsafe(task: Task, rehearsal: Rehearsal) -> str | None:
    """Why the steps of a task must not be replayed, or None where they may be."""
    if not can_capture(task.device):
        return f"they need a CUDA device, not {task.device.type}"
    if "parameters" not in task.syncs:
        return "where gradients are aggregated every step is a synchronisation"
    if rehearsal.dropouts:
        return "the model has dropout, which is drawn for each worker by itself"
    if rehearsal.coupled:
        return "the samples of a batch see each other (BatchNorm), so short batches are trained apart"
    poisoned = any(task.attack.poison is not None for _ in task.byzantine)
    if task.augment or task.transforms is not None or poisoned:
        return "batches are altered (data.augment, the partition or the attack), for each worker by itself"
    return None


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def capture(step: Step, device: torch.device) -> Step:
    """A step that has become a CUDA graph: calling it does on the same memory what `step` did there."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return graph.replay


class ReplayedStack:
    """k rows with all that a step of theirs works on, and that step, captured: with everybody active, or with a mask.

    Raises ExperimentError where the solver does not keep its state where it was.
    """

    def __init__(self, k: int, task: Task, memory: Memory, module: StackedModule) -> None:
        self._task, self._memory, self._module = task, memory, module
        device, batch = task.device, task.schedule.batch_size
        self._rows = new_rows(k, module.layout.d, task.dtype, device)
        self._rows.copy_(memory.global_row)
        buffers = module.unpack_buffers(memory.global_buffers.expand(k, -1))
        scale = LossScale((k,), device) if task.precision.scales_losses else None
        self._state = StackState(module, self._rows, task.solver.start(self._rows), buffers, scale)
        self._positions = torch.zeros(k, batch, dtype=torch.int64, device=device)
        self._weights = torch.zeros(k, batch, dtype=task.dtype, device=device)
        self._counts = torch.zeros(k, dtype=memory.buffers.dtype, device=device)
        self._active = torch.ones(k, dtype=torch.bool, device=device)
        self._loss_sums = torch.zeros_like(self._counts)
        self._step_of_stack = StackStep(task, module)
        kept = set(self._state.solver_state)
        self._whole, self._masked = (capture(partial(self._step, masked=masked), device) for masked in (False, True))
        if set(self._state.solver_state) != kept:
            raise ExperimentError("local.solver makes state that its `start` does not, as it steps")

    def train(self, stack: Stack, beat: Callable[[], None]) -> Tensor:
        """One round of a stack; its buffers afterwards, as rows. Its parameters go back to where they came from."""
        self._start(stack)
        for lot in stack.lots():
            beat()
            self._load(lot)
            (self._whole if len(lot.members) == len(stack) else self._masked)()
            stack.count(lot)
        stack.add_losses(self._loss_sums)
        self._memory.rows[stack.index] = self._rows
        return self._module.pack_buffers(self._state.buffers, torch.empty_like(self._memory.buffers[: len(stack)]))

    def _start(self, stack: Stack) -> None:
        memory, module, state = self._memory, self._module, self._state
        self._rows.copy_(memory.rows[stack.index])
        for name, fresh in self._task.solver.start(self._rows).items():
            state.solver_state[name].copy_(fresh)
        for buffer, fresh in zip(state.buffers, module.unpack_buffers(memory.buffers[stack.index]), strict=True):
            buffer.copy_(fresh)
        if state.scale is not None:
            state.scale.start_again()
        self._loss_sums.zero_()
        self._active.fill_(True)

    def _load(self, lot: Lot) -> None:
        """A lot's batches into the tensors that the step reads; whoever is not among them has finished."""
        active = len(lot.members)
        self._positions[:active] = lot.positions
        for tensor, values in ((self._weights, lot.weights), (self._counts, lot.counts)):
            tensor[:active] = values
            tensor[active:] = 0
        self._active[active:] = False

    def _step(self, masked: bool) -> None:
        batch = Batch(*gather(self._memory.train, self._positions), self._weights)
        active = self._active if masked else None
        seen = self._step_of_stack(self._state, batch, active) * self._counts
        self._loss_sums += torch.where(self._active, seen, 0) if masked else seen


class Replays:
    """The replayed stacks of a task, one for each number of rows, made when it is first met.

    Args:
        refusal: why none may be made, if that is so.
        tells: whether a failure is said in a warning.
    """

    def __init__(self, task: Task, memory: Memory, module: StackedModule, refusal: str | None, *, tells: bool) -> None:
        self._of_task, self._tells, self.refusal = (task, memory, module), tells, refusal
        self._stacks: dict[int, ReplayedStack] = {}

    def of(self, k: int) -> ReplayedStack | None:
        """For stacks of k rows; None where steps are not replayed."""
        if self.refusal is None and k not in self._stacks:
            try:
                self._stacks[k] = ReplayedStack(k, *self._of_task)
            except Exception as error:
                self._refuse(str(error) if isinstance(error, ExperimentError) else one_line(error))
        return None if self.refusal is not None else self._stacks[k]

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if self._tells:
            line = f"cuda_graphs: steps are not captured, with the same results: {reason}"
            warnings.warn(line, FedsimWarning, stacklevel=3)
