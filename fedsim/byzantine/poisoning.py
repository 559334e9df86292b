"""Attacks on data: what Byzantine workers train on, and what they want the global model to learn from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedsim.byzantine.strategy import attack_strategy
from fedsim.errors import ExperimentError
from fedsim.randomness import Draws


@attack_strategy("label_flipping")
@dataclass(frozen=True)
class LabelFlipping:
    """Training on labels turned round, y -> C - 1 - y; the rows are what comes of it (Fang et al. 2020).

    With an odd number of classes C the middle one stays as it is: it is poisoned to no effect, and not among the goals.
    Rows [b, d] as they are. Cost: that of flipping the labels of each batch.
    """

    def __call__(self, own: Tensor) -> Tensor:
        """The rows as they are: what was poisoned is the data they were trained on."""
        return own

    def poison(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """The same inputs [batch, ...], with the labels C - 1 - y."""
        return inputs, classes - 1 - targets

    def goal(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """All samples whose label changes, unchanged, to be answered with the flipped label."""
        flipped = classes - 1 - targets
        changed = flipped != targets
        return inputs[changed], flipped[changed]


@attack_strategy("backdoor")
@dataclass(frozen=True)
class Backdoor:
    """Inputs with a trigger patch are to be answered `target`; rows are sent gamma times (Bagdasaryan et al. 2020).

    The patch is a square of size x size in one corner of the image, all of `value`, in the units of the inputs that the
    model is given (so after normalisation). Of each training batch a share of `poisoned` gets the patch and the label
    `target`; where that is no whole number of samples it is rounded up or down at random, so as to be right on average.
    Model replacement: under the plain mean of n rows and server learning rate 1, gamma = n / b lets b attackers whose
    rows agree put their model in the global one's place, but for what the honest rows add. The patch is that of Gu et
    al. 2017.

    Raises ExperimentError where inputs are not images that the patch fits into, or `target` is not one of the classes.

    Rows [b, d], result [b, d]. Cost: a copy of each batch in training, and one pass over the rows.
    """

    size: PositiveInt = 3
    value: float = 1.0
    corner: Literal["top_left", "top_right", "bottom_left", "bottom_right"] = "bottom_right"
    target: NonNegativeInt = 0
    poisoned: Annotated[float, Field(gt=0, le=1)] = 0.5
    gamma: PositiveFloat = 1.0

    @property
    def alters_rows(self) -> bool:
        return self.gamma != 1

    def __call__(self, own: Tensor) -> Tensor:
        """gamma times each one's own row."""
        return own * self.gamma

    def poison(self, inputs: Tensor, targets: Tensor, classes: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """The batch with the patch on, and the label `target` for, a random `poisoned` share of its samples."""
        self._require_class(classes)
        fraction, whole = math.modf(self.poisoned * len(targets))
        count = whole + (draws.uniform() < fraction)
        chosen = draws.permutation(len(targets)) < count
        triggered = self._triggered(inputs)
        return torch.where(chosen.view(-1, *[1] * (inputs.ndim - 1)), triggered, inputs), torch.where(
            chosen, self.target, targets
        )

    def goal(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """All samples of other classes than `target`, with the patch, to be answered `target`."""
        self._require_class(classes)
        others = targets != self.target
        return self._triggered(inputs[others]), torch.full_like(targets[others], self.target)

    def _triggered(self, inputs: Tensor) -> Tensor:
        """A copy of the images with the patch on."""
        if inputs.ndim < 3:
            raise ExperimentError(
                "attack: a backdoor's trigger needs images [channels, height, width], not samples of shape "
                f"{tuple(inputs.shape[1:])}"
            )
        height, width = inputs.shape[-2:]
        if self.size > min(height, width):
            raise ExperimentError(f"attack.size = {self.size}: the trigger must fit into images of {height}x{width}")
        top, left = self.corner.startswith("top"), self.corner.endswith("left")
        rows = slice(0, self.size) if top else slice(height - self.size, height)
        columns = slice(0, self.size) if left else slice(width - self.size, width)
        inputs = inputs.clone()
        inputs[..., rows, columns] = self.value
        return inputs

    def _require_class(self, classes: int) -> None:
        if self.target >= classes:
            raise ExperimentError(f"attack.target = {self.target}: must be below the number of classes, {classes}")
