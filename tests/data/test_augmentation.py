from __future__ import annotations

import pytest
import torch

from fedsim.core.randomness import Draws
from fedsim.data.augmentation import augmentation, flip, shift


@pytest.fixture
def images():
    return torch.randn(50, 3, 9, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("plug", list(augmentation), ids=lambda plug: plug.name)
def test_every_augmentation_is_deterministic(plug, images):
    augment, before = plug.bind(plug.check({})), images.clone()
    first, again, other = (augment(images, Draws.of(seed, "augment")) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == images.shape
    assert torch.equal(images, before)


def test_flip_mirrors_about_half_of_the_images(images):
    flipped = flip(images, Draws.of(0, "x"))
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(m != k for m, k in zip(mirrored, kept, strict=True))
    assert 10 < sum(mirrored) < 40
    assert torch.equal(flip(images, Draws.of(0, "x"), probability=1.0), images.flip(3))


def test_shift_moves_images_and_repeats_the_edge(images):
    shifted = shift(images, Draws.of(0, "x"), pixels=2)
    rows, columns = torch.arange(9), torch.arange(7)
    offsets = set()
    for before, after in zip(images, shifted, strict=True):
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
