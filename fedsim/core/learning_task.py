"""Learning tasks: the loss of training and of tests, and which answers are correct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.registry import Registry
from fedsim.errors import ExperimentError

Reduction = Literal["mean", "none"]

learning_task = Registry("task")


class LearningTask(Protocol):
    """A frozen dataclass whose fields are the parameters of the task; it can be pickled.

    `outputs` is what the model returns for a batch, in the precision of rows; `targets` are int64 [batch]. Each method
    works sample by sample, so that it can be applied to the batches of several workers at once, and computes on the
    device of its inputs without waiting for it.
    """

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The mean loss of the samples; with reduction = "none" the loss of each sample, [batch]."""

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Which answers are correct, bool [batch]. The accuracy is their share."""

    def check_outputs(self, outputs: Tensor, samples: int, classes: int) -> None:
        """Raise ExperimentError unless these can be the outputs for a batch of samples with labels below `classes`."""


@learning_task("classification")
@dataclass(frozen=True)
class Classification:
    """One label for each sample: cross entropy and accuracy (Goodfellow et al. 2016, section 6.2).

    Outputs are logits or log-probabilities [batch, classes]. Log-softmax does not change log-probabilities, so their
    loss is the negative log-likelihood, with its gradients. Cost: a few passes over the outputs.

    >>> task = fedsim.core.learning_task.Classification()
    >>> outputs, targets = torch.tensor([[0.0, 0.0], [9.0, -9.0]]), torch.tensor([1, 0])
    >>> task.loss(outputs, targets, "none") < torch.tensor([0.7, 0.1])
    tensor([True, True])
    >>> task.correct(outputs, targets)
    tensor([False,  True])

    With `label_smoothing` s, a target is 1 - s + s / classes for the label and s / classes for the others, in training
    and in tests (Szegedy et al. 2016). It is at least 0 and below 1.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ExperimentError(f"task.label_smoothing = {self.label_smoothing}: must be at least 0 and less than 1")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing, reduction=reduction)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    def check_outputs(self, outputs: Tensor, samples: int, classes: int) -> None:
        """Raise ExperimentError for another shape, for probabilities, and for too few classes."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != samples:
            shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ExperimentError(f"must return a tensor [batch, classes], for {samples} inputs not {shown}")
        sums = outputs.double().cpu().sum(1)
        if bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            raise ExperimentError(
                "returns probabilities; must return logits or log-probabilities (no softmax at the end)"
            )
        if classes > outputs.shape[1]:
            raise ExperimentError(f"tells {outputs.shape[1]} classes apart, but the labels go up to {classes - 1}")


@learning_task("binary")
@dataclass(frozen=True)
class Binary:
    """Labels 0 and 1: binary cross entropy with logits, and accuracy (Goodfellow et al. 2016, section 6.2).

    Outputs are logits of the label 1, [batch] or [batch, 1]. Cost: a few passes over the outputs.

    >>> task = fedsim.core.learning_task.Binary()
    >>> outputs, targets = torch.tensor([[0.0], [9.0]]), torch.tensor([1, 1])
    >>> task.loss(outputs, targets, "none") < torch.tensor([0.7, 0.1])
    tensor([True, True])
    >>> task.correct(outputs, targets)
    tensor([False,  True])
    """

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        outputs = outputs.reshape(targets.shape)
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction=reduction)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.reshape(targets.shape) > 0) == (targets > 0)

    def check_outputs(self, outputs: Tensor, samples: int, classes: int) -> None:
        """Raise ExperimentError for another shape, and for labels other than 0 and 1."""
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        if shape not in ((samples,), (samples, 1)):
            raise ExperimentError(f"must return logits [batch] or [batch, 1], for {samples} inputs not {shape}")
        if classes > 2:
            raise ExperimentError(f"tells two classes apart, but the labels go up to {classes - 1}")


CLASSIFICATION = Classification()
