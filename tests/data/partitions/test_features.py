"""Changes to images: augmentations, and partitions in which workers see their samples differently."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import scipy
import torch

import fedsim
from fedsim.core.randomness import Draws
from fedsim.data.augmentation import ImageTransform, augmentation, flip, shift
from fedsim.data.partitions.features import GaussianNoise, Rotation

FEATURES = ["feature_noise", "feature_rotation"]


@pytest.fixture
def images():
    return torch.randn(6, 3, 9, 9, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def rotated(image, degrees):
    """Return a [height, width] image turned counter-clockwise about its centre: bilinear, zero outside, in loops."""
    height, width = image.shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    result = np.zeros((height, width))
    for row in range(height):
        for column in range(width):
            x, up = column - (width - 1) / 2, (height - 1) / 2 - row
            from_x, from_up = x * cos + up * sin, -x * sin + up * cos  # rotated back by the angle
            at_row, at_column = (height - 1) / 2 - from_up, from_x + (width - 1) / 2
            for r in (math.floor(at_row), math.floor(at_row) + 1):
                for c in (math.floor(at_column), math.floor(at_column) + 1):
                    if 0 <= r < height and 0 <= c < width:
                        weight = (1 - abs(at_row - r)) * (1 - abs(at_column - c))
                        result[row, column] += weight * image[r, c]
    return result


@pytest.mark.parametrize("strategy", FEATURES)
def test_transforms_are_deterministic_and_keep_the_shape(strategy, images):
    before = images.clone()
    for transform in filter(None, fedsim.partition_transforms(8, strategy)):
        again = pickle.loads(pickle.dumps(transform))
        assert again == transform
        for dtype in (torch.float32, torch.float64):
            batch = images.to(dtype)
            first, second = (ImageTransform.of(t)(batch, {"draws": Draws.of(1, "x")}) for t in (transform, again))
            assert torch.equal(first, second)
            assert (first.shape, first.dtype, first.device) == (batch.shape, dtype, batch.device)
    assert torch.equal(images, before)


def test_noise_has_its_variance():
    transforms = fedsim.partition_transforms(4, "feature_noise", sigma=0.8)
    assert transforms == [GaussianNoise(v) for v in (0.8 * 1 / 4, 0.8 * 2 / 4, 0.8 * 3 / 4, 0.8 * 4 / 4)]
    draws, zeros = Draws.of(0, "x"), torch.zeros(1000, 1, 10, 10, dtype=torch.double)
    for number, transform in enumerate(transforms, start=1):
        noise = transform(images=zeros, draws=draws)
        assert float(noise.mean()) == pytest.approx(0, abs=0.01)
        assert float(noise.var()) == pytest.approx(0.8 * number / 4, rel=0.03)
        distribution = scipy.stats.norm(scale=math.sqrt(0.8 * number / 4))
        assert scipy.stats.kstest(noise.flatten()[:20_000].numpy(), distribution.cdf).pvalue > 0.01


def test_groups_have_their_angles():
    assert fedsim.partition_transforms(8, "feature_rotation") == [
        None, None, Rotation(90), Rotation(90), Rotation(180), Rotation(180), Rotation(270), Rotation(270),
    ]  # fmt: skip
    angles = [t.degrees if t else 0 for t in fedsim.partition_transforms(10, "feature_rotation", groups=3)]
    assert angles == [0] * 4 + [120] * 3 + [240] * 3
    assert fedsim.partition_transforms(3, "feature_rotation", groups=3, angles=[-30, 0, 720]) == [
        Rotation(-30), None, None,
    ]  # fmt: skip


@pytest.mark.parametrize("degrees", [90, 180, 270, 360, -90, 450])
def test_quarter_rotations_of_squares_are_exact(images, degrees):
    turned = Rotation(degrees)(images=images)
    assert torch.equal(turned, torch.rot90(images, degrees // 90, (2, 3)))


@pytest.mark.parametrize("shape", [(9, 9), (8, 8), (12, 5)])
@pytest.mark.parametrize("degrees", [45.0, 90.0, 137.0, -17.0])
def test_rotations_are_bilinear(shape, degrees):
    images = torch.randn(2, 3, *shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    turned = Rotation(degrees)(images=images)
    for image, result in zip(images.flatten(0, 1), turned.flatten(0, 1), strict=True):
        assert np.allclose(result.numpy(), rotated(image.numpy(), degrees), rtol=0, atol=1e-9)


def test_the_memory_format_is_kept(images):
    batch = images.contiguous(memory_format=torch.channels_last)
    for transform in (Rotation(90), Rotation(45), GaussianNoise(1.0)):
        assert ImageTransform.of(transform)(batch, {"draws": Draws.of(0, "x")}).stride() == batch.stride()


@pytest.fixture
def batch():
    return torch.randn(50, 3, 9, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("registration", list(augmentation), ids=lambda registration: registration.name)
def test_every_augmentation_is_deterministic(registration, batch):
    augment, before = registration.bind(registration.check({})), batch.clone()
    first, again, with_seed_2 = (augment(batch, Draws.of(seed, "augment")) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, with_seed_2)
    assert first.shape == batch.shape
    assert torch.equal(batch, before)


def test_flip_mirrors_about_half_of_the_images(batch):
    flipped = flip(batch, Draws.of(0, "x"))
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, batch, strict=True)]
    unchanged = [torch.equal(a, b) for a, b in zip(flipped, batch, strict=True)]
    assert all(m != k for m, k in zip(mirrored, unchanged, strict=True))
    assert 10 < sum(mirrored) < 40
    assert torch.equal(flip(batch, Draws.of(0, "x"), probability=1.0), batch.flip(3))


def test_shift_moves_images_and_repeats_the_edge(batch):
    shifted = shift(batch, Draws.of(0, "x"), pixels=2)
    rows, columns = torch.arange(9), torch.arange(7)
    offsets = set()
    for before, after in zip(batch, shifted, strict=True):
        candidates = {
            (dy, dx)
            for dy in range(-2, 3)
            for dx in range(-2, 3)
            if torch.equal(after, before[:, (rows + dy).clamp(0, 8)][:, :, (columns + dx).clamp(0, 6)])
        }
        assert len(candidates) == 1
        offsets |= candidates
    assert len(offsets) > 10
    assert {dy for dy, _ in offsets} == {dx for _, dx in offsets} == {-2, -1, 0, 1, 2}
