"""Local training of one worker: the gradient of a batch, and the step along it.

`RowTrainer.train` passes both to `fedsim.core.training.train_epoch`, the loop over the batches:

    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = backward(model, inputs, targets)  # `BatchGradients`
        optimizer.step()                         # `LocalOptimizer`

`local_modes.py` selects other classes for client algorithms that need other gradients or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from fedsim.clients import State
from fedsim.core.model_inputs import Inputs
from fedsim.core.rows import clip_rows
from fedsim.core.training import Loss, Objective
from fedsim.training.batches import WorkItem
from fedsim.training.forward_functions import RoundDropout
from fedsim.training.row_module import RowModule
from fedsim.training.task import RunTask


@dataclass
class LocalModel:
    """Model of one worker in local training.

    Attributes:
        member: the worker and the batches to train on, as a `WorkItem`.
        batches: number of batches to train on.
        module: module whose parameters are views of `row` and whose gradients are views of `gradient`.
        row: parameters of the model, [d].
        gradient: gradient of the loss, [d].
        buffers: buffers that the worker has received, [b].
        state: state of the client algorithm.
        dropout: dropout masks of the worker in the round.
    """

    member: WorkItem
    batches: int
    module: RowModule
    row: Tensor
    gradient: Tensor
    buffers: Tensor
    state: State
    dropout: RoundDropout

    def current_buffers(self) -> Tensor:
        """Return a copy of the module's buffers, [b]."""
        return self.module.layout.read_buffers(self.module.module, out=torch.empty_like(self.buffers))


class BatchGradients:
    """Gradients of the training loss on one worker's batches: the function `backward` that `train_epoch` receives.

    Attributes:
        number: number of the current batch in the worker's round, from 0.
        inputs, targets: the current batch.
    """

    inputs: Inputs
    targets: Tensor

    def __init__(self, objective: Objective, local: LocalModel) -> None:
        self.objective, self.local, self.number = objective, local, (local.member.step or 0) - 1

    def __call__(self, model: nn.Module, inputs: Inputs, targets: Tensor, loss: Loss | None = None) -> Tensor:
        """Make (inputs, targets) the current batch, and call `backward`. `loss` is not used."""
        self.number, self.inputs, self.targets = self.number + 1, inputs, targets
        return self.backward(model)

    def backward(self, model: nn.Module) -> Tensor:
        """Add the gradient of the current batch to the parameters' `.grad`, and return the detached mean loss."""
        loss = self.loss(model)
        loss.backward()
        return loss.detach()

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean loss of the current batch."""
        with self.local.dropout.at(self.number, len(self.targets)):
            return self.objective(model, self.inputs, self.targets)


class LocalOptimizer:
    """Optimizer of one worker's model in one round, which takes the steps of the client algorithm.

    Attributes:
        clip_norm: maximum norm of a gradient, or None.
        algorithms: iterator that yields, for each step, the client algorithm with the learning rate of this step.
    """

    def __init__(self, task: RunTask, local: LocalModel) -> None:
        self.local, round = local, local.member.round
        settings = task.step_settings(local.member.worker, round)
        self.clip_norm = task.clip_norm(settings)
        self.algorithms = (task.algorithm_at(round, step, settings=settings) for step in count())

    def zero_grad(self) -> None:
        self.local.gradient.zero_()

    def step(self) -> None:
        clip_rows(self.local.gradient, self.clip_norm)
        next(self.algorithms).step(self.local.row, self.local.gradient, self.local.state)
