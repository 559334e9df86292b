"""Learning tasks: the loss of training and of tests, and which answers are correct."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.core.registry import Registration, Registry
from fedsim.errors import DataError, ExperimentError, one_line

Reduction = Literal["mean", "none"]

REDUCTION = "reduction"
REDUCTIONS = REDUCTION, "size_average", "reduce"  # the last two are PyTorch's former names


class TaskRegistry(Registry):
    """A registry of tasks that also accepts loss functions, whose first two parameters are outputs and targets."""

    def _registration(self, name: str, target: Any) -> Registration:
        registration = super()._registration(name, target)
        if isinstance(target, type) or dataclasses.is_dataclass(target):
            return registration
        parameters = inspect.signature(target).parameters.values()
        inputs = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(inputs) != 2:
            return registration
        return dataclasses.replace(
            registration, takes={p.name: p.name in inputs for p in parameters if p.name in (*inputs, *REDUCTIONS)}
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


def described(values: Tensor | np.ndarray) -> str:
    """The dtype and the shape of a tensor or an array: `float32 [4000, 2]`."""
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


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


@dataclass(frozen=True)
class Regression:
    """The task that `regression` makes, with the name of its loss."""

    loss_name: Literal["mse", "l1", "huber"] = "mse"
    delta: float = 1.0

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        outputs, targets = outputs.reshape(targets.shape), targets.to(outputs.dtype)
        if self.loss_name == "huber":
            losses = F.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        else:
            losses = (F.mse_loss if self.loss_name == "mse" else F.l1_loss)(outputs, targets, reduction="none")
        return losses.mean() if reduction == "mean" else losses.reshape(len(losses), -1).mean(1)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError unless there is one output for each target."""
        shape, wanted = shape_of(outputs), tuple(targets.shape)
        if shape != wanted and not (targets.ndim == 1 and shape == (*wanted, 1)):
            one = " or [batch, 1]" if targets.ndim == 1 else ""
            raise ExperimentError(f"must return numbers of the shape of the targets, {list(wanted)}{one}, not {shape}")


@learning_task("regression")
@learning_task("mse")
def regression(
    *, loss: Literal["mse", "l1", "huber"] = "mse", delta: Annotated[float, Field(gt=0)] = 1.0
) -> Regression:
    """Numbers as targets: the mean of a loss of the difference of each output and its target. There is no accuracy.

    Outputs have the shape of the targets, [batch] or [batch, outputs]; [batch, 1] stands for [batch]. Cost: a few
    passes over the outputs.

    Args:
        loss: of a difference x, "mse": x^2; "l1": |x|; "huber": x^2 / 2 up to |x| = delta, and beyond it
            delta (|x| - delta / 2) (Huber 1964). As in `torch.nn.functional`.
        delta: of "huber", > 0.

    >>> task = fedsim.core.learning_task.regression(loss="huber", delta=1.0)
    >>> task.loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]), "none")
    tensor([0.5000, 2.5000])
    """
    if delta != 1 and loss != "huber":
        raise ExperimentError(f"task.delta = {delta}: is a parameter of task.loss = huber, not of {loss}; omit it")
    return Regression(loss, delta)


@learning_task("next_token")
@dataclass(frozen=True)
class NextToken:
    """A token for each place of a sequence: the mean cross entropy of all tokens, and the accuracy of tokens.

    Outputs are logits [batch, length, classes] for targets [batch, length]. A data set holds as targets the inputs one
    place later. Bengio et al. 2003. The loss of a test is the mean of all its tokens; the train loss of a round weights
    each batch by its number of samples, as of other tasks. Cost: a few passes over the outputs.

    Args:
        ignore: targets of this value do not count, such as padding. The loss of a batch without other targets is 0.

    >>> task = fedsim.core.learning_task.NextToken()
    >>> outputs, targets = torch.zeros(1, 3, 4), torch.tensor([[0, 3, -100]])
    >>> task.loss(outputs, targets), task.correct(outputs, targets)
    (tensor(1.3863), tensor([[ True, False, False]]))
    """

    ignore: int = -100

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=self.ignore, reduction="none")
        sums, counts = losses.view(targets.shape).sum(1), self.counts(targets)
        return sums.sum() / counts.sum().clamp(min=1) if reduction == "mean" else sums / counts.clamp(min=1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(-1) == targets) & (targets != self.ignore)

    def counts(self, targets: Tensor) -> Tensor:
        return (targets != self.ignore).sum(1)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise DataError for other targets, and ExperimentError for another shape and for too few classes."""
        if targets.ndim != 2 or targets.is_floating_point():
            raise DataError(
                f"the task next_token needs a token for each position, int64 [batch, length], not {described(targets)}"
            )
        shape, wanted = shape_of(outputs), list(targets.shape)
        if not isinstance(outputs, Tensor) or outputs.ndim != 3 or outputs.shape[:2] != targets.shape:
            raise ExperimentError(
                f"must return logits [batch, length, classes], for targets of the shape {wanted} not {shape}"
            )
        if classes > outputs.shape[2]:
            raise ExperimentError(f"has {outputs.shape[2]} classes of tokens, but the targets go up to {classes - 1}")


@dataclass(frozen=True)
class LossTask:
    """A loss as a task. The loss of several samples is the mean of their losses, also with weights of classes.

    For floating targets [batch], outputs [batch, 1] are passed to the loss as [batch].

    Attributes:
        name: of the loss, for errors.
        function: the loss function, or a function that makes a loss module.
        takes: the parameters of the loss function that fedsim sets, the outputs and the targets first; none if
            `function` makes a module.
    """

    name: str
    function: Callable[..., Any]
    takes: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:  # without the module
        return LossTask, (self.name, self.function, self.takes)

    @cached_property
    def _module(self) -> nn.Module:
        module = self.function()
        if hasattr(module, REDUCTION):
            module.reduction = "none"
        return module

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, [batch], or of each target, of the shape of the targets."""
        outputs = _paired(outputs, targets)
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        if not self.takes:
            return self._module.to(outputs.device, outputs.dtype)(outputs, targets)
        given = {REDUCTION: "none"} if REDUCTION in self.takes else {}
        return self.function(**dict(zip(self.takes, (outputs, targets), strict=False)), **given)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        losses = self._losses(outputs, targets)
        return losses.mean() if reduction == "mean" else losses.reshape(len(losses), -1).mean(1)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError if the loss fails, or does not return a loss for each sample."""
        if not isinstance(outputs, Tensor):
            raise ExperimentError(f"must return a tensor, not {shape_of(outputs)}")
        given = f"for outputs {list(_paired(outputs, targets).shape)} and targets {described(targets)}"
        try:
            losses = self._losses(outputs, targets)
        except Exception as error:
            raise ExperimentError(f"the loss {self.name} fails {given}: {one_line(error)}") from error
        if not isinstance(losses, Tensor) or losses.shape not in (targets.shape, targets.shape[:1]):
            raise ExperimentError(
                f"the loss {self.name} must return a loss for each sample, [batch] (with the argument "
                f'reduction="none" if it has this parameter), and {given} it returns {shape_of(losses)}'
            )
        if targets.ndim == 1 and outputs.ndim == 2 and classes > outputs.shape[1]:
            raise ExperimentError(f"has {outputs.shape[1]} classes, but the labels go up to {classes - 1}")


def _paired(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [batch, 1] as [batch], for floating targets [batch]: a difference of both would be [batch, batch]."""
    one_each = targets.is_floating_point() and outputs.shape == (*targets.shape, 1)
    return outputs.squeeze(1) if one_each else outputs
