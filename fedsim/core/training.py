"""The training step and the test, for every engine and for any PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedsim.core.learning_task import CLASSIFICATION, Correct, Counts, LearningTask, Reduction, counts_of
from fedsim.system.devices import wide_dtype
from fedsim.system.precision import FULL, Precision

Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[nn.Module, Tensor, Tensor, Loss], Tensor]

DEFAULT_LOSS: Loss = CLASSIFICATION.loss


class Optimizer(Protocol):
    """The methods that a training step calls: any `torch.optim.Optimizer`, or `fedsim.clients.RowOptimizer`."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class MetricSums(NamedTuple):
    """Sums over batches: the loss, the correct answers (counted by `test` only), and the number of samples or answers.

    The sums are 0-dimensional tensors on the device of the model, so that the host never waits for the device.
    """

    loss_sum: Tensor
    correct: Tensor
    samples: int | Tensor

    @classmethod
    def zero(cls, device: torch.device) -> MetricSums:
        loss_sum, correct = torch.zeros(2, dtype=wide_dtype(device), device=device).unbind()
        return cls(loss_sum, correct, 0)

    @property
    def loss(self) -> float:
        """Mean loss per sample."""
        return self.loss_sum.item() / int(self.samples) if self.samples else float("nan")

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers."""
        return self.correct.item() / int(self.samples) if self.samples else float("nan")


@dataclass(frozen=True)
class Objective:
    """The objective of training: the mean loss of a task on a batch, with outputs computed in a precision."""

    precision: Precision = FULL
    task: LearningTask = CLASSIFICATION

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.precision.forward(inputs.device):
            outputs = model(inputs)
        return self.loss(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss for outputs that the model has computed in this precision."""
        return self.task.loss(self.precision.widened(outputs), targets, reduction)

    def losses(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Losses [k, batch] whose sums by `weights`, which sum to 1 for each of k batches, are the mean losses."""
        targets = targets.flatten(0, 1)
        losses, counts = self.loss(outputs.flatten(0, 1), targets, "none").view(weights.shape), counts_of(self.task)
        if counts is None:
            return losses
        answers = counts(targets).view(weights.shape)
        return losses * answers / (answers * weights).sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def backward(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss = DEFAULT_LOSS) -> Tensor:
    """Add the gradient of the loss on one batch to the parameters' `.grad`; returns the loss, detached."""
    value = loss(model(inputs), targets)
    value.backward()
    return value.detach()


def train_epoch(
    model: nn.Module,
    batches: Batches,
    optimizer: Optimizer,
    loss: Loss = DEFAULT_LOSS,
    backward: Backward = backward,
) -> MetricSums:
    """Train on each batch once, in order.

    Args:
        model: any module that maps inputs [batch, ...] to logits or log-probabilities [batch, classes].
        batches: (inputs, targets) pairs on the model's device: a DataLoader, or `CustomSubset.batches(...)`.
        optimizer: any `torch.optim.Optimizer` over the model's parameters.
        loss: mean loss of (outputs, targets); the default fits logits and log-probabilities.
        backward: computes the gradients, as the function `backward` does.

    Returns the sum of the losses before each step; `.loss` is their mean.
    """
    model.train()
    loss_sum, correct, samples = MetricSums.zero(_device_of(model))
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = backward(model, inputs, targets, loss)
        optimizer.step()
        loss_sum.add_(value, alpha=len(targets))
        samples += len(targets)
    return MetricSums(loss_sum, correct, samples)


@torch.no_grad()
def test(
    model: nn.Module,
    batches: Batches,
    loss: Loss = DEFAULT_LOSS,  # noqa: PT028
    correct: Correct | None = CLASSIFICATION.correct,  # noqa: PT028
    counts: Counts | None = None,  # noqa: PT028
) -> MetricSums:
    """Loss and accuracy of `model` on all batches: `.loss`, `.accuracy`. Leaves the model in evaluation mode.

    Args:
        model, batches, loss: as in `train_epoch`.
        correct: which answers are correct, a tensor of booleans, of (outputs, targets); None: none is.
        counts: the number of answers of each sample, [batch], of the targets, if samples have several; the mean loss of
            a batch is that of its answers.
    """
    model.eval()
    loss_sum, hits, samples = MetricSums.zero(_device_of(model))
    for inputs, targets in batches:
        outputs = model(inputs)
        value = loss(outputs, targets)
        answers: int | Tensor
        if counts is None:
            answers = len(targets)
            loss_sum.add_(value, alpha=answers)
        else:
            answers = counts(targets).sum()
            loss_sum.add_(value.to(loss_sum.dtype) * answers)
        if correct is not None:
            hits.add_(correct(outputs, targets).sum())
        samples = samples + answers
    return MetricSums(loss_sum, hits, samples)


test.__test__ = False  # type: ignore[attr-defined]  # so that pytest does not collect it


@torch.no_grad()
def check_outputs(
    model: nn.Module, inputs: Tensor, targets: Tensor, task: LearningTask = CLASSIFICATION, *, classes: int = 0
) -> Tensor:
    """Check what a model returns for a few inputs in evaluation mode, and return it.

    Raises ExperimentError if the task cannot use it, and DataError if it cannot use the targets.

    Args:
        classes: integer targets of the whole data set are below it.
    """
    was_training = model.training
    model.eval()
    outputs = model(inputs)
    model.train(was_training)
    task.check_outputs(outputs, targets, classes)
    return outputs


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
