"""Learning tasks, which define the loss in training and in tests, and which model outputs are correct."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from fedsim.core.numbers import PositiveFloat
from fedsim.core.registry import Registration, Registry
from fedsim.errors import DataError, ExperimentError, one_line, show

Reduction = Literal["mean", "none"]

# One weight for each class, weights from the class counts of the training samples, or equal weights.
ClassWeights = tuple[float, ...] | Literal["balanced"] | None

TOKENS = "next_token for tokens"
LOSSES_OF_CLASSES = nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss
FUNCTIONS_OF_CLASSES = F.cross_entropy, F.nll_loss, F.multi_margin_loss


class TaskRegistry(Registry):
    """Registry of learning tasks. It also accepts loss functions of (outputs, targets)."""

    def _registration(self, name: str, target: Any) -> Registration:
        registration = super()._registration(name, target)
        if isinstance(target, type) or dataclasses.is_dataclass(target):
            return registration
        parameters = inspect.signature(target).parameters.values()
        inputs = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(inputs) != 2:
            return registration
        return dataclasses.replace(registration, takes=dict.fromkeys(inputs, True))


learning_task = TaskRegistry("task", accepts="a loss or a task")


class LearningTask(Protocol):
    """Base class of learning tasks, such as classification. A task defines the loss, and optionally the accuracy.

    Subclasses are frozen dataclasses whose fields are the task's parameters. In all methods, `outputs` are the model's
    outputs for a batch, and `targets` [batch, ...] are int64 for labels and tokens, else floating-point numbers.
    Methods must treat samples independently, and compute on the device of their inputs without synchronizing with it.

    Three more methods are optional:

        check_targets(targets)     Raise DataError if the task cannot use the targets.
        correct(outputs, targets)  Return a Boolean tensor that marks the correct predictions. Without this method, a
                                   task has no accuracy, and runs are compared by test loss.
        counts(targets)            Return the number of predictions per sample [batch]. Mean losses weight samples by
                                   this number. Without this method, there is one prediction per sample.
    """

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the mean loss over samples, or the loss of each sample [batch] with reduction = "none"."""

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise an error if the task cannot use the model's outputs (ExperimentError) or the targets (DataError).

        `classes`: number of classes. Integer targets are below this number.
        """


Correct = Callable[[Tensor, Tensor], Tensor]
Counts = Callable[[Tensor], Tensor]
IsJoint = Callable[[Tensor, Tensor], bool]


def correct_of(task: LearningTask) -> Correct | None:
    """Return the method `correct` of a task, or None if the task has no accuracy."""
    return getattr(task, "correct", None)


def counts_of(task: LearningTask) -> Counts | None:
    """Return the method `counts` of a task, or None if there is one prediction per sample."""
    return getattr(task, "counts", None)


def joint_of(task: LearningTask) -> IsJoint | None:
    """Return the task's method that says whether its loss is one number per batch, or None if it never is."""
    return task.is_joint if isinstance(task, LossTask) else None


def predicts_numbers(task: LearningTask, outputs: Callable[[], object], targets: Tensor) -> bool:
    """Whether a task compares the model's outputs with numbers, so that integer targets must become floating-point.

    Args:
        task: learning task.
        outputs: function that returns the model's outputs for some samples.
        targets: targets of these samples.
    """
    if isinstance(task, LossTask) and task.compares_numbers:
        return shape_of(outputs()) in (tuple(targets.shape), (*targets.shape, 1))
    return isinstance(task, Regression)


def predicts_classes(task: LearningTask) -> bool:
    """Whether a task's integer targets [batch] are known to be classes. False for a user's own task class."""
    return isinstance(task, (Classification, Binary)) or (isinstance(task, LossTask) and task.uses_classes)


def output_count(task: LearningTask, classes: int, numbers: int) -> int:
    """Return how many outputs per prediction a task needs from a model.

    Args:
        task: learning task.
        classes: number of classes or tokens, 0 for floating-point targets.
        numbers: number of values in the target of a sample.
    """
    if isinstance(task, Binary):
        return 1
    of_numbers = isinstance(task, Regression) or (isinstance(task, LossTask) and task.compares_numbers)
    return classes if classes and (predicts_classes(task) or not of_numbers) else numbers


def _check_classes(classes: int, outputs: Tensor) -> None:
    """Raise ExperimentError if outputs [batch, n] are too few for `classes` classes."""
    if classes > outputs.shape[1]:
        raise ExperimentError(
            f"the model has {outputs.shape[1]} classes, but the labels go up to {classes - 1}; it needs at least "
            f"{classes} outputs"
        )


def _check_weights(weights: ClassWeights, classes: int) -> None:
    """Raise ExperimentError if there are class weights, but not one positive number for each of the `classes`."""
    if isinstance(weights, tuple) and (len(weights) != classes or min(weights) <= 0):
        raise ExperimentError(
            f"the model has {classes} classes, so task.class_weights must be {classes} positive numbers, or "
            f'"balanced"; it is {show(list(weights))}'
        )


def class_weights_of(task: LearningTask, targets: Callable[[], Tensor], classes: int) -> tuple[float, ...] | None:
    """Return the weight of each class in the training loss, or None for equal weights.

    Args:
        task: learning task.
        targets: function that returns the targets of the workers' samples, from which "balanced" weights are computed.
        classes: number of classes. A class without training samples has the weight 1.
    """
    weights = task.class_weights if isinstance(task, (Classification, Binary)) else None
    if weights != "balanced":
        return weights
    counts = torch.bincount(targets(), minlength=classes).double()
    return tuple(torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts), 1.0).tolist())


def require_labels(task: str, targets: Tensor) -> None:
    """Raise DataError unless each target is one class label."""
    if targets.ndim != 1 or targets.is_floating_point():
        labels = "targets.long()" if targets.ndim == 1 else "targets.argmax(1) of one-hot targets"
        other = "regression for numbers" if targets.is_floating_point() else TOKENS
        raise DataError(
            f"the task {task} needs one class label per sample, int64 [batch], not {described(targets)}; "
            f"use task={other}, or pass {labels}"
        )


def described(values: Tensor | np.ndarray) -> str:
    """Format the dtype and shape of a tensor or an array: `float32 [4000, 2]`."""
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def shape_of(outputs: object) -> object:
    """Return the shape of model outputs if they are a tensor, else the name of their type."""
    return tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__


@learning_task("classification")
@learning_task("cross_entropy")
@dataclass(frozen=True)
class Classification:
    """Classification with one label per sample: cross entropy and accuracy (Goodfellow et al. 2016, section 6.2).

    Outputs are logits or log-probabilities [batch, classes]. For log-probabilities the loss is the negative
    log-likelihood, because log-softmax does not change them. Cost: a few passes over the outputs.

    >>> task = fedsim.core.learning_task.Classification()
    >>> outputs, targets = torch.tensor([[0.0, 0.0], [9.0, -9.0]]), torch.tensor([1, 0])
    >>> task.loss(outputs, targets, "none") < torch.tensor([0.7, 0.1])
    tensor([True, True])
    >>> task.correct(outputs, targets)
    tensor([False,  True])

    With `label_smoothing` s, the target probability is 1 - s + s / classes for the label and s / classes for every
    other class, in training and in tests (Szegedy et al. 2016). s must be at least 0 and less than 1.

    With `class_weights`, the training loss of a batch is the sum of its samples' losses, each multiplied by the weight
    of the sample's class, divided by the number of samples (not by the sum of the weights, as in
    `torch.nn.functional.cross_entropy`), so that the weights also hold for batches of one sample. Loss and accuracy of
    tests and of validation are not weighted. "balanced": class c has the weight n / (classes n_c), where the
    workers have n training samples, n_c of them of class c (King and Zeng 2001, and scikit-learn's `class_weight`).
    """

    label_smoothing: float = 0.0
    class_weights: ClassWeights = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ExperimentError(f"task.label_smoothing = {self.label_smoothing}: must be at least 0 and less than 1")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing, reduction=reduction)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    def check_targets(self, targets: Tensor) -> None:
        require_labels("classification", targets)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError for outputs with a wrong shape, probabilities, or too few classes."""
        self.check_targets(targets)
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(targets):
            is_loss = isinstance(outputs, Tensor) and outputs.shape == targets.shape
            raise ExperimentError(
                f"the model must return a tensor [batch, classes]; for {len(targets)} inputs it returned "
                f"{shape_of(outputs)}" + is_loss * "; if these are losses, pass task=lambda loss, targets: loss"
            )
        sums = outputs.double().cpu().sum(1)
        if bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            raise ExperimentError(
                "the model returns probabilities; it must return logits or log-probabilities (remove the final softmax)"
            )
        _check_classes(classes, outputs)
        _check_weights(self.class_weights, outputs.shape[1])


@learning_task("binary")
@dataclass(frozen=True)
class Binary:
    """Binary classification with labels 0 and 1: cross entropy and accuracy (Goodfellow et al. 2016, section 6.2).

    Outputs are logits of label 1, [batch] or [batch, 1]. `class_weights` (two numbers, or "balanced") weight the
    training loss as in `classification`. Cost: a few passes over the outputs.

    >>> task = fedsim.core.learning_task.Binary()
    >>> outputs, targets = torch.tensor([[0.0], [9.0]]), torch.tensor([1, 1])
    >>> task.loss(outputs, targets, "none") < torch.tensor([0.7, 0.1])
    tensor([True, True])
    >>> task.correct(outputs, targets)
    tensor([False,  True])
    """

    class_weights: ClassWeights = None

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        outputs = outputs.reshape(targets.shape)
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction=reduction)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.reshape(targets.shape) > 0) == (targets > 0)

    def check_targets(self, targets: Tensor) -> None:
        require_labels("binary", targets)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError for outputs with a wrong shape, and for labels other than 0 and 1."""
        self.check_targets(targets)
        shape, samples = shape_of(outputs), len(targets)
        if shape not in ((samples,), (samples, 1)):
            raise ExperimentError(
                f"the model must return logits [batch] or [batch, 1]; for {samples} inputs it returned {shape}"
            )
        if classes > 2:
            raise ExperimentError(
                f"the task binary has two classes, but the labels go up to {classes - 1}; use task=classification"
            )
        _check_weights(self.class_weights, 2)


CLASSIFICATION = Classification()


@dataclass(frozen=True)
class Regression:
    """Regression task for numerical targets, created by the function `regression`."""

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
        """Raise ExperimentError unless there is one output for each target value."""
        shape, wanted = shape_of(outputs), tuple(targets.shape)
        if shape != wanted and not (targets.ndim == 1 and shape == (*wanted, 1)):
            or_column = " or [batch, 1]" if targets.ndim == 1 else ""
            or_labels = "; for a classification, use integers as targets" if targets.ndim == 1 else ""
            raise ExperimentError(
                f"the model must return a tensor of the targets' shape, {list(wanted)}{or_column}; it returned "
                f"{shape}{or_labels}"
            )


@learning_task("regression")
@learning_task("mse")
def regression(*, loss: Literal["mse", "l1", "huber"] = "mse", delta: PositiveFloat = 1.0) -> Regression:
    """Return a regression task for numerical targets: mean squared, absolute or Huber error, without accuracy.

    Outputs have the shape of the targets, [batch] or [batch, outputs]. Outputs [batch, 1] are accepted for targets
    [batch]. Cost: a few passes over the outputs.

    Args:
        loss: "mse" is x^2 for an error x, "l1" is |x|, and "huber" is x^2 / 2 if |x| <= delta, otherwise
            delta (|x| - delta / 2) (Huber 1964). The definitions are those of `torch.nn.functional`.
        delta: threshold for "huber", > 0.

    >>> task = fedsim.core.learning_task.regression(loss="huber", delta=1.0)
    >>> task.loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]), "none")
    tensor([0.5000, 2.5000])
    """
    if delta != 1 and loss != "huber":
        raise ExperimentError(f"task.delta = {delta}: is only used with task.loss=huber, not with {loss}; omit it")
    return Regression(loss, delta)


@learning_task("next_token")
@dataclass(frozen=True)
class NextToken:
    """Next-token prediction: mean cross entropy and accuracy over all tokens (Bengio et al. 2003).

    Outputs are logits [batch, length, classes] for targets [batch, length]. The targets in the data set are the inputs
    shifted by one position. The test loss is the mean over all tokens. The train loss of a round weights each batch by
    its number of samples, as for all tasks. Cost: a few passes over the outputs.

    Args:
        ignore: target value that is ignored, such as padding. If all targets of a batch have this value, the loss of
            the batch is 0.

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

    def check_targets(self, targets: Tensor) -> None:
        if targets.ndim != 2 or targets.is_floating_point():
            other = "regression for numbers" if targets.is_floating_point() else "classification for class labels"
            raise DataError(
                f"the task next_token needs one token per position, int64 [batch, length], not {described(targets)}; "
                f"use task={other}"
            )

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise DataError for unsuitable targets, and ExperimentError for a wrong output shape or too few classes."""
        self.check_targets(targets)
        shape, wanted = shape_of(outputs), list(targets.shape)
        if not isinstance(outputs, Tensor) or outputs.ndim != 3 or outputs.shape[:2] != targets.shape:
            raise ExperimentError(
                f"the model must return logits [batch, length, classes]; for targets of shape {wanted} it returned "
                f"{shape}"
            )
        if classes > outputs.shape[2]:
            raise ExperimentError(
                f"the model has {outputs.shape[2]} token classes, but the targets go up to {classes - 1}; it needs at "
                f"least {classes} outputs per token"
            )


@dataclass(frozen=True)
class LossTask:
    """Learning task that a loss function or loss module defines. It has no accuracy.

    The loss is called unchanged, with its own `reduction`. If it returns one number (a joint loss), this number is the
    loss of the batch, and the number for all samples of a data set is the loss of the data set. If it returns one loss
    per sample or per target, the loss of a batch or data set is their mean.

    Attributes:
        name: name of the loss, for error messages.
        function: loss function, or a function without arguments that returns a loss module.
        takes: names of the loss function's first two parameters (outputs, targets). Empty for a loss module.
        compares_numbers: whether targets of the outputs' shape must be floating-point, as for most of PyTorch's losses.
        uses_classes: whether integer targets [batch] are classes, as for PyTorch's cross entropy.
    """

    name: str
    function: Callable[..., Any]
    takes: tuple[str, ...] = ()
    compares_numbers: bool = False
    uses_classes: bool = False

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], takes: tuple[str, ...], target: object) -> LossTask:
        """Create a task for the loss `target`, which determines the attributes `compares_numbers` and `uses_classes`.

        Args:
            name: name of the loss, for error messages.
            function: loss function with its parameters bound, or a function without arguments that returns the module.
            takes: names of the loss function's first two parameters (outputs, targets). Empty for a loss module.
            target: the loss function without bound parameters, or the loss module.
        """
        target = target.func if isinstance(target, functools.partial) else target
        is_pytorchs = isinstance(target, _Loss) or getattr(target, "__module__", "") == F.__name__
        uses_labels = isinstance(target, nn.MultiLabelMarginLoss) or target is F.multilabel_margin_loss
        uses_classes = isinstance(target, LOSSES_OF_CLASSES) or target in FUNCTIONS_OF_CLASSES
        return cls(name, function, takes, is_pytorchs and not uses_labels, uses_classes)

    def __reduce__(self) -> tuple[Any, ...]:  # does not pickle the module
        return LossTask, (self.name, self.function, self.takes, self.compares_numbers, self.uses_classes)

    @cached_property
    def _module(self) -> nn.Module:
        return self.function()

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the result of the loss function: one number, one loss per sample [batch], or one loss per target."""
        outputs = _paired(outputs, targets)
        targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        if not self.takes:
            return self._module.to(outputs.device, outputs.dtype)(outputs, targets)
        return self.function(**dict(zip(self.takes, (outputs, targets), strict=True)))

    def _accepts(self, outputs: Tensor, label: int) -> bool:
        """Whether the loss accepts a class label, such as a label that the loss ignores.

        The label is tried on the CPU, because a GPU cannot be used any more after a label that is out of range.
        """
        try:
            self._value(outputs[:1].cpu(), torch.tensor([label]))
        except Exception:
            return False
        return True

    def is_joint(self, outputs: Tensor, targets: Tensor) -> bool:
        """Whether the loss returns one number per batch. The first call decides this, with its outputs and targets."""
        known = vars(self)  # the dataclass is frozen
        if "joint" not in known:
            with torch.no_grad():
                known["joint"] = not self._value(outputs, targets).ndim
        return known["joint"]

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the loss of a batch, or with reduction = "none" the loss of each sample.

        If the loss function returns one number per batch, this number is returned in both cases.
        """
        value = self._value(outputs, targets)
        if not value.ndim:
            return value
        return value.mean() if reduction == "mean" else value.reshape(len(value), -1).mean(1)

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Raise ExperimentError if the loss fails, returns a wrong shape, or has trainable parameters of its own."""
        if not isinstance(outputs, Tensor):
            raise ExperimentError(f"the model must return a tensor, not {shape_of(outputs)}")
        if self.uses_classes and targets.ndim == 1 and outputs.ndim == 2 and not self._accepts(outputs, classes - 1):
            _check_classes(classes, outputs)
        passed = _paired(outputs, targets)
        context = f"for outputs {list(passed.shape)} and targets {described(targets)}"
        try:
            with torch.enable_grad():
                losses = self._value(outputs.detach(), targets)
        except Exception as error:
            remedy = "; outputs [batch, 1] are passed as [batch] for floating-point targets; use outputs.flatten()"
            raise ExperimentError(
                f"the loss {self.name} fails {context}: {one_line(error)}{remedy if passed is not outputs else ''}"
            ) from error
        if not isinstance(losses, Tensor) or losses.shape not in ((), targets.shape, targets.shape[:1]):
            raise ExperimentError(
                f"the loss {self.name} must return a tensor with one number, or with one loss per sample, [batch]; "
                f"{context} it returned {shape_of(losses)}"
            )
        if losses.requires_grad:  # the outputs do not
            raise ExperimentError(
                f"the loss {self.name} has trainable parameters, but only those of the model are trained; move them "
                "into the model, or set their requires_grad to False"
            )


def _paired(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs [batch, 1] as [batch] if the targets are floating-point numbers [batch]."""
    is_column = targets.is_floating_point() and outputs.shape == (*targets.shape, 1)
    return outputs.squeeze(1) if is_column else outputs
