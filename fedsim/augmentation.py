"""Random augmentations of training images, on whole batches.

An augmentation is a function of what it names among these, and gives images of the same shape:

    images     [batch, channels, height, width]
    draws      Draws on the device of the images, a function of (seed, round, worker, step)
    generator  a CPU generator of PyTorch, seeded by the same: for functions that need one

A partition's transform is the same, of inputs [batch, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.randomness import Draws
from fedsim.registry import Registry, taken_by_name

GIVEN = "images", "draws", "generator"

augmentation = Registry("augmentation", given=GIVEN)

Probability = Annotated[float, Field(ge=0, le=1)]


class ImageTransform(NamedTuple):
    """An augmentation with its parameters, or a partition's transform, and which of `GIVEN` it takes."""

    function: Callable[..., Tensor]
    takes: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> ImageTransform:
        """A partition's transform. Raises ExperimentError where it has other arguments."""
        try:
            return cls(function, tuple(taken_by_name(function, GIVEN)))
        except TypeError as error:
            raise ExperimentError(f"partition.strategy: a transform of it cannot be used: {error}") from None

    def __call__(self, images: Tensor, given: Mapping[str, Any]) -> Tensor:
        """The images as it has them; `given` holds what it takes beside the images."""
        return self.function(images=images, **{name: given[name] for name in self.takes if name != "images"})


@augmentation("flip")
def flip(images: Tensor, draws: Draws, *, probability: Probability = 0.5) -> Tensor:
    """Mirror each image left to right with this probability."""
    mirrored = draws.uniform(len(images), 1, 1, 1) < probability
    return torch.where(mirrored, images.flip(3), images)


@augmentation("shift")
def shift(images: Tensor, draws: Draws, *, pixels: PositiveInt = 2) -> Tensor:
    """Move each image by up to so many pixels up or down and left or right; what comes in repeats the edge."""
    batch, channels, height, width = images.shape
    offsets = draws.integers(2 * pixels + 1, 2, batch, 1)
    rows = offsets[0] + torch.arange(height, device=images.device)  # [batch, height]
    columns = offsets[1] + torch.arange(width, device=images.device)  # [batch, width]
    padded = F.pad(images, [pixels] * 4, mode="replicate").flatten(2)  # [batch, channels, positions]
    positions = (rows.unsqueeze(2) * (width + 2 * pixels) + columns.unsqueeze(1)).view(batch, 1, -1)
    return padded.gather(2, positions.expand(-1, channels, -1)).view(batch, channels, height, width)
