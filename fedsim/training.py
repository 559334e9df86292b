"""The training step and the test, shared by every engine and usable by hand with any PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[..., Tensor]


class Optimizer(Protocol):
    """What a training step needs: any `torch.optim.Optimizer` has it, and so has `fedsim.local.RowOptimizer`."""

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...


class Tally(NamedTuple):
    """Sums over samples: of the loss, of correct answers (counted by `test` only), and of samples.

    The sums are 0-dimensional tensors where the model is, so that adding one up never waits for the device.
    """

    loss_sum: Tensor
    correct: Tensor
    samples: int

    @property
    def loss(self) -> float:
        """Mean loss per sample."""
        return self.loss_sum.item() / self.samples if self.samples else float("nan")

    @property
    def accuracy(self) -> float:
        """Fraction of correct answers."""
        return self.correct.item() / self.samples if self.samples else float("nan")


def loss_for(outputs: Tensor) -> Loss:
    """The loss that fits a model with these outputs [batch, classes]: NLL for log-probabilities, else cross entropy.

    Raises ValueError for probabilities, on which either loss would train something else without a word.
    """
    outputs = outputs.detach().double()
    if outputs.ndim != 2:
        raise ValueError(f"a classifier returns [batch, classes], not a tensor of shape {tuple(outputs.shape)}")
    ones = torch.ones(len(outputs), dtype=torch.double, device=outputs.device)
    if torch.allclose(outputs.exp().sum(1), ones, atol=1e-3):
        return F.nll_loss
    if bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), ones, atol=1e-3):
        raise ValueError("the model returns probabilities: return logits or log-probabilities (no softmax at the end)")
    return F.cross_entropy


@torch.no_grad()
def probe_outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """What `model` makes of a few `inputs` in evaluation mode, so that no buffer changes."""
    was_training = model.training
    model.eval()
    outputs = model(inputs)
    model.train(was_training)
    return outputs


def train_epoch(model: nn.Module, batches: Batches, optimizer: Optimizer, loss: Loss | None = None) -> Tally:
    """Train on each batch once, in order.

    Args:
        model: any module that maps inputs [batch, ...] to logits or log-probabilities [batch, classes].
        batches: (inputs, targets) pairs on the model's device: a DataLoader, or `CustomSubset.batches(...)`.
        optimizer: any `torch.optim.Optimizer` over the model's parameters.
        loss: mean loss of (outputs, targets); found out from the outputs where it is left out.

    Returns the sum of the losses seen on the way, before each step; `.loss` is their mean.
    """
    model.train()
    loss_sum: Tensor | None = None
    samples = 0
    for inputs, targets in batches:
        if loss is None:
            loss = loss_for(probe_outputs(model, inputs))
        optimizer.zero_grad()
        value = backward(model, inputs, targets, loss)
        optimizer.step()
        if loss_sum is None:
            loss_sum = torch.zeros((), dtype=torch.double, device=value.device)
        loss_sum.add_(value, alpha=len(targets))
        samples += len(targets)
    zero = torch.zeros((), dtype=torch.double)
    return Tally(zero if loss_sum is None else loss_sum, zero, samples)


def backward(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Add the gradient of the loss on one batch to the parameters' `.grad`; returns the loss, detached."""
    value = loss(model(inputs), targets)
    value.backward()
    return value.detach()


@torch.no_grad()
def test(model: nn.Module, batches: Batches, loss: Loss | None = None) -> Tally:  # noqa: PT028
    """Loss and accuracy of `model` on all batches: `.loss`, `.accuracy`. Leaves the model in evaluation mode."""
    model.eval()
    loss_sum = correct = torch.zeros((), dtype=torch.double)
    samples = 0
    for inputs, targets in batches:
        outputs = model(inputs)
        if loss is None:
            loss = loss_for(outputs)
        loss_sum = loss_sum.to(outputs.device) + loss(outputs, targets, reduction="sum").double()
        correct = correct.to(outputs.device) + (outputs.argmax(1) == targets).sum()
        samples += len(targets)
    return Tally(loss_sum, correct, samples)


test.__test__ = False  # type: ignore[attr-defined]  # pytest: this is not one of your tests
