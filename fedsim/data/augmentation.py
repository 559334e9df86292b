"""Random augmentations of batches of training images.

An augmentation is a function that returns images of the same shape. Its positional parameters receive by name:

    images     [batch, channels, height, width]
    draws      Draws on the device of the images, a function of (seed, round, worker, step)
    generator  a CPU generator of PyTorch with the same seed, for functions that need one

A partition's transform is the same for inputs [batch, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.core.randomness import Draws
from fedsim.core.registry import Registry, taken_by_name
from fedsim.errors import ExperimentError

GIVEN = "images", "draws", "generator"

augmentation = Registry("augmentation", inputs=GIVEN)

Probability = Annotated[float, Field(ge=0, le=1)]


class ImageTransform(NamedTuple):
    """An augmentation with its parameters, or a partition's transform, and the inputs that it accepts."""

    function: Callable[..., Tensor]
    takes: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> ImageTransform:
        """Return a partition's transform. Raises ExperimentError if it has other parameters."""
        try:
            return cls(function, tuple(taken_by_name(function, GIVEN)))
        except TypeError as error:
            raise ExperimentError(f"partition.name: a transform of it cannot be used: {error}") from None

    def __call__(self, images: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Transform images. `inputs` contains the other inputs."""
        return self.function(images=images, **{name: inputs[name] for name in self.takes if name != "images"})


@augmentation("flip")
def flip(images: Tensor, draws: Draws, *, probability: Probability = 0.5) -> Tensor:
    """Mirror each image left to right with a probability.

    Args:
        images: [batch, channels, height, width].
        draws: draws which images are mirrored.
        probability: 0 <= probability <= 1.

    Cost: a copy of the batch.

    >>> flip = fedsim.data.augmentation.flip
    >>> flip(torch.tensor([[[[1.0, 2.0]]]]), fedsim.Draws.of(0, "example"), probability=1.0)
    tensor([[[[2., 1.]]]])
    """
    mirrored = draws.uniform(len(images), 1, 1, 1) < probability
    return torch.where(mirrored, images.flip(3), images)


@augmentation("shift")
def shift(images: Tensor, draws: Draws, *, pixels: PositiveInt = 2) -> Tensor:
    """Move each image by up to `pixels` pixels vertically and horizontally; new pixels repeat the edge.

    Args:
        images: [batch, channels, height, width].
        draws: draws the offsets.
        pixels: largest offset, >= 1.

    Cost: two copies of the batch.

    >>> fedsim.data.augmentation.shift(torch.rand(4, 1, 8, 8), fedsim.Draws.of(0, "example")).shape
    torch.Size([4, 1, 8, 8])
    """
    batch, channels, height, width = images.shape
    offsets = draws.integers(2 * pixels + 1, 2, batch, 1)
    rows = offsets[0] + torch.arange(height, device=images.device)  # [batch, height]
    columns = offsets[1] + torch.arange(width, device=images.device)  # [batch, width]
    padded = F.pad(images, [pixels] * 4, mode="replicate").flatten(2)  # [batch, channels, positions]
    positions = (rows.unsqueeze(2) * (width + 2 * pixels) + columns.unsqueeze(1)).view(batch, 1, -1)
    return padded.gather(2, positions.expand(-1, channels, -1)).view(batch, channels, height, width)
