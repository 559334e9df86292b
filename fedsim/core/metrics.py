"""Metrics: numbers besides the loss and the accuracy that each test of the global model records.

A metric is a function of the outputs of the model for all test samples, and their targets; its keyword-only parameters
are its configuration. A class with the methods `update(outputs, targets)` and `compute()`, as those of torchmetrics, is
a metric too; the arguments of its constructor are its configuration.

    outputs  [n, ...], in the precision of rows; [n] for [n, 1] if targets are [n]
    targets  [n] or [n, ...], as the data set has them

The attribute `higher_is_better` (True or False) of a metric declares which number is better in comparisons. Without it,
its name decides: a lower number is better if the name holds "loss", "error", "mse", "mae" or "perplexity".

One process computes the metric, on the device of the outputs. These are kept for all test samples, n times the numbers
of an output: 400 kB for 10,000 samples of 10 classes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.registry import Component, Registration, Registry
from fedsim.errors import ExperimentError, first_line, show


class MetricRegistry(Registry):
    """A registry of metrics that also accepts classes with `update` and `compute`, such as those of torchmetrics.

    `@metric(name, higher_is_better=False)` sets the attribute of this name of the function or class.
    """

    def _registration(self, name: str, target: Any) -> Registration:
        return (
            Registration(self.kind, name, target, {}, self)
            if _accumulates(target)
            else super()._registration(name, target)
        )


def _accumulates(target: Any) -> bool:
    return isinstance(target, type) and all(callable(getattr(target, each, None)) for each in ("update", "compute"))


@dataclass(frozen=True)
class OutputMetric(Component):
    """A metric with its parameters.

    Attributes:
        label: its name in the records.
        accumulates: whether `function` makes an object with `update` and `compute`.
        higher_is_better: the attribute of this name of the function or class, as metrics of torchmetrics have it; None
            if it has none.
    """

    label: str
    accumulates: bool
    higher_is_better: bool | None = None

    @classmethod
    def of(
        cls, registration: Registration, params: dict[str, Any], *, label: str | None = None, **settings: Any
    ) -> OutputMetric:
        """The metric with checked parameters; by default its label is its name."""
        return super().of(
            registration,
            params,
            label=label or registration.name.rpartition(":")[2],
            accumulates=_accumulates(registration.target),
            higher_is_better=getattr(registration.target, "higher_is_better", None),
        )

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """The metric of all samples. Raises ExperimentError if it fails, or returns anything but one number."""
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        try:
            with torch.no_grad():
                if self.accumulates:
                    accumulator = self.function()
                    if isinstance(accumulator, torch.nn.Module):
                        accumulator.to(outputs.device)
                    accumulator.update(outputs, targets)
                    found = accumulator.compute()
                else:
                    found = self.function(outputs=outputs, targets=targets)
                return float(found)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ExperimentError(f"metrics: {show(self.label)} cannot be computed: {first_line(error)}") from error


metric = MetricRegistry(
    "metric",
    given=("outputs", "targets"),
    traits=("higher_is_better",),
    accepts="a function, or a class with update and compute",
    component=OutputMetric,
)


@metric("top_k", higher_is_better=True)
def top_k(outputs: Tensor, targets: Tensor, *, k: int = 5, ignore: int = -100) -> Tensor:
    """Share of the targets that are among the k largest outputs (Russakovsky et al. 2015: top-5 accuracy).

    Args:
        outputs: [..., classes].
        targets: [...], int64.
        k: must be at least 1, and less than the number of classes.
        ignore: targets of this value do not count.

    >>> outputs = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    >>> fedsim.core.metrics.top_k(outputs, torch.tensor([1, 2]), k=2)
    tensor(0.5000)
    """
    if not 1 <= k < outputs.shape[-1]:
        raise ExperimentError(f"k = {k}: must be at least 1, and less than the number of outputs, {outputs.shape[-1]}")
    outputs, targets = _counted(outputs, targets, ignore)
    return (outputs.topk(k, -1).indices == targets.unsqueeze(-1)).any(-1).float().mean()


@metric("macro_f1", higher_is_better=True)
def macro_f1(outputs: Tensor, targets: Tensor, *, ignore: int = -100) -> Tensor:
    """Mean over the classes of F1, the harmonic mean of precision and recall (scikit-learn's `average="macro"`).

    A class counts if it is a target or an answer of at least one sample.

    Args:
        outputs: [..., classes], or logits of class 1: [...] or [..., 1].
        targets: [...], int64.
        ignore: targets of this value do not count.

    >>> outputs = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    >>> fedsim.core.metrics.macro_f1(outputs, torch.tensor([0, 1, 1]))
    tensor(0.6667)
    """
    if outputs.numel() == targets.numel():
        answers, classes = (outputs.reshape(targets.shape) > 0).long(), 2
    else:
        answers, classes = outputs.argmax(-1), outputs.shape[-1]
    answers, targets = _counted(answers.unsqueeze(-1), targets, ignore)
    answers = answers.squeeze(-1)
    right, answered, present = (
        torch.bincount(labels, minlength=classes).double() for labels in (targets[answers == targets], answers, targets)
    )
    seen = answered + present
    return (2 * right / seen)[seen > 0].mean().float()


@metric("perplexity", higher_is_better=False)
def perplexity(outputs: Tensor, targets: Tensor, *, ignore: int = -100) -> Tensor:
    """The exponential of the mean cross entropy (Jelinek et al. 1977).

    Args:
        outputs: logits [..., classes], such as [n, length, vocabulary].
        targets: [...], int64.
        ignore: targets of this value do not count.

    >>> fedsim.core.metrics.perplexity(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
    tensor(4.)
    """
    return F.cross_entropy(*_counted(outputs, targets, ignore)).exp()


@metric("mse", higher_is_better=False)
def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error, over all numbers of all samples.

    Args:
        outputs, targets: with as many numbers.

    >>> fedsim.core.metrics.mse(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    tensor(2.)
    """
    return _differences(outputs, targets).square().mean()


@metric("mae", higher_is_better=False)
def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error, over all numbers of all samples.

    Args:
        outputs, targets: with as many numbers.

    >>> fedsim.core.metrics.mae(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    tensor(1.)
    """
    return _differences(outputs, targets).abs().mean()


@metric("r2", higher_is_better=True)
def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Coefficient of determination: 1 - mean squared error / variance of the targets (Wright 1921).

    Of several outputs the mean, as scikit-learn's `r2_score`. If the targets are all equal, 1 without an error, else 0.

    Args:
        outputs, targets: [n] or [n, outputs]; outputs [n, 1] stand for [n].

    >>> fedsim.core.metrics.r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    tensor(0.5000)
    """
    errors = _differences(outputs, targets).square().sum(0)
    spread = (targets - targets.mean(0)).square().sum(0)
    known = 1 - errors / torch.where(spread > 0, spread, torch.ones_like(spread))
    return torch.where(spread > 0, known, (errors == 0).to(known.dtype)).mean()


def _counted(outputs: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The outputs [m, classes] and the targets [m] that are not ignored, of outputs [..., classes]."""
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise ExperimentError(
            f"needs outputs [..., classes] for whole numbers [...], not {list(outputs.shape)} for {targets.dtype} "
            f"{list(targets.shape)}"
        )
    kept = targets != ignore
    return outputs[kept], targets[kept]


def _differences(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs minus targets, without broadcasting."""
    if outputs.numel() != targets.numel():
        raise ExperimentError(f"needs one output for each target, not {list(outputs.shape)} for {list(targets.shape)}")
    return outputs.reshape(targets.shape) - targets
