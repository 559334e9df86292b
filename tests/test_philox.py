"""The counter-based generator: its published vectors, and what is promised of the numbers made of it."""

from __future__ import annotations

import pytest
import torch

from fedsim.philox import MASK, Stream, blocks, normal, permutations, uniform, words
from fedsim.randomness import draw_key

PUBLISHED = [  # kat_vectors of Random123: counter, key, block
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def keys_of(*coordinates: int) -> torch.Tensor:
    return torch.tensor([draw_key(0, "test", coordinate) for coordinate in coordinates])


@pytest.mark.parametrize(("counter", "key", "block"), PUBLISHED)
def test_blocks_are_the_published_ones(counter, key, block):
    low, high = key
    signed = (high << 32 | low) - (1 << 64 if high >> 31 else 0)
    found = blocks(tuple(torch.tensor([word]) for word in counter), torch.tensor([signed]))
    assert tuple(int(word) for word in found) == block


def test_words_lie_block_by_block_and_more_of_them_begin_with_the_same():
    keys = keys_of(3)
    stream = Stream(keys, 5, 7)
    numbers = torch.arange(100_000 // 4 + 1)
    expected = torch.stack(blocks((numbers, torch.tensor(5), torch.tensor(7), torch.tensor(0)), keys), -1).flatten()
    assert torch.equal(words(stream, 100_001)[0], expected[:100_001])
    assert torch.equal(words(stream, 10)[0], expected[:10])
    assert words(stream, 0).shape == (1, 0)


def test_many_streams_at_once_are_each_as_if_alone():
    keys, steps = keys_of(1, 2, 3), torch.tensor([[0], [1]])
    together = words(Stream(keys, steps, 4), 50)
    assert together.shape == (2, 3, 50)
    for step in range(2):
        for place in range(3):
            assert torch.equal(together[step, place], words(Stream(keys[place], step, 4), 50))


def test_uniform_numbers_are_from_the_half_open_interval():
    keys = keys_of(1)
    for dtype in (torch.float32, torch.float64):
        numbers = uniform(Stream(keys), 200_000, dtype)
        assert numbers.dtype == dtype
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert abs(float(numbers.mean()) - 0.5) < 4 / (12 * 200_000) ** 0.5
    assert torch.equal(numbers * 2**53, (numbers * 2**53).round())


def test_normal_numbers_have_the_moments_and_the_tails_of_the_normal_distribution():
    numbers = normal(Stream(keys_of(1, 2)), 100_001, torch.float64)
    assert numbers.shape == (2, 100_001)
    assert numbers.mean().abs() < 4 / 200_002**0.5
    assert abs(float(numbers.var()) - 1) < 4 * (2 / 200_002) ** 0.5
    beyond = (numbers.abs() > 2).double().mean()
    assert abs(float(beyond) - 0.0455) < 4 * (0.0455 / 200_002) ** 0.5


def test_permutations_of_several_sizes():
    sizes = torch.tensor([5, 0, 9])
    found = permutations(Stream(keys_of(1, 2, 3)), sizes, 9)
    for row, size in zip(found.tolist(), sizes.tolist(), strict=True):
        assert sorted(row[:size]) == list(range(size))
        assert row[size:] == list(range(size, 9))
    alone = permutations(Stream(keys_of(1)), torch.tensor([5]), 5)
    assert torch.equal(alone[0], found[0, :5])


def test_permutations_are_uniform():
    keys = keys_of(*range(24_000))
    found = permutations(Stream(keys), torch.full((24_000,), 4), 4)
    counts = (found * torch.tensor([64, 16, 4, 1])).sum(1).bincount()
    counts = counts[counts > 0].double()
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7  # 0.999 quantile of chi squared with 23 degrees of freedom
