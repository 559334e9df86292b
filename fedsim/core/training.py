"""The training step and the test, for every engine and for any PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype
from fedsim.system.precision import FULL, Precision

Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
Backward = Callable[[nn.Module, Tensor, Tensor, Loss], Tensor]

# For logits and log-probabilities: log-softmax does not change log-probabilities, so on them this is the negative
# log-likelihood, with the same gradients.
DEFAULT_LOSS: Loss = F.cross_entropy


def sample_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample [batch], whose mean is the default loss."""
    return F.cross_entropy(outputs, targets, reduction="none")


class Optimizer(Protocol):
    """The methods that a training step calls: any `torch.optim.Optimizer`, or `fedsim.clients.RowOptimizer`."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class MetricSums(NamedTuple):
    """Sums over samples: of the loss, of correct answers (counted by `test` only), and of samples.

    The sums are 0-dimensional tensors on the device of the model, so that the host never waits for the device.
    """

    loss_sum: Tensor
    correct: Tensor
    samples: int

    @classmethod
    def zero(cls, device: torch.device) -> MetricSums:
        loss_sum, correct = torch.zeros(2, dtype=wide_dtype(device), device=device).unbind()
        return cls(loss_sum, correct, 0)

    @property
    def loss(self) -> float:
        """Mean loss per sample."""
        return self.loss_sum.item() / self.samples if self.samples else float("nan")

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers."""
        return self.correct.item() / self.samples if self.samples else float("nan")


@dataclass(frozen=True)
class Objective:
    """The objective of training: the mean loss of a model on a batch, with outputs computed in a precision."""

    precision: Precision = FULL
    loss: Loss = DEFAULT_LOSS

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.precision.forward(inputs.device):
            outputs = model(inputs)
        return self.loss(self.precision.widened(outputs), targets)


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
def test(model: nn.Module, batches: Batches, loss: Loss = DEFAULT_LOSS) -> MetricSums:  # noqa: PT028
    """Loss and accuracy of `model` on all batches: `.loss`, `.accuracy`. Leaves the model in evaluation mode."""
    model.eval()
    loss_sum, correct, samples = MetricSums.zero(_device_of(model))
    for inputs, targets in batches:
        outputs = model(inputs)
        loss_sum.add_(loss(outputs, targets), alpha=len(targets))
        correct.add_((outputs.argmax(1) == targets).sum())
        samples += len(targets)
    return MetricSums(loss_sum, correct, samples)


test.__test__ = False  # type: ignore[attr-defined]  # so that pytest does not collect it


@torch.no_grad()
def check_outputs(model: nn.Module, inputs: Tensor) -> int:
    """The number of classes of `model`, from its outputs on a few `inputs` in evaluation mode.

    Raises ExperimentError if it does not return [batch, classes], or returns probabilities, on which the loss would be
    wrong without an error.
    """
    was_training = model.training
    model.eval()
    outputs = model(inputs)
    model.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(inputs):
        shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ExperimentError(f"must return a tensor [batch, classes], for {len(inputs)} inputs not {shown}")
    sums = outputs.double().cpu().sum(1)
    if bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise ExperimentError("returns probabilities; must return logits or log-probabilities (no softmax at the end)")
    return outputs.shape[1]


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
