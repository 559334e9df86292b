"""Partitions with feature skew: workers hold the same classes, but each worker's inputs are transformed differently."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.numbers import NonNegativeFloat, PositiveInt
from fedsim.core.randomness import Draws
from fedsim.data.partitions.base import Transform, partition_strategy
from fedsim.data.partitions.sizes import iid
from fedsim.errors import ExperimentError


@dataclass(frozen=True)
class GaussianNoise:
    """An input transform that adds independent noise N(0, variance) to every element."""

    variance: float

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        if not images.is_floating_point():
            raise ExperimentError(
                f'partition.name = "feature_noise": needs floating-point inputs, not {images.dtype}; use another '
                "partition"
            )
        return images + draws.normal(*images.shape, dtype=images.dtype).mul_(math.sqrt(self.variance))


@dataclass(frozen=True)
class Rotation:
    """An input transform that rotates images [batch, channels, height, width] counter-clockwise about their centre.

    Pixels from outside the image are zero. Half turns, and quarter turns of square images, are exact. Other rotations
    use bilinear interpolation.
    """

    degrees: float

    def __call__(self, images: Tensor) -> Tensor:
        if images.ndim != 4:
            raise ExperimentError(
                'partition.name = "feature_rotation": needs images [batch, channels, height, width], not '
                f"inputs of shape {tuple(images.shape)}"
            )
        turns = self.degrees / 90
        exact = turns.is_integer() and (turns % 2 == 0 or images.shape[2] == images.shape[3])
        rotated = images.rot90(int(turns % 4), (2, 3)) if exact else self._resampled(images)
        return torch.empty_like(images).copy_(rotated)  # keeps the memory format

    def _resampled(self, images: Tensor) -> Tensor:
        """Return the images rotated with bilinear interpolation."""
        cos, sin = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        ratio = images.shape[2] / images.shape[3]
        inverse = images.new_tensor([[cos, -sin * ratio, 0], [sin / ratio, cos, 0]])
        grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@partition_strategy("feature_noise")
@dataclass(frozen=True)
class FeatureNoise:
    """Assign samples as in `iid`, and add Gaussian noise of variance sigma i / n to the inputs of worker i = 1, ..., n.

    Li et al. 2022 (NIID-Bench, "noise-based feature imbalance"). The noise is added to the normalised inputs, and drawn
    anew for every batch.

    Draws: those of `iid`, and in training one `draws.normal` for each batch.

    Args:
        sigma: noise variance of the last worker, >= 0.

    Returns one index array per worker for labels [n]. Cost: O(n), and in training one draw for each input element.

    >>> fedsim.partition_transforms("feature_noise", 2, sigma=0.5)
    [GaussianNoise(variance=0.25), GaussianNoise(variance=0.5)]
    """

    sigma: NonNegativeFloat = 0.1

    def __call__(self, labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
        return iid(labels, n_workers, rng)

    def transforms(self, n_workers: int) -> list[Transform | None]:
        return [GaussianNoise(self.sigma * number / n_workers) for number in range(1, n_workers + 1)]


@partition_strategy("feature_rotation")
@dataclass(frozen=True)
class FeatureRotation:
    """Assign samples as in `iid`, and rotate the images of each of several equal groups of workers by one angle.

    Ghosh et al. 2020 (IFCA, "Rotated MNIST"). Worker i = 0, ..., n - 1 is in group g = floor(i groups / n). Draws:
    those of `iid`.

    Args:
        groups: number of groups, at most n. Images of group g are rotated counter-clockwise by 360 g / groups degrees.
        angles: rotation of each group in degrees, which replaces 360 g / groups.

    Returns one index array per worker for labels [n]. Raises ExperimentError if there are more groups than workers, or
    if the number of angles differs from the number of groups. Cost: O(n), and in training one rotation of each image.

    >>> fedsim.partition_transforms("feature_rotation", 2, groups=2, angles=[0, 45])
    [None, Rotation(degrees=45.0)]
    """

    groups: PositiveInt = 4
    angles: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.angles is not None and len(self.angles) != self.groups:
            raise ExperimentError(
                f"partition.angles = {list(self.angles)}: must contain one angle for each of the {self.groups} groups "
                f"(partition.groups), not {len(self.angles)}"
            )

    def __call__(self, labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
        self._check_groups(n_workers)
        return iid(labels, n_workers, rng)

    def transforms(self, n_workers: int) -> list[Transform | None]:
        self._check_groups(n_workers)
        angles = self.angles or [360 * group / self.groups for group in range(self.groups)]
        worker_angles = [angles[worker * self.groups // n_workers] for worker in range(n_workers)]
        return [Rotation(angle) if angle % 360 else None for angle in worker_angles]

    def _check_groups(self, n_workers: int) -> None:
        if self.groups > n_workers:
            raise ExperimentError(
                f"partition.groups = {self.groups}: must be at most the number of workers, {n_workers}"
            )
