"""Changes to images: augmentations, and partitions in which workers see their samples differently."""

from __future__ import annotations

import importlib
import math
import pickle

import numpy as np
import pytest
import scipy
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import Draws, torch_generator
from fedsim.data.augmentation import ImageTransform, augmentation, crop, cutout, flip, shift
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
    for transform in filter(None, fedsim.partition_transforms(strategy, 8)):
        again = pickle.loads(pickle.dumps(transform))
        assert again == transform
        for dtype in (torch.float32, torch.float64):
            batch = images.to(dtype)
            first, second = (ImageTransform.of(t)(batch, {"draws": Draws.of("x", seed=1)}) for t in (transform, again))
            assert torch.equal(first, second)
            assert (first.shape, first.dtype, first.device) == (batch.shape, dtype, batch.device)
    assert torch.equal(images, before)


def test_noise_has_its_variance():
    transforms = fedsim.partition_transforms("feature_noise", 4, sigma=0.8)
    assert transforms == [GaussianNoise(v) for v in (0.8 * 1 / 4, 0.8 * 2 / 4, 0.8 * 3 / 4, 0.8 * 4 / 4)]
    draws, zeros = Draws.of("x", seed=0), torch.zeros(400, 1, 10, 10, dtype=torch.double)
    for number, transform in enumerate(transforms, start=1):
        noise = transform(images=zeros, draws=draws)
        assert float(noise.mean()) == pytest.approx(0, abs=0.01)
        assert float(noise.var()) == pytest.approx(0.8 * number / 4, rel=0.03)
        distribution = scipy.stats.norm(scale=math.sqrt(0.8 * number / 4))
        assert scipy.stats.kstest(noise.flatten()[:20_000].numpy(), distribution.cdf).pvalue > 0.01


def test_groups_have_their_angles():
    assert fedsim.partition_transforms("feature_rotation", 8) == [
        None, None, Rotation(90), Rotation(90), Rotation(180), Rotation(180), Rotation(270), Rotation(270),
    ]  # fmt: skip
    angles = [t.degrees if t else 0 for t in fedsim.partition_transforms("feature_rotation", 10, groups=3)]
    assert angles == [0] * 4 + [120] * 3 + [240] * 3
    assert fedsim.partition_transforms("feature_rotation", 3, groups=3, angles=[-30, 0, 720]) == [
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
        assert ImageTransform.of(transform)(batch, {"draws": Draws.of("x", seed=0)}).stride() == batch.stride()


@pytest.fixture
def batch():
    return torch.randn(50, 3, 9, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("registration", list(augmentation), ids=lambda registration: registration.name)
def test_every_augmentation_is_deterministic(registration, batch):
    augment, before = registration.bind(registration.check({})), batch.clone()
    first, again, with_seed_2 = (augment(batch, Draws.of("augment", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, with_seed_2)
    assert first.shape == batch.shape
    assert torch.equal(batch, before)


def test_flip_mirrors_about_half_of_the_images(batch):
    flipped = flip(batch, Draws.of("x", seed=0))
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, batch, strict=True)]
    unchanged = [torch.equal(a, b) for a, b in zip(flipped, batch, strict=True)]
    assert all(m != k for m, k in zip(mirrored, unchanged, strict=True))
    assert 10 < sum(mirrored) < 40
    assert torch.equal(flip(batch, Draws.of("x", seed=0), probability=1.0), batch.flip(3))


def test_shift_moves_images_and_repeats_the_edge(batch):
    shifted = shift(batch, Draws.of("x", seed=0), pixels=2)
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


def test_crop_cuts_a_window_of_the_padded_image(batch):
    cropped = crop(batch, Draws.of("x", seed=0), padding=2)
    padded, offsets = F.pad(batch, [2] * 4), set()
    for number, after in enumerate(cropped):
        windows = {
            (y, x) for y in range(5) for x in range(5) if torch.equal(after, padded[number, :, y : y + 9, x : x + 7])
        }
        assert len(windows) == 1
        offsets |= windows
    assert {y for y, _ in offsets} == {x for _, x in offsets} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("size", [1, 3, 4, 20])
def test_cutout_sets_a_square_around_a_pixel_of_the_image_to_zero(batch, size):
    altered, centres = cutout(batch, Draws.of("x", seed=0), size=size), set()
    for before, after in zip(batch, altered, strict=True):
        fitting = set()
        for y in range(9):
            for x in range(7):
                expected = before.clone()
                top, left = y - size // 2, x - size // 2
                expected[:, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
                fitting |= {(y, x)} if torch.equal(after, expected) else set()
        assert fitting
        centres |= fitting
    assert {y for y, _ in centres} == set(range(9))
    assert {x for _, x in centres} == set(range(7))


PIXELS = torch.zeros(1), torch.ones(1)  # the normalisation of images that are pixels in [0, 1]


def applied(name, images, seed=1, normalisation=PIXELS, **params):
    registration = augmentation.get(f"torchvision:{name}")
    augment = registration.bind(registration.check(params))
    return augment(images=images, generator=torch_generator(seed, "augment"), normalisation=normalisation)


TRANSFORMS = [
    *[(name, {}) for name in ("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide", "RandomErasing")],
    *[(name, {}) for name in ("RandomHorizontalFlip", "RandomVerticalFlip", "RandomPhotometricDistort")],
    *[(name, {}) for name in ("GaussianNoise", "RandomPerspective")],
    ("RandomAffine", {"degrees": 30, "translate": [0.1, 0.2]}),
    ("RandomRotation", {"degrees": [10, 80]}),
    ("ElasticTransform", {"sigma": 0.5}),
    ("RandomCrop", {"size": [9, 7], "padding": 2}),
    ("RandomResizedCrop", {"size": [9, 7]}),
    ("ColorJitter", {"brightness": 0.5, "hue": 0.2}),
    ("GaussianBlur", {"kernel_size": 3}),
]


@pytest.mark.parametrize(("name", "params"), TRANSFORMS)
def test_a_transform_of_torchvision_is_what_torchvision_computes_from_the_seed(batch, name, params):
    images, mean, deviation = batch.abs().clamp(max=1), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    normalisation = mean.view(3, 1, 1), deviation.view(3, 1, 1)
    global_state = torch.get_rng_state()
    found = applied(name, (images - normalisation[0]) / normalisation[1], 5, normalisation, **params)
    assert torch.equal(torch.get_rng_state(), global_state)
    theirs = getattr(importlib.import_module("torchvision.transforms.v2"), name)(**params)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=torch_generator(5, "augment"))))
        pixels = theirs(((images - normalisation[0]) / normalisation[1]) * normalisation[1] + normalisation[0])
    torch.testing.assert_close(found * normalisation[1] + normalisation[0], pixels, rtol=0, atol=1e-5)


def test_transforms_of_torchvision_in_a_row_draw_different_numbers(batch):
    registration = augmentation.get("torchvision:GaussianNoise")
    noise = registration.bind(registration.check({"clip": False}))
    generator, normalisation = torch_generator(0, "x"), PIXELS
    once = noise(images=batch, generator=generator, normalisation=normalisation)
    twice = noise(images=once, generator=generator, normalisation=normalisation)
    assert not torch.allclose(once - batch, twice - once, atol=1e-3)
    copied = pickle.loads(pickle.dumps(noise))
    assert torch.equal(copied(images=batch, generator=torch_generator(0, "x"), normalisation=normalisation), once)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"name": "torchvision:RandomAffin", "degrees": 3},
            "no such random transform in torchvision.transforms.v2; did",
        ),
        ({"name": "torchvision:Normalize"}, "no such random transform in torchvision.transforms.v2"),
        ({"name": "torchvision:RandomAffine"}, "data.augment[0].degrees: is required"),
        ({"name": "torchvision:RandomAffine", "degrees": -3}, "If degrees is a single number, it must be positive"),
        ({"name": "torchvision:RandomErasing", "p": "x"}, "data.augment[0].p = "),
    ],
)
def test_a_wrong_transform_of_torchvision_is_one_line(table, message):
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.Experiment(data={"augment": [table]})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_transform_that_changes_the_shape_or_fails_is_an_error(batch):
    with pytest.raises(fedsim.ExperimentError, match=r"^data\.augment: .*ElasticTransform fails: RuntimeError: "):
        applied("ElasticTransform", batch)  # its blur is wider than the images
    with pytest.raises(fedsim.ExperimentError, match=r"RandomCrop changes images \[50, 3, 9, 7\] to \[50, 3, 4, 4\]"):
        applied("RandomCrop", batch, size=4)


def test_the_normalisation_leads_back_to_pixels():
    pixels = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8).repeat(1, 3, 1, 1)
    data = fedsim.TensorData.of_images(pixels, torch.arange(4), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    mean, deviation = data.normalisation
    samples, _ = data.gather(torch.arange(4))
    torch.testing.assert_close(samples * deviation + mean, pixels / 255)
