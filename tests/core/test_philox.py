"""The counter-based generator: its published vectors, and what is promised of the numbers made of it."""

from __future__ import annotations

import pytest
import torch

from fedsim.core import philox
from fedsim.core.philox import (
    MASK,
    Stream,
    bernoulli,
    blocks,
    permutations,
    shuffles,
    to_integers,
    to_uniform,
    words,
)
from fedsim.core.randomness import draw_key

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_uniform_number_of_a_type_is_below_one(dtype):
    largest = to_uniform(torch.full((4,), MASK), dtype)
    assert largest.dtype == dtype
    assert (largest < 1).all()
    assert (largest == 1 - torch.finfo(dtype).eps / 2).all()


def test_integers_are_the_upper_part_of_a_product():
    drawn = words(Stream(keys_of(5)), 2000)[0]
    for high in (1, 2, 10, 3**15, 2**31 - 1, 2**31):
        found = to_integers(drawn, high).tolist()
        assert found == [((a << 32 | b) * high) >> 64 for a, b in drawn.view(-1, 2).tolist()]
    assert to_integers(torch.tensor([MASK, MASK, 0, 0]), 2**31).tolist() == [2**31 - 1, 0]


def test_permutations_of_several_sizes():
    sizes = torch.tensor([5, 0, 9])
    found = permutations(Stream(keys_of(1, 2, 3)), sizes, 9)
    for row, size in zip(found.tolist(), sizes.tolist(), strict=True):
        assert sorted(row[:size]) == list(range(size))
        assert row[size:] == list(range(size, 9))
    alone = permutations(Stream(keys_of(1)), torch.tensor([5]), 5)
    assert torch.equal(alone[0], found[0, :5])


def test_booleans_of_several_layers_are_those_of_each_layer_alone(monkeypatch):
    keys, steps = keys_of(1, 2, 3), torch.tensor([[0], [7]])
    counts, probabilities = [5, 1, 40, 8], [0.5, 0.0, 0.3, 1.0]
    found = bernoulli(Stream(keys, steps, 2), counts, probabilities)
    monkeypatch.setattr(philox, "BLOCKS_AT_ONCE", 18)  # in several parts
    in_parts = bernoulli(Stream(keys, steps, 2), counts, probabilities)
    for layer, (count, probability) in enumerate(zip(counts, probabilities, strict=True)):
        expected = words(Stream(keys, steps, 2 + layer), count) < round(probability * 2**32)
        assert torch.equal(found[layer], expected)
        assert torch.equal(in_parts[layer], expected)
    assert not found[1].any()
    assert found[3].all()


def test_permutations_one_after_another_are_those_side_by_side(monkeypatch):
    sizes, steps = torch.tensor([5, 1, 0, 8, 31]), torch.tensor([0, 3, 1, 1, 2])
    stream = Stream(keys_of(1, 2, 3, 4, 5), steps)
    expected = permutations(stream, sizes, 31)
    for at_once in (2**15, 4):
        monkeypatch.setattr(philox, "BLOCKS_AT_ONCE", at_once)
        found, of_entry = shuffles(stream, sizes, torch.tensor([0, 3, 4, 4, 8]), 24)
        begin = 0
        for row, size in enumerate(sizes.tolist()):
            assert torch.equal(found[begin : begin + size], expected[row, :size])
            assert (of_entry[begin : begin + size] == row).all()
            begin += size + size % 2
        assert begin == len(found) == len(of_entry)
