"""What has to be known of a model before its rows are stacked, found out on a few samples."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.engines.job import Memory, Task
from fedsim.engines.module import RowModule
from fedsim.engines.stacked_module import StackedModule
from fedsim.engines.stacked_operations import Dropout, Recording
from fedsim.errors import ExperimentError, one_line
from fedsim.randomness import random_state_kept
from fedsim.rows import Layout, new_rows

SAMPLES = 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # between gradients, relative to the largest


@dataclass(frozen=True)
class Rehearsal:
    """What a few samples have shown of a model in training.

    Attributes:
        dropouts: its calls of dropout, in their order.
        coupled: whether the samples of a batch see each other, as in BatchNorm.
        sample_bytes: what one sample's forward pass leaves for the backward pass.
    """

    dropouts: tuple[Dropout, ...]
    coupled: bool
    sample_bytes: int

    @classmethod
    def of(cls, task: Task, memory: Memory) -> Rehearsal:
        """Try the model of a task. Raises ExperimentError, with the reason, where its rows cannot be stacked."""
        count = min(SAMPLES, len(memory.train))
        inputs, targets = memory.train.gather(torch.arange(count))
        with random_state_kept(task.device):
            trained, outputs, dropouts, sample_bytes = _train_once(task, inputs, targets, seed=0)
            if trained.changed():
                raise _refusal("its training changes attributes or unsaved buffers, which no row holds")
            if not torch.equal(outputs, _train_once(task, inputs, targets, seed=1)[1]):
                raise _refusal("it draws random numbers by other means than torch.nn.functional.dropout")
            others = torch.cat([inputs[:1], _different(inputs[:1]).expand(count, *inputs.shape[1:])[1:]])
            elsewhere = _train_once(task, others, targets, seed=0)[1]
            coupled = not torch.allclose(outputs[0], elsewhere[0], rtol=TOLERANCE[task.dtype], atol=1e-6)
            _compare_gradients(task, inputs, targets, dropouts)
        return cls(dropouts, coupled, sample_bytes)


def _train_once(
    task: Task, inputs: Tensor, targets: Tensor, seed: int
) -> tuple[RowModule, Tensor, tuple[Dropout, ...], int]:
    """A new module's outputs in training, without dropout; what that has left of it; its dropouts; bytes per sample."""
    made = RowModule(task.new_module)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    kept: dict[int, int] = {}

    def weigh(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    parameters = sum(parameter.nbytes for parameter in made.module.parameters())
    with Recording() as recording, torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        outputs = made.module.train()(inputs)
        F.cross_entropy(outputs, targets)
    activations = max(0, sum(kept.values()) - parameters)
    return made, outputs.detach(), tuple(recording.dropouts), activations // len(inputs)


def _compare_gradients(task: Task, inputs: Tensor, targets: Tensor, dropouts: tuple[Dropout, ...]) -> None:
    """Two rows at once, which differ, against one after the other."""
    module, count = task.new_module(), len(inputs)
    layout = Layout.of(module)
    rows = new_rows(2, layout.d, task.dtype, task.device)
    rows.copy_(layout.read(module))
    rows[1].mul_(1.125).add_(0.01)
    buffers = torch.zeros(2, layout.n_buffer_values, dtype=torch.double, device=task.device)
    buffers.copy_(layout.read_buffers(module))
    batches = torch.stack([inputs, inputs.flip(0)]), torch.stack([targets, targets.flip(0)])
    weights = torch.full((2, count), 1 / count, dtype=task.dtype, device=task.device)
    stacked = StackedModule(task.new_module)
    try:
        kept = [weights.new_ones(2, count, *dropout.shape) for dropout in dropouts]
        _, found = stacked.gradients(stacked.views(rows), stacked.unpack_buffers(buffers), *batches, weights, kept)
    except Exception as error:
        raise _refusal(f"torch.func.vmap cannot run it: {one_line(error)}") from error
    for k in range(2):
        layout.write(rows[k], module)
        layout.write_buffers(buffers[k], module)
        expected = _plain_gradients(module.train(), batches[0][k], batches[1][k])
        for entry, gradient, reference in zip(layout.parameters, found, expected, strict=True):
            off = (gradient[k] - reference).abs().max() if reference.numel() else torch.zeros(())
            if not off <= TOLERANCE[task.dtype] * max(1.0, float(reference.abs().max())):
                raise _refusal(f"the gradient of {entry.name} comes out otherwise when rows are stacked")


def _plain_gradients(module: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with Recording():
        loss = F.cross_entropy(module(inputs), targets)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def _different(inputs: Tensor) -> Tensor:
    return inputs * 2 + 1 if inputs.is_floating_point() else inputs


def _refusal(reason: str) -> ExperimentError:
    return ExperimentError(f'engine = "batched": the rows of this model cannot be stacked: {reason}; use engine=spawn')
