"""Learning tasks: the loss of training and of tests, and which answers are correct.

This module has the tasks with class labels; tasks with other targets are in `fedsim/core/other_tasks.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.registry import Plug, Registry
from fedsim.errors import DataError, ExperimentError

Reduction = Literal["mean", "none"]

REDUCTION = "reduction"
REDUCTIONS = REDUCTION, "size_average", "reduce"  # the last two are PyTorch's former names


class TaskRegistry(Registry):
    """A registry of tasks that also accepts loss functions, whose first two parameters are outputs and targets."""

    def _plug(self, name: str, target: Any) -> Plug:
        plug = super()._plug(name, target)
        if isinstance(target, type) or dataclasses.is_dataclass(target):
            return plug
        parameters = inspect.signature(target).parameters.values()
        inputs = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(inputs) != 2:
            return plug
        return dataclasses.replace(
            plug, takes={p.name: p.name in inputs for p in parameters if p.name in (*inputs, *REDUCTIONS)}
        )


learning_task = TaskRegistry("task", accepts="a loss or a task")


class LearningTask(Protocol):
    """A frozen dataclass whose fields are the parameters of the task; it can be pickled.

    `outputs` is what the model returns for a batch, in the precision of rows; `targets` are [batch, ...]: labels and
    tokens int64, others in the precision of rows. Each method works sample by sample, so that it can be applied to the
    batches of several workers at once, and computes on the device of its inputs without waiting for it.

    Two more methods are optional:

        correct(outputs, targets)  which answers are correct, a tensor of booleans, one for each answer; without it
                                   there is no accuracy, and runs are compared by their test loss
        counts(targets)            the number of answers of each sample, [batch], if samples have several: the mean loss
                                   of samples is weighted by it; without it each has one
    """

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The mean loss of the samples; with reduction = "none" the loss of each sample, [batch]."""

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise DataError if the task cannot use the targets, and ExperimentError if it cannot use the outputs.

        Integer targets of the whole data set are below `classes`.
        """


Correct = Callable[[Tensor, Tensor], Tensor]
Counts = Callable[[Tensor], Tensor]


def correct_of(task: LearningTask) -> Correct | None:
    """The method `correct` of a task; None if the task has no accuracy."""
    return getattr(task, "correct", None)


def counts_of(task: LearningTask) -> Counts | None:
    """The method `counts` of a task; None if each sample has one answer."""
    return getattr(task, "counts", None)


def require_labels(task: str, targets: Tensor) -> None:
    """Raise DataError unless each target is one class label."""
    if targets.ndim != 1 or targets.is_floating_point():
        labels = "targets.long()" if targets.ndim == 1 else "targets.argmax(1) of one-hot targets"
        other = "regression, for measured values" if targets.is_floating_point() else "next_token, for tokens"
        raise DataError(
            f"the task {task} needs one class label for each sample, int64 [batch], not {described(targets)}; "
            f"give {labels}, or use task={other}"
        )


def described(targets: Tensor | np.ndarray) -> str:
    """The dtype and the shape of targets: `float32 [4000, 2]`."""
    return f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"


def shape_of(outputs: object) -> object:
    """The shape of a tensor; the name of the type of anything else."""
    return tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__


@learning_task("classification")
@learning_task("cross_entropy")
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

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError for another shape, for probabilities, and for too few classes."""
        require_labels("classification", targets)
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(targets):
            raise ExperimentError(
                f"must return a tensor [batch, classes], for {len(targets)} inputs not {shape_of(outputs)}"
            )
        sums = outputs.double().cpu().sum(1)
        if bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            raise ExperimentError(
                "returns probabilities; must return logits or log-probabilities (no softmax at the end)"
            )
        if classes > outputs.shape[1]:
            raise ExperimentError(f"has {outputs.shape[1]} classes, but the labels go up to {classes - 1}")


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

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError for another shape, and for labels other than 0 and 1."""
        require_labels("binary", targets)
        shape, samples = shape_of(outputs), len(targets)
        if shape not in ((samples,), (samples, 1)):
            raise ExperimentError(f"must return logits [batch] or [batch, 1], for {samples} inputs not {shape}")
        if classes > 2:
            raise ExperimentError(f"has two classes, but the labels go up to {classes - 1}")


CLASSIFICATION = Classification()
