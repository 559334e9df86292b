"""Training steps and tests of PyTorch modules, used by all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedsim.core.learning_task import CLASSIFICATION, Correct, Counts, LearningTask, Reduction, counts_of, joint_of
from fedsim.core.model_inputs import Inputs, outputs_of
from fedsim.errors import ExperimentError, show
from fedsim.system.devices import wide_dtype
from fedsim.system.precision import FULL, Precision

Batches = Iterable[tuple[Inputs, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[nn.Module, Inputs, Tensor, Loss], Tensor]

DEFAULT_LOSS: Loss = CLASSIFICATION.loss


class Optimizer(Protocol):
    """Interface of the optimizers that a training step accepts, such as `torch.optim.Optimizer`."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class MetricSums(NamedTuple):
    """Sums over batches, from which mean loss and accuracy are computed.

    The sums are tensors on the model's device, so adding a batch does not wait for the device.

    Attributes:
        loss_sum: sum of the losses.
        correct: number of correct predictions, counted only by `test`.
        samples: number of predictions: one per sample, or more in tasks such as next-token prediction.
    """

    loss_sum: Tensor
    correct: Tensor
    samples: int | Tensor

    @classmethod
    def zero(cls, device: torch.device) -> MetricSums:
        """Return sums of zero on `device`."""
        loss_sum, correct = torch.zeros(2, dtype=wide_dtype(device), device=device).unbind()
        return cls(loss_sum, correct, 0)

    @classmethod
    def on_host(cls, several: Sequence[MetricSums]) -> list[MetricSums]:
        """Copy several sums to the host, with one wait for the device."""
        tensors = [value for sums in several for value in sums if isinstance(value, Tensor)]
        if not tensors:
            return list(several)
        on_host = iter(torch.stack([tensor.to(tensors[0].dtype) for tensor in tensors]).cpu())
        return [cls._make(next(on_host) if isinstance(v, Tensor) else v for v in sums) for sums in several]

    @property
    def loss(self) -> float:
        """The mean loss per prediction (in most tasks, per sample). NaN if there are no predictions."""
        return self.loss_sum.item() / int(self.samples) if self.samples else float("nan")

    @property
    def accuracy(self) -> float:
        """The fraction of correct predictions. NaN if there are no predictions."""
        return self.correct.item() / int(self.samples) if self.samples else float("nan")


@dataclass(frozen=True)
class Objective:
    """Training objective: the mean loss of a task on a batch, computed in a given precision.

    With `class_weights` [classes], the loss of each sample is multiplied by the weight of its class.
    """

    precision: Precision = FULL
    task: LearningTask = CLASSIFICATION
    class_weights: Tensor | None = None

    def __call__(self, model: nn.Module, inputs: Inputs, targets: Tensor) -> Tensor:
        with self.precision.forward(targets.device):
            outputs = outputs_of(model, inputs)
        return self.loss(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the mean loss of a batch of model outputs, or one loss per sample with reduction = "none"."""
        outputs = self.precision.widened(outputs)
        if self.class_weights is None:
            return self.task.loss(outputs, targets, reduction)
        losses = self.task.loss(outputs, targets, "none") * self.class_weights.to(outputs.dtype)[targets]
        return losses if reduction == "none" else losses.mean()

    def means(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the losses of k batches, [k].

        Args:
            outputs: model outputs of each batch, [k, batch, ...].
            targets: targets of each batch, [k, batch, ...].
            weights: weight of each sample, [k, batch]: 1 / (number of samples in the batch), or 0 for padding. A loss
                that returns one number per batch (a joint loss) does not allow padding.
        """
        if (is_joint := joint_of(self.task)) and is_joint(outputs[0], targets[0]):
            return torch.stack([self.loss(*batch) for batch in zip(outputs, targets, strict=True)])
        targets = targets.flatten(0, 1)
        losses, counts = self.loss(outputs.flatten(0, 1), targets, "none").view(weights.shape), counts_of(self.task)
        if counts is None:
            return (losses * weights).sum(1)
        answers = counts(targets).view(weights.shape) * weights
        return (losses * answers).sum(1) / answers.sum(1).clamp(min=torch.finfo(weights.dtype).tiny)


def backward(model: nn.Module, inputs: Inputs, targets: Tensor, loss: Loss = DEFAULT_LOSS) -> Tensor:
    """Add the gradient of the loss on one batch to the parameters' `.grad`, and return the detached loss."""
    value = loss(outputs_of(model, inputs), targets)
    value.backward()
    return value.detach()


def _refuse_dataset(batches: Batches) -> None:
    if isinstance(batches, Tensor):
        raise ExperimentError(
            "batches: must be a list of (inputs, targets) pairs, not a tensor; pass [(inputs, targets)]"
        )
    if isinstance(batches, Dataset):
        raise ExperimentError("batches: is a data set without batches; pass torch.utils.data.DataLoader(data, 32)")


def train_epoch(
    model: nn.Module, batches: Batches, optimizer: Optimizer, loss: Loss = DEFAULT_LOSS, backward: Backward = backward
) -> MetricSums:
    """Train on each batch once, in order.

    Args:
        model: any module that maps inputs [batch, ...] to logits or log-probabilities [batch, classes]. Several inputs
            are passed by keyword (a dict) or by position (a tuple).
        batches: (inputs, targets) pairs on the model's device: a DataLoader, or `CustomSubset.batches(...)`.
        optimizer: any `torch.optim.Optimizer` over the model's parameters.
        loss: mean loss as a function of (outputs, targets). The default is for logits or log-probabilities.
        backward: function that computes the gradients, by default `fedsim.core.training.backward`.

    Returns MetricSums of the losses before each step. Its property `loss` is the mean loss. Reading it waits for the
    device.

    In a run: `fedsim.training.sequential.RowTrainer.train` calls `train_epoch`.
    """
    _refuse_dataset(batches)
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
    """Compute the loss and the accuracy of `model` over all batches, and leave the model in evaluation mode.

    Args:
        model: any module that maps inputs [batch, ...] to outputs.
        batches: (inputs, targets) pairs on the model's device: a DataLoader, or `CustomSubset.batches(...)`.
        loss: function of (outputs, targets) that returns the mean loss over the predictions of a batch.
        correct: function of (outputs, targets) that returns a Boolean tensor, true for each correct prediction. None:
            there is no accuracy.
        counts: function of the targets that returns the number of predictions per sample [batch], such as the tokens of
            a text. None: one prediction per sample.

    Returns MetricSums with the properties `loss` and `accuracy`. Reading them waits for the device.

    In a run: `fedsim.rounds.evaluation.Evaluation._test` calls `test`.
    """
    _refuse_dataset(batches)
    if not callable(loss):
        raise ExperimentError(f"loss = {show(loss)}: must be a function of (outputs, targets)")
    model.eval()
    loss_sum, hits, samples = MetricSums.zero(_device_of(model))
    for inputs, targets in batches:
        outputs = outputs_of(model, inputs)
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
    model: nn.Module, inputs: Inputs, targets: Tensor, task: LearningTask = CLASSIFICATION, *, classes: int = 0
) -> Tensor:
    """Compute a model's outputs for one batch, check that the task can use them, and return them.

    Args:
        model: any module.
        inputs, targets: a batch, [batch, ...] each.
        task: the learning task.
        classes: number of classes. Integer targets are below this number.

    Raises ExperimentError if the task does not support the outputs, and DataError if it does not support the targets.
    """
    was_training = model.training
    model.eval()
    outputs = outputs_of(model, inputs)
    model.train(was_training)
    task.check_outputs(outputs, targets, classes)
    return outputs


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
