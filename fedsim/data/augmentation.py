"""Random augmentations of batches of training images.

An augmentation is a function that maps a batch of images to a batch of the same shape. Its positional parameters may
have these names:

    images         [batch, channels, height, width], normalised with the data set's mean and standard deviation
    draws          Draws (a random number source) on the images' device, seeded by (seed, round, worker, step)
    generator      a torch.Generator on the CPU with the same seed, for functions that need one
    normalisation  mean and standard deviation per channel: images * deviation + mean are pixels in [0, 1]

A partition's transform has the same parameters except `normalisation`, but accepts inputs of any shape [batch, ...].

Augmentations must not normalise, because they change only the training images. Data sets normalise (`mean` and `std`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.numbers import Fraction, PositiveInt
from fedsim.core.randomness import Draws
from fedsim.core.registry import Registry, taken_by_name
from fedsim.errors import ExperimentError

GIVEN = "images", "draws", "generator"

augmentation = Registry("augmentation", inputs=(*GIVEN, "normalisation"))


class ImageTransform(NamedTuple):
    """Function that transforms a batch of images: an augmentation, or the transform that a partition defines.

    Attributes:
        function: function that transforms a batch, with its parameters bound.
        takes: names of the inputs that `function` accepts, among images, draws and generator.
    """

    function: Callable[..., Tensor]
    takes: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> ImageTransform:
        """Return an ImageTransform for `function`, which a partition defines as its transform.

        Raises ExperimentError if `function` has parameters other than images, draws and generator.
        """
        try:
            return cls(function, tuple(taken_by_name(function, GIVEN)))
        except TypeError as error:
            place = "partition.name: the image transform of the partition strategy"
            raise ExperimentError(f"{place} has wrong parameters: {error}") from None

    def __call__(self, images: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the transformed images [batch, ...]. `inputs` maps "draws" and "generator" to their values."""
        return self.function(images=images, **{name: inputs[name] for name in self.takes if name != "images"})


@augmentation("flip")
def flip(images: Tensor, draws: Draws, *, probability: Fraction = 0.5) -> Tensor:
    """Mirror each image left to right, independently, with probability `probability`.

    Args:
        images: [batch, channels, height, width].
        draws: source of random numbers, which selects the mirrored images.
        probability: probability that an image is mirrored, 0 <= probability <= 1.

    Cost: a copy of the batch.

    >>> flip = fedsim.data.augmentation.flip
    >>> flip(torch.tensor([[[[1.0, 2.0]]]]), fedsim.Draws.of("example", seed=0), probability=1.0)
    tensor([[[[2., 1.]]]])
    """
    mirrored = draws.uniform(len(images), 1, 1, 1) < probability
    return torch.where(mirrored, images.flip(3), images)


@augmentation("shift")
def shift(images: Tensor, draws: Draws, *, pixels: PositiveInt = 2) -> Tensor:
    """Shift each image by a random offset of at most `pixels` pixels vertically and horizontally.

    The uncovered border repeats the image's edge pixels.

    Args:
        images: [batch, channels, height, width].
        draws: source of random numbers, for the offsets.
        pixels: largest offset, >= 1.

    Cost: two copies of the batch.

    >>> fedsim.data.augmentation.shift(torch.rand(4, 1, 8, 8), fedsim.Draws.of("example", seed=0)).shape
    torch.Size([4, 1, 8, 8])
    """
    return _moved(images, draws, pixels, "replicate")


@augmentation("crop")
def crop(images: Tensor, draws: Draws, *, padding: PositiveInt = 4) -> Tensor:
    """Pad each image with zeros on all sides, and cut out a random window of the original size.

    Zero is the mean colour, because images are normalised. He et al. 2016 (section 4.2) use this augmentation for
    CIFAR-10.

    Args:
        images: [batch, channels, height, width].
        draws: source of random numbers, for the positions of the windows.
        padding: width of the border, >= 1.

    Cost: two copies of the batch.

    >>> fedsim.data.augmentation.crop(torch.rand(4, 3, 32, 32), fedsim.Draws.of("example", seed=0)).shape
    torch.Size([4, 3, 32, 32])
    """
    return _moved(images, draws, padding, "constant")


@augmentation("cutout")
def cutout(images: Tensor, draws: Draws, *, size: PositiveInt = 16) -> Tensor:
    """Set a square in each image to zero, at a random position. DeVries and Taylor 2017.

    The centre of the square is drawn for each image. All pixels are equally likely, so part of a square can lie outside
    the image. Zero is the mean colour.

    Args:
        images: [batch, channels, height, width].
        draws: source of random numbers, for the centres.
        size: height and width of the square, >= 1.

    Cost: a copy of the batch.

    >>> cutout = fedsim.data.augmentation.cutout
    >>> cutout(torch.ones(1, 1, 2, 2), fedsim.Draws.of("example", seed=0), size=4)
    tensor([[[[0., 0.],
              [0., 0.]]]])
    """
    batch, _, height, width = images.shape
    inside = []
    for length, shape in ((height, (batch, 1, -1, 1)), (width, (batch, 1, 1, -1))):
        start = draws.integers(length, batch, 1) - size // 2
        positions = torch.arange(length, device=images.device)
        inside.append(((positions >= start) & (positions < start + size)).view(shape))
    return images.masked_fill(inside[0] & inside[1], 0)


def _moved(images: Tensor, draws: Draws, most: int, mode: str) -> Tensor:
    """Shift each image by at most `most` pixels in both directions. Pad as `F.pad` does with this `mode`."""
    batch, channels, height, width = images.shape
    offsets = draws.integers(2 * most + 1, 2, batch, 1)
    rows = offsets[0] + torch.arange(height, device=images.device)  # [batch, height]
    columns = offsets[1] + torch.arange(width, device=images.device)  # [batch, width]
    padded = F.pad(images, [most] * 4, mode=mode).flatten(2)  # [batch, channels, positions]
    positions = (rows.unsqueeze(2) * (width + 2 * most) + columns.unsqueeze(1)).view(batch, 1, -1)
    return padded.gather(2, positions.expand(-1, channels, -1)).view(batch, channels, height, width)
