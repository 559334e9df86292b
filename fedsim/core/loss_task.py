"""Loss functions and loss modules, such as those of PyTorch, as tasks without accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from fedsim.core.learning_task import REDUCTION, Reduction, described, shape_of
from fedsim.errors import ExperimentError, one_line


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
