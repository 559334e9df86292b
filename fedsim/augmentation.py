"""Random augmentations of training images, on whole batches.

An augmentation is a function `(images [batch, channels, height, width], generator) -> images` of the same shape. Its
draws come from `generator` alone, which is seeded by (seed, round, worker).
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor

from fedsim.registry import Registry

augmentation = Registry("augmentation", given=("images", "generator"))

Probability = Annotated[float, Field(ge=0, le=1)]


@augmentation("flip")
def flip(images: Tensor, generator: torch.Generator, *, probability: Probability = 0.5) -> Tensor:
    """Mirror each image left to right with this probability."""
    mirrored = torch.rand(len(images), generator=generator) < probability
    return torch.where(mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(3), images)


@augmentation("shift")
def shift(images: Tensor, generator: torch.Generator, *, pixels: PositiveInt = 2) -> Tensor:
    """Move each image by up to so many pixels up or down and left or right; what comes in repeats the edge."""
    batch, channels, height, width = images.shape
    offsets = torch.randint(0, 2 * pixels + 1, (2, batch, 1), generator=generator).to(images.device)
    rows = offsets[0] + torch.arange(height, device=images.device)  # [batch, height]
    columns = offsets[1] + torch.arange(width, device=images.device)  # [batch, width]
    padded = F.pad(images, [pixels] * 4, mode="replicate").flatten(2)  # [batch, channels, positions]
    positions = (rows.unsqueeze(2) * (width + 2 * pixels) + columns.unsqueeze(1)).view(batch, 1, -1)
    return padded.gather(2, positions.expand(-1, channels, -1)).view(batch, channels, height, width)
