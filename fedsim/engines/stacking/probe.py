"""Properties of a model that stacking depends on, found by runs on a few samples."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsim.clients import OuterProductGrad
from fedsim.clients.train_function import TrainFunction
from fedsim.core.learning_task import LearningTask
from fedsim.core.randomness import global_states, preserve_random_state
from fedsim.core.rows import Layout, new_rows
from fedsim.core.training import Objective
from fedsim.engines.stacking.operations import OTHER_DROPOUTS, DataDependenceCheck, not_stackable
from fedsim.engines.stacking.stacked_module import StackedModule
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.dropout import Dropout, Recording
from fedsim.engines.trainers.row_module import differ
from fedsim.engines.trainers.stack_step import StackState, move
from fedsim.errors import ExperimentError, one_line, show
from fedsim.system.precision import FULL, Precision, full_precision

SAMPLES = 4
WHOLE = 64  # the most samples of a batch on which the first samples' outputs are compared
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # between gradients, relative to the largest


@dataclass(frozen=True)
class StackingProbe:
    """Properties of a model in training, found on a few samples.

    Attributes:
        dropouts: its calls of dropout, in their order.
        coupled: whether a sample's output depends on the other samples of the batch, as with BatchNorm.
        merged: whether the batches of several rows can be run as one, [rows * batch, ...]; else `torch.func.vmap` does.
        sample_bytes: memory of one sample's activations, from the forward pass to the backward pass.
    """

    dropouts: tuple[Dropout, ...]
    coupled: bool
    merged: bool
    sample_bytes: int

    @classmethod
    def of(cls, task: TaskSpec, shared: SharedState) -> StackingProbe:
        """Try the model of a task. Raises ExperimentError, with the reason, where its rows cannot be stacked."""
        if isinstance(task.solver, TrainFunction):
            name = show(task.solver.name)
            raise ExperimentError(
                f'engine = "batched": the function {name} trains one worker at a time; use engine=spawn'
            )
        _require_finite(shared)
        count = min(SAMPLES, len(shared.train))
        inputs, targets = shared.train.gather(torch.arange(count))
        with preserve_random_state(task.device), full_precision(task.device):
            together = _try(task, inputs, targets)
            coupled = _is_coupled(task, shared, together, inputs, targets)
            apart = not coupled and not _is_placed(task, together, inputs, targets)
            merged = apart and _can_be_merged(task, shared, together.dropouts, count)
            if not merged:
                _compare_gradients(task, shared, together.dropouts, count)
            if "parameters" in task.syncs:
                _compare_steps(task)
            if task.precision.autocast is not None:
                together = _try(task, inputs, targets, task.precision)
                _stack(task, shared, count, together.dropouts, task.precision, merged=merged)
        return cls(together.dropouts, coupled, merged, together.sample_bytes)


def _require_finite(shared: SharedState) -> None:
    """Refuse samples with NaN or infinity, on which no results can be compared."""
    inputs, _ = shared.train.gather(torch.arange(min(WHOLE, len(shared.train))))
    bad = int((~inputs.reshape(len(inputs), -1).isfinite().all(1)).sum())
    if bad:
        raise ExperimentError(
            f'engine = "batched": {bad} of the first {len(inputs)} training samples, on which the model is tried, hold '
            "NaN or infinity; use engine=spawn"
        )


class ProbeResult(NamedTuple):
    """The outputs of a forward pass without dropout, the buffers after it, its calls of dropout, and `sample_bytes`."""

    outputs: Tensor
    buffers: Tensor
    dropouts: tuple[Dropout, ...]
    sample_bytes: int


def _try(task: TaskSpec, inputs: Tensor, targets: Tensor, precision: Precision = FULL) -> ProbeResult:
    module = task.new_module().train()
    try:
        start = copy.deepcopy(module)
    except Exception as error:
        raise not_stackable(f"a module of it cannot be copied: {one_line(error)}") from error
    generators = global_states(task.device)
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def weigh(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with Recording() as recording, torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        with precision.forward(task.device):
            outputs = module(inputs.clone())  # which it may write to
        Objective(precision, task.learning_task).loss(outputs, targets)
    if differ(start, module):
        raise not_stackable("its training changes attributes or unsaved buffers, which no row holds")
    if global_states(task.device) != generators:
        raise not_stackable("it draws random numbers outside of torch.nn.functional.dropout")
    if any(samples != len(inputs) for samples in recording.samples):
        raise not_stackable("it has dropout of a tensor whose first dimension is not the batch")
    buffers = Layout.of(module).read_buffers(module)
    return ProbeResult(outputs.detach(), buffers, tuple(recording.dropouts), sum(kept.values()) // len(inputs))


def _is_coupled(task: TaskSpec, shared: SharedState, together: ProbeResult, inputs: Tensor, targets: Tensor) -> bool:
    """Whether the first samples' outputs, or the buffers, depend on the other samples of a batch, or on their number.

    Compares batches that begin with the same samples and end with different ones.
    """
    others = _different(inputs[:1]).expand_as(inputs)[1:]
    try:
        alone = _try(task, inputs[:1], targets[:1])
    except ExperimentError:
        raise
    except Exception:  # BatchNorm wants more than one
        return True
    if alone.dropouts != together.dropouts:
        raise not_stackable(OTHER_DROPOUTS)
    trials = [
        (1, alone),
        (1, _try(task, torch.cat([inputs[:1], others]), targets)),
    ]  # each with the number of samples that it has in common with `together`
    if len(inputs) > 2:
        trials.append((len(inputs) - 1, _try(task, inputs[:-1], targets[:-1])))
    whole = min(task.schedule.batch_size, WHOLE, len(shared.train))
    if whole > len(inputs):  # a model may treat a large batch otherwise than a small one
        trials.append((len(inputs), _try(task, *shared.train.gather(torch.arange(whole)))))
    return not all(
        _agree(trial.outputs[:n_shared], together.outputs[:n_shared], task.dtype)
        and _agree(trial.buffers, together.buffers, task.dtype)
        for n_shared, trial in trials
    )


def _is_placed(task: TaskSpec, together: ProbeResult, inputs: Tensor, targets: Tensor) -> bool:
    """Whether a sample's output depends on its position in the batch, which merging changes."""
    rolled = _try(task, inputs.roll(1, 0), targets.roll(1, 0))
    return not _agree(rolled.outputs, together.outputs.roll(1, 0), task.dtype)


def _can_be_merged(task: TaskSpec, shared: SharedState, dropouts: tuple[Dropout, ...], count: int) -> bool:
    try:
        _compare_gradients(task, shared, dropouts, count, merged=True)
    except Exception:  # the model may fail in any way on a merged batch
        return False
    return True


def _compare_gradients(
    task: TaskSpec, shared: SharedState, dropouts: tuple[Dropout, ...], count: int, *, merged: bool = False
) -> None:
    """Compare gradients and buffers of two different rows in a stack with those of each row alone."""
    module = task.new_module()
    layout = Layout.of(module)
    stacked = _stack(task, shared, count, dropouts, merged=merged)
    for k in range(2):
        layout.write(stacked.rows[k], module)
        layout.write_buffers(stacked.buffers[k], module)
        expected = _plain_gradients(task.learning_task, module.train(), stacked.inputs[k], stacked.targets[k])
        for entry, gradient, reference in zip(layout.parameters, stacked.gradients, expected, strict=True):
            if not _agree(gradient[k], reference, task.dtype):
                raise not_stackable(f"the gradient of {entry.name} changes when rows are stacked")
        read = layout.read_buffers(module, out=stacked.buffers[k])
        for entry in layout.buffers:
            if not _agree(stacked.buffers_after[k, entry.span], read[entry.span], task.dtype):
                raise not_stackable(f"the buffer {entry.name} changes when rows are stacked")


class Stacked(NamedTuple):
    """The inputs and results of a step of two stacked rows, [2, ...] each."""

    rows: Tensor
    buffers: Tensor
    inputs: Tensor
    targets: Tensor
    gradients: list[Tensor]
    buffers_after: Tensor


def _stack(
    task: TaskSpec,
    shared: SharedState,
    count: int,
    dropouts: tuple[Dropout, ...],
    precision: Precision = FULL,
    *,
    merged: bool,
) -> Stacked:
    """A step of two different rows, on `count` samples each, different ones if the data set has as many."""
    module = task.new_module()
    layout = Layout.of(module)
    rows = new_rows(2, layout.d, task.dtype, task.device)
    rows.copy_(layout.read(module))
    rows[1].mul_(1.125).add_(0.01)
    buffers = torch.zeros(2, layout.n_buffer_values, dtype=torch.double, device=task.device)
    buffers.copy_(layout.read_buffers(module))
    own = dict(module.named_buffers())
    for entry in layout.buffers:
        if own[entry.name].is_floating_point():
            buffers[1, entry.span].mul_(1.125).add_(0.01)
    gathered = shared.train.gather(torch.arange(2 * count) % len(shared.train))  # as batches are for training
    inputs, targets = (tensor.unflatten(0, (2, count)) for tensor in gathered)
    weights = torch.full((2, count), 1 / count, dtype=task.dtype, device=task.device)
    stacked = StackedModule(task.new_module, Objective(precision, task.learning_task), merged=merged)
    buffers_after = buffers.clone()
    try:
        kept = [weights.new_ones(2, count, *dropout.shape) for dropout in dropouts]
        unpacked = stacked.unpack_buffers(buffers)
        given = stacked.views(rows), unpacked, inputs.clone(), targets, weights, kept
        with DataDependenceCheck() if merged else contextlib.nullcontext():
            _, found = stacked.gradients(*given, leave_products=0)  # as in training
        gradients = [part.computed() if isinstance(part, OuterProductGrad) else part for part in found]
        stacked.pack_buffers(unpacked, buffers_after)
    except (ExperimentError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise not_stackable(f"torch.func.vmap cannot run it: {one_line(error).split('. ')[0]}") from error
    return Stacked(rows, buffers, inputs, targets, gradients, buffers_after)


def _compare_steps(task: TaskSpec) -> None:
    """Compare two steps of the local solver on each parameter of two rows with the same steps on whole rows."""
    solver, module = task.solver, StackedModule(task.new_module)
    if not solver.element_wise:  # its steps get whole rows
        return
    d = module.layout.d
    gradients = torch.linspace(-1, 1, 2 * d, dtype=task.dtype, device=task.device).view(2, d)
    whole, rows = gradients.cos(), gradients.cos()
    try:
        whole_state, state = solver.start(whole), StackState(module, rows, solver.start(rows), [])
        for _ in range(2):
            solver.step(whole, gradients.clone(), whole_state)
            parts = [_as_product(gradient) for gradient in module.views(gradients.clone())]
            move(solver, state, list(zip(module.layout.parameters, parts, strict=True)))
    except Exception as error:
        raise not_stackable(f"local.solver cannot step them: {one_line(error)}") from error
    if not _agree(rows, whole, task.dtype):
        raise not_stackable(
            "local.solver is not element-wise: a step moves a part of a row otherwise than the whole row"
        )


def _as_product(gradient: Tensor) -> Tensor | OuterProductGrad:
    """The gradient of a weight matrix as a product; other gradients unchanged."""
    if gradient.ndim != 3:
        return gradient
    return OuterProductGrad(
        torch.eye(gradient.shape[1], dtype=gradient.dtype, device=gradient.device).expand(2, -1, -1), gradient
    )


def _agree(found: Tensor, reference: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors agree to a tolerance relative to the largest value."""
    if not reference.numel():
        return True
    return bool((found - reference).abs().max() <= TOLERANCE[dtype] * max(1.0, float(reference.abs().max())))


def _plain_gradients(task: LearningTask, module: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.zero_grad()
    with Recording():
        loss = task.loss(module(inputs.clone()), targets)
    loss.backward()  # as in training; some ways to get at gradients give less, without a word (reentrant checkpoints)
    return tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)


def _different(inputs: Tensor) -> Tensor:
    return inputs * 2 + 1 if inputs.is_floating_point() else inputs
