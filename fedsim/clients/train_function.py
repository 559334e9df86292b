"""A user's function that trains a model, as a client algorithm."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm
from fedsim.core.registry import Plug
from fedsim.errors import ExperimentError, show


class TrainFunction(ClientAlgorithm):
    """A function `train(model, batches, ...)` that moves a worker's model in a round.

    The trainer calls it once for each round of a worker, one worker after another. Its parameters other than `model`,
    `batches` and `worker` are keys of `[local]`. On the virtual clock a batch takes the time of one gradient, or of as
    many as the attribute `gradients_per_step` of the function says.

    Args:
        plug: the function; `takes` has those of `model`, `batches` and `worker` that are parameters of it.
        settings: the values of its other parameters.
    """

    uses_start_row: ClassVar[bool] = True  # so it needs local steps

    def __init__(self, plug: Plug, settings: dict[str, Any]) -> None:
        self.name, self._takes, self._settings = str(plug.name), tuple(plug.takes), settings
        self._function = plug.bind({})
        gradients = getattr(plug.target, "gradients_per_step", 1)
        if not (isinstance(gradients, int | float) and 0 < gradients < math.inf):
            raise ExperimentError(
                f"local.solver = {show(self.name)}: has gradients_per_step = {show(gradients)}; must be a number "
                "greater than 0, the gradients that it computes of each batch"
            )
        self.gradients_per_step = gradients  # type: ignore[assignment, misc]

    def __call__(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], worker: int) -> float:
        """Train the model in place; returns the mean training loss, NaN if the function returns none."""
        given = {"model": model, "batches": batches, "worker": worker}
        loss = self._function(**self._settings, **{name: given[name] for name in self._takes})
        if loss is None:
            return float("nan")
        if isinstance(loss, numbers.Real) or (isinstance(loss, Tensor) and loss.numel() == 1):
            return float(loss)
        raise ExperimentError(
            f"local.solver = {show(self.name)}: returned a {type(loss).__name__}; must return nothing, or the mean "
            "training loss as a number"
        )

    def with_lr(self, lr: float) -> ClientAlgorithm:
        changed = copy.copy(self)
        changed._settings = {**self._settings, "lr": lr}
        return changed

    def __repr__(self) -> str:
        return f"TrainFunction({self.name!r}, {self._settings!r})"
