"""Partitions under which workers hold the same classes but see them differently."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from fedsim.data.partitions.sizes import iid
from fedsim.data.partitions.strategy import Transform, partition_strategy
from fedsim.errors import ExperimentError
from fedsim.randomness import Draws


@dataclass(frozen=True)
class GaussianNoise:
    """A transform that adds to every number its own draw from N(0, variance)."""

    variance: float

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        if not images.is_floating_point():
            raise ExperimentError(f'partition.strategy = "feature_noise": inputs of {images.dtype} take no noise')
        return images + draws.normal(*images.shape, dtype=images.dtype).mul_(math.sqrt(self.variance))


@dataclass(frozen=True)
class Rotation:
    """A transform that turns images [batch, channels, height, width] counter-clockwise about their centre.

    What comes in from outside the frame is zero. Exact, pixel by pixel, where the angle is a multiple of 90 degrees and
    the frame fits (a quarter turn of a square, a half turn of anything); else bilinear.
    """

    degrees: float

    def __call__(self, images: Tensor) -> Tensor:
        if images.ndim != 4:
            raise ExperimentError(
                'partition.strategy = "feature_rotation": needs images [batch, channels, height, width], not '
                f"inputs of shape {tuple(images.shape)}"
            )
        turns = self.degrees / 90
        exact = turns.is_integer() and (turns % 2 == 0 or images.shape[2] == images.shape[3])
        rotated = images.rot90(int(turns % 4), (2, 3)) if exact else self._resampled(images)
        return torch.empty_like(images).copy_(rotated)  # in the memory format they came in

    def _resampled(self, images: Tensor) -> Tensor:
        """Each pixel of the result from where it was before the turn; positions are in units of half the frame."""
        cos, sin = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        ratio = images.shape[2] / images.shape[3]
        inverse = images.new_tensor([[cos, -sin * ratio, 0], [sin / ratio, cos, 0]])
        grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@partition_strategy("feature_noise")
@dataclass(frozen=True)
class FeatureNoise:
    """As `iid`, and worker i = 1, ..., n sees its samples through Gaussian noise of variance sigma i / n.

    Li et al. 2022 (NIID-Bench, "noise-based feature imbalance"). The noise is on inputs as training sees them, that is
    after normalisation, and is drawn anew for every batch.

    Draws: those of `iid`; the noise is one `draws.normal` for each batch.

    Labels [n], result one index array per worker. Cost: O(n), and in training one draw for each number of a batch.
    """

    sigma: NonNegativeFloat = 0.1

    def __call__(self, labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
        return iid(labels, n_workers, rng)

    def transforms(self, n_workers: int) -> list[Transform | None]:
        return [GaussianNoise(self.sigma * number / n_workers) for number in range(1, n_workers + 1)]


@partition_strategy("feature_rotation")
@dataclass(frozen=True)
class FeatureRotation:
    """As `iid`, and workers come in equal groups, each of which sees its images turned by an angle of its own.

    Ghosh et al. 2020 (IFCA, "Rotated MNIST"). Worker i = 0, ..., n - 1 is in group g = floor(i groups / n): runs of
    workers whose lengths differ by at most one. Angles are counter-clockwise, in degrees.

    Args:
        groups: how many; group g is turned by 360 g / groups.
        angles: one per group, in place of these.

    Draws: those of `iid`.

    Raises ExperimentError where there are more groups than workers, or not as many angles as groups.

    Labels [n], result one index array per worker. Cost: O(n), and in training one resampling of each image.
    """

    groups: PositiveInt = 4
    angles: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.angles is not None and len(self.angles) != self.groups:
            raise ExperimentError(
                f"partition.angles = {list(self.angles)}: must be one for each of partition.groups = {self.groups}, "
                f"not {len(self.angles)}"
            )

    def __call__(self, labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
        self._check_groups(n_workers)
        return iid(labels, n_workers, rng)

    def transforms(self, n_workers: int) -> list[Transform | None]:
        self._check_groups(n_workers)
        angles = self.angles or [360 * group / self.groups for group in range(self.groups)]
        of_workers = [angles[worker * self.groups // n_workers] for worker in range(n_workers)]
        return [Rotation(angle) if angle % 360 else None for angle in of_workers]

    def _check_groups(self, n_workers: int) -> None:
        if self.groups > n_workers:
            raise ExperimentError(f"partition.groups = {self.groups}: more than the {n_workers} workers")
