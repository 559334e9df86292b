"""Attacks on data: Byzantine workers train on changed batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import getitem
from typing import Literal

import torch
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.core.model_inputs import Inputs, on_each, on_image
from fedsim.core.numbers import NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError

PATCH = "attack: the patch of a backdoor"


@attack_strategy("label_flipping")
@dataclass(frozen=True)
class LabelFlipping:
    """Label-flipping attack: Byzantine workers train with the label C - 1 - y instead of y (Fang et al. 2020).

    C is the number of classes. If C is odd, the middle class keeps its label and does not count for the success rate.

    The attackers send their trained updates [b, d] unchanged. Cost: flipping the labels of each batch.

    >>> attack = fedsim.byzantine.attack_strategy.get("label_flipping").target()
    >>> attack.poison(torch.zeros(3, 1), torch.tensor([0, 1, 9]), classes=10)[1]
    tensor([9, 8, 0])
    """

    def __call__(self, own_updates: Tensor) -> Tensor:
        """Return the trained updates unchanged."""
        return own_updates

    def poison(self, inputs: Inputs, targets: Tensor, classes: int) -> tuple[Inputs, Tensor]:
        """Return the unchanged inputs [batch, ...] and the flipped labels [batch]."""
        return inputs, classes - 1 - targets

    def goal(self, inputs: Inputs, targets: Tensor, classes: int) -> tuple[Inputs, Tensor]:
        """Return the samples whose flipped label differs from their label, and their flipped labels."""
        flipped = classes - 1 - targets
        changed = flipped != targets
        return on_each(getitem, inputs, changed), flipped[changed]


@attack_strategy("backdoor")
@dataclass(frozen=True)
class Backdoor:
    """Backdoor attack: Byzantine workers train on images with a patch and a fixed label (Bagdasaryan et al. 2020).

    The patch is a square in one corner of the image (Gu et al. 2017). The attackers send their updates multiplied by
    gamma. With gamma = n / b (model replacement), the mean of n updates and a server learning rate of 1, b attackers
    with equal updates replace the global model by their own model, apart from the contribution of the honest updates.

    Args:
        size: side length of the patch in pixels.
        value: pixel value of the patch, in the units of the model's inputs (after normalisation).
        corner: "top_left", "top_right", "bottom_left" or "bottom_right".
        target: label of poisoned samples.
        poisoned: fraction of the samples of a batch that are poisoned, 0 < poisoned <= 1. The number of samples is
            rounded up or down at random.
        gamma: factor of the updates, > 0.

    Returns the multiplied updates [b, d]. Raises ExperimentError if the inputs are not images, if the patch
    does not fit into them, or if `target` is not a class. Cost: a copy of each batch, and one pass over the updates.

    >>> attack = fedsim.byzantine.attack_strategy.get("backdoor").target(size=1, poisoned=1.0, target=7)
    >>> draws = fedsim.Draws.of("example", seed=0)
    >>> inputs, targets = attack.poison(torch.zeros(1, 1, 2, 2), torch.tensor([3]), 10, draws)
    >>> inputs.tolist(), targets
    ([[[[0.0, 0.0], [0.0, 1.0]]]], tensor([7]))
    """

    size: PositiveInt = 3
    value: float = 1.0
    corner: Literal["top_left", "top_right", "bottom_left", "bottom_right"] = "bottom_right"
    target: NonNegativeInt = 0
    poisoned: PositiveFraction = 0.5
    gamma: PositiveFloat = 1.0

    @property
    def alters_rows(self) -> bool:
        return self.gamma != 1

    def __call__(self, own_updates: Tensor) -> Tensor:
        """Return each attacker's own update multiplied by gamma, [b, d]."""
        return own_updates * self.gamma

    def poison(self, inputs: Inputs, targets: Tensor, classes: int, draws: Draws) -> tuple[Inputs, Tensor]:
        """Return a batch in which a random fraction of the samples has the patch and the label `target`."""
        self._require_class(classes)
        fraction, whole = math.modf(self.poisoned * len(targets))
        count = whole + (draws.uniform() < fraction)
        chosen = draws.permutation(len(targets)) < count

        def patched(images: Tensor) -> Tensor:
            return torch.where(chosen.view(-1, *[1] * (images.ndim - 1)), self._triggered(images), images)

        return on_image(patched, inputs, PATCH), torch.where(chosen, self.target, targets)

    def goal(self, inputs: Inputs, targets: Tensor, classes: int) -> tuple[Inputs, Tensor]:
        """Return all samples whose label is not `target`, with the patch added, and `target` as the label of each."""
        self._require_class(classes)
        changed = targets != self.target
        of_others = on_each(getitem, inputs, changed)
        return on_image(self._triggered, of_others, PATCH), torch.full_like(targets[changed], self.target)

    def _triggered(self, inputs: Tensor) -> Tensor:
        """Return a copy of the images with the patch."""
        if inputs.ndim < 3:
            raise ExperimentError(
                f"{PATCH} needs images [channels, height, width], not samples of shape {tuple(inputs.shape[1:])}"
            )
        height, width = inputs.shape[-2:]
        if self.size > min(height, width):
            raise ExperimentError(f"attack.size = {self.size}: the patch must fit into images of {height}x{width}")
        top, left = self.corner.startswith("top"), self.corner.endswith("left")
        rows = slice(0, self.size) if top else slice(height - self.size, height)
        columns = slice(0, self.size) if left else slice(width - self.size, width)
        inputs = inputs.clone()
        inputs[..., rows, columns] = self.value
        return inputs

    def _require_class(self, classes: int) -> None:
        if self.target >= classes:
            raise ExperimentError(f"attack.target = {self.target}: must be a class from 0 to {classes - 1}")
