"""Metrics: numbers that each test of the global model records in addition to loss and accuracy.

A metric is a function of the model's outputs and the targets of all test samples. Its keyword-only parameters are its
configuration. A class with the methods `update(outputs, targets)` and `compute()`, such as a torchmetrics class, is
also a metric. Its configuration consists of the constructor arguments.

    outputs  [n, ...], in the dtype of the model parameters. [n, 1] is passed as [n] if targets are [n]
    targets  [n] or [n, ...], as stored in the data set

The attribute `higher_is_better` (True or False) of a metric tells comparisons which values are better. Without this
attribute, the name of the metric decides: lower is better if the name contains "loss", "error", "mse", "mae" or
"perplexity".

One process computes the metric, on the device of the outputs. The outputs for all test samples are kept in memory:
400 kB for 10,000 samples with 10 classes in float32.
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
    """Registry of metrics. It also accepts classes with the methods `update` and `compute`, as in torchmetrics.

    `@metric(name, higher_is_better=False)` also says whether higher or lower values are better.
    """

    def _registration(self, name: str, target: Any) -> Registration:
        return (
            Registration(self.kind, name, target, {}, self)
            if _accumulates(target)
            else super()._registration(name, target)
        )


def _accumulates(target: Any) -> bool:
    return isinstance(target, type) and all(callable(getattr(target, name, None)) for name in ("update", "compute"))


@dataclass(frozen=True)
class OutputMetric(Component):
    """A metric with its parameters.

    Attributes:
        label: name in the records.
        accumulates: whether the metric is an object with `update` and `compute`, as in torchmetrics.
        higher_is_better: whether higher values are better. None if unknown.
    """

    label: str
    accumulates: bool
    higher_is_better: bool | None = None

    @classmethod
    def of(
        cls, registration: Registration, params: dict[str, Any], *, label: str | None = None, **settings: Any
    ) -> OutputMetric:
        """Create the metric.

        Args:
            registration: the metric.
            params: its parameters, already checked.
            label: name in the records. None: the name of the metric.
            settings: ignored.
        """
        return super().of(
            registration,
            params,
            label=label or registration.name.rpartition(":")[2],
            accumulates=_accumulates(registration.target),
            higher_is_better=getattr(registration.target, "higher_is_better", None),
        )

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric over all samples. Raise ExperimentError if it fails or does not return one number."""
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        try:
            with torch.no_grad():
                if self.accumulates:
                    accumulator = self.function()
                    if isinstance(accumulator, torch.nn.Module):
                        accumulator.to(outputs.device)
                    accumulator.update(outputs, targets)
                    value = accumulator.compute()
                else:
                    value = self.function(outputs=outputs, targets=targets)
                return float(value)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ExperimentError(f"metrics: {show(self.label)} cannot be computed: {first_line(error)}") from error


metric = MetricRegistry(
    "metric",
    inputs=("outputs", "targets"),
    traits=("higher_is_better",),
    accepts="a function, or a class with update and compute",
    component=OutputMetric,
)


@metric("top_k", higher_is_better=True)
def top_k(outputs: Tensor, targets: Tensor, *, k: int = 5, ignore: int = -100) -> Tensor:
    """Return the fraction of targets among the k largest outputs (top-5 accuracy in Russakovsky et al. 2015).

    Args:
        outputs: [..., classes].
        targets: [...], int64.
        k: number of largest outputs, at least 1 and less than the number of classes.
        ignore: target value that is ignored, such as padding.

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
    """Return the F1 score averaged over classes (scikit-learn's `average="macro"`).

    The F1 score of a class is the harmonic mean of its precision and recall. Classes that occur neither in the targets
    nor in the predictions are left out.

    Args:
        outputs: [..., classes], or logits of class 1: [...] or [..., 1].
        targets: [...], int64.
        ignore: target value that is ignored, such as padding.

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


@metric("auroc", higher_is_better=True)
def auroc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the area under the ROC curve (AUROC) of the logits of label 1.

    The area is the probability that a random sample of label 1 has a larger logit than a random sample of label 0
    (Hanley and McNeil 1982). Pairs with equal logits count half. If all labels are equal, the value is 0.5.

    Args:
        outputs: logits of label 1, [n] or [n, 1].
        targets: labels 0 and 1, [n].

    >>> fedsim.core.metrics.auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    tensor(0.7500)
    """
    outputs, positive = _differences(outputs, torch.zeros_like(targets)), targets > 0
    _, positions, counts = outputs.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts.double() - 1) / 2)[positions]
    ones, zeros = positive.sum(), (~positive).sum()
    pairs = (ones * zeros).clamp(min=1)
    above = ranks[positive].sum() - ones * (ones + 1) / 2
    return torch.where(ones * zeros > 0, above / pairs, torch.full_like(above, 0.5)).float()


@metric("perplexity", higher_is_better=False)
def perplexity(outputs: Tensor, targets: Tensor, *, ignore: int = -100) -> Tensor:
    """Return the perplexity, the exponential of the mean cross entropy (Jelinek et al. 1977).

    Args:
        outputs: logits [..., classes], such as [n, length, vocabulary].
        targets: [...], int64.
        ignore: target value that is ignored, such as padding.

    >>> fedsim.core.metrics.perplexity(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
    tensor(4.)
    """
    return F.cross_entropy(*_counted(outputs, targets, ignore)).exp()


@metric("mse", higher_is_better=False)
def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error over all values of all samples.

    Args:
        outputs, targets: tensors with the same number of elements.

    >>> fedsim.core.metrics.mse(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    tensor(2.)
    """
    return _differences(outputs, targets).square().mean()


@metric("mae", higher_is_better=False)
def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean absolute error over all values of all samples.

    Args:
        outputs, targets: tensors with the same number of elements.

    >>> fedsim.core.metrics.mae(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    tensor(1.)
    """
    return _differences(outputs, targets).abs().mean()


@metric("r2", higher_is_better=True)
def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the coefficient of determination, 1 - mean squared error / variance of the targets (Wright 1921).

    The coefficients of several outputs are averaged, as in scikit-learn's `r2_score`. If all targets are equal, the
    coefficient is 1 for perfect outputs and 0 otherwise.

    Args:
        outputs, targets: [n] or [n, outputs]. Outputs [n, 1] are accepted for targets [n].

    >>> fedsim.core.metrics.r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    tensor(0.5000)
    """
    targets = targets.to(outputs.dtype)
    errors = _differences(outputs, targets).square().sum(0)
    spread = (targets - targets.mean(0)).square().sum(0)
    known = 1 - errors / torch.where(spread > 0, spread, torch.ones_like(spread))
    return torch.where(spread > 0, known, (errors == 0).to(known.dtype)).mean()


def _counted(outputs: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """Return the outputs [m, classes] and targets [m] of all predictions whose target is not `ignore`."""
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise ExperimentError(
            f"the metric needs outputs [..., classes] and integer targets [...], not outputs {list(outputs.shape)} "
            f"and targets {targets.dtype} {list(targets.shape)}"
        )
    counts = targets != ignore
    return outputs[counts], targets[counts]


def _differences(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs minus targets in the shape of the targets. Raise ExperimentError if their sizes differ."""
    if outputs.numel() != targets.numel():
        shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
        raise ExperimentError(
            f"the metric needs outputs and targets of the same size (one output per target), not {shapes}"
        )
    return outputs.reshape(targets.shape) - targets
