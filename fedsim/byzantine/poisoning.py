"""Attacks on data: Byzantine workers train on changed batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError


@attack_strategy("label_flipping")
@dataclass(frozen=True)
class LabelFlipping:
    """Training on flipped labels, y -> C - 1 - y; the trained rows are sent (Fang et al. 2020).

    With an odd number of classes C the middle class stays the same, and is no goal.

    Rows [b, d] stay unchanged. Cost: flipping the labels of each batch.

    >>> attack = fedsim.byzantine.attack_strategy.get("label_flipping").target()
    >>> attack.poison(torch.zeros(3, 1), torch.tensor([0, 1, 9]), classes=10)[1]
    tensor([9, 8, 0])
    """

    def __call__(self, own_updates: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return own_updates

    def poison(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the same inputs [batch, ...], with the labels C - 1 - y."""
        return inputs, classes - 1 - targets

    def goal(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the samples whose label changes, with the flipped labels."""
        flipped = classes - 1 - targets
        changed = flipped != targets
        return inputs[changed], flipped[changed]


@attack_strategy("backdoor")
@dataclass(frozen=True)
class Backdoor:
    """Training on images with a patch and the label `target`; rows are sent gamma times (Bagdasaryan et al. 2020).

    The patch is a square in one corner of the image (Gu et al. 2017). Model replacement: under the plain mean of n rows
    and server learning rate 1, gamma = n / b lets b attackers with equal rows replace the global model by their model,
    except for the honest updates.

    Args:
        size: side of the patch in pixels.
        value: of the patch, in the units of the model's inputs (after normalisation).
        corner: "top_left", "top_right", "bottom_left" or "bottom_right".
        target: the label of poisoned samples.
        poisoned: share of poisoned samples of a batch, 0 < poisoned <= 1; a fraction of a sample is rounded at random.
        gamma: factor of the rows, > 0.

    Rows [b, d], result [b, d]. Raises ExperimentError if inputs are no images that the patch fits into, or `target` is
    no class. Cost: a copy of each batch, and one pass over the rows.

    >>> attack = fedsim.byzantine.attack_strategy.get("backdoor").target(size=1, poisoned=1.0, target=7)
    >>> draws = fedsim.Draws.of(0, "example")
    >>> inputs, targets = attack.poison(torch.zeros(1, 1, 2, 2), torch.tensor([3]), 10, draws)
    >>> inputs.tolist(), targets
    ([[[[0.0, 0.0], [0.0, 1.0]]]], tensor([7]))
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

    def __call__(self, own_updates: Tensor) -> Tensor:
        """gamma times each attacker's own row."""
        return own_updates * self.gamma

    def poison(self, inputs: Tensor, targets: Tensor, classes: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return the batch with the patch on, and the label `target` for, a random share of its samples."""
        self._require_class(classes)
        fraction, whole = math.modf(self.poisoned * len(targets))
        count = whole + (draws.uniform() < fraction)
        chosen = draws.permutation(len(targets)) < count
        triggered = self._triggered(inputs)
        return torch.where(chosen.view(-1, *[1] * (inputs.ndim - 1)), triggered, inputs), torch.where(
            chosen, self.target, targets
        )

    def goal(self, inputs: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """All samples of other classes than `target`, with the patch, and the label `target`."""
        self._require_class(classes)
        others = targets != self.target
        return self._triggered(inputs[others]), torch.full_like(targets[others], self.target)

    def _triggered(self, inputs: Tensor) -> Tensor:
        """Return a copy of the images with the patch on."""
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
