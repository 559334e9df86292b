"""Random draws: generators by purpose, the methods of Draws, and the counter-based generator that they use."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import scipy
import torch

import fedsim
from fedsim.core import philox
from fedsim.core.philox import MASK, Stream, bernoulli, blocks, permutations, shuffles, to_integers, to_uniform, words
from fedsim.core.randomness import (
    WORDS_AHEAD,
    Draws,
    draw_key,
    draw_keys,
    numpy_generator,
    preserve_random_state,
    sample_cohort,
    seed_everything,
    torch_generator,
)

CALLS = {
    "uniform": lambda draws: draws.uniform(5, 3),
    "normal": lambda draws: draws.normal(7),
    "integers": lambda draws: draws.integers(10, 4),
    "permutation": lambda draws: draws.permutation(9),
    "choice": lambda draws: draws.choice(30, 6),
    "choice of few": lambda draws: draws.choice(1000, 6),
}
MANY = {  # up to and beyond the number of words that are drawn ahead
    f"{count} of {dtype}": lambda draws, count=count, dtype=dtype: draws.normal(count, dtype=dtype)
    for count in (1, WORDS_AHEAD // 2 - 3, WORDS_AHEAD // 2, WORDS_AHEAD // 2 + 1, 3 * WORDS_AHEAD)
    for dtype in (torch.float32, torch.float64)
}


def words_of(*coordinates, count, step=0, layer=0):
    """Return the first `count` words of a stream, computed block by block."""
    key = torch.tensor(draw_key(*coordinates))
    stream_words = []
    for number in range(-(-count // 4)):
        stream_words += map(int, blocks(tuple(torch.tensor(c) for c in (number, step, layer, 0)), key))
    return stream_words[:count]


def pairs(words):
    return list(zip(words[::2], words[1::2], strict=True))


def test_each_method_reads_the_next_stream():
    draws = fedsim.Draws.of("test", 1, 2, seed=3)
    uniform = [(word >> 8) / 2**24 for word in words_of(3, "test", 1, 2, count=6, layer=0)]
    assert draws.uniform(2, 3).flatten().tolist() == uniform
    doubles = [(a << 21 | b >> 11) / 2**53 for a, b in pairs(words_of(3, "test", 1, 2, count=6, layer=1))]
    assert draws.uniform(3, dtype=torch.double).tolist() == doubles
    polar = [
        (math.sqrt(-2 * math.log((a + 1) / 2**32)), 2 * math.pi * b / 2**32)
        for a, b in pairs(words_of(3, "test", 1, 2, count=6, layer=2))
    ]
    normal = [value for r, t in polar for value in (r * math.cos(t), r * math.sin(t))]
    assert draws.normal(5, dtype=torch.double).tolist() == pytest.approx(normal[:5], abs=1e-12)
    integers = [((a << 32 | b) * 77) >> 64 for a, b in pairs(words_of(3, "test", 1, 2, count=8, layer=3))]
    assert draws.integers(77, 2, 2).flatten().tolist() == integers
    keys = [a << 32 | b for a, b in pairs(words_of(3, "test", 1, 2, count=40, layer=4))]
    assert draws.permutation(20).tolist() == sorted(range(20), key=keys.__getitem__)
    keys = words_of(3, "test", 1, 2, count=50, layer=5)
    assert draws.choice(50, 8).tolist() == sorted(sorted(range(50), key=keys.__getitem__)[:8])
    integers = [((a << 32 | b) * 320) >> 64 for a, b in pairs(words_of(3, "test", 1, 2, count=148, layer=6))]
    assert draws.choice(320, 5).tolist() == sorted(list(dict.fromkeys(integers))[:5])


@pytest.mark.parametrize("call", [*CALLS.values(), *MANY.values()], ids=[*CALLS, *MANY])
def test_the_draws_of_a_step_do_not_depend_on_other_steps(call):
    def expected(step, calls):
        alone = Draws(torch.tensor(draw_key(0, "x", 7)), step)
        return [call(alone) for _ in range(calls)]

    at = Draws.of("x", 7, seed=0).steps()
    seen = []
    for step in (0, 1, 2, 5000, 3, 0, 10**9):
        draws = at(step)
        drawn = [call(draws), call(draws)]
        assert all(map(torch.equal, drawn, expected(step, 2)))
        seen += drawn[: 1 + (step != 0)]
    assert len({numbers.numpy().tobytes() for numbers in seen}) == len(seen) - 1, "only step 0 was drawn twice"


def test_types_and_shapes_equal_those_of_pytorch():
    draws = Draws.of("x", seed=0)
    assert draws.uniform().shape == ()
    assert draws.normal(0, 3).shape == (0, 3)
    assert draws.normal(2).dtype == torch.get_default_dtype()
    assert draws.uniform(2, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert [draws.integers(5, 3).dtype, draws.permutation(0).dtype, draws.choice(5, 0).dtype] == [torch.int64] * 3


@pytest.mark.parametrize(("n", "expected"), [(6, 100), (128, 20)])
def test_a_choice_is_distinct_ascending_and_uniform(n, expected):
    counts, draws = np.zeros(n), Draws.of("choice", seed=0)
    for _ in range(expected * n // 2):
        chosen = draws.choice(n, 2).tolist()
        assert chosen == sorted(set(chosen))
        counts[chosen] += 1
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - 2 / n))
    assert 0.001 < scipy.stats.chi2(n - 1).cdf(statistic) < 0.999
    assert draws.choice(n, n).tolist() == list(range(n))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda draws: draws.integers(0, 2), "high = 0: must be between 1 and 2.31"),
        (lambda draws: draws.choice(3, 4), "count = 4: must be between 0 and n = 3"),
    ],
)
def test_a_wrong_range_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(Draws.of("x", seed=0))


PUBLISHED = [  # kat_vectors of Random123: counter, key and block
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
    computed = blocks(tuple(torch.tensor([word]) for word in counter), torch.tensor([signed]))
    assert tuple(int(word) for word in computed) == block


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
        integers = to_integers(drawn, high).tolist()
        assert integers == [((a << 32 | b) * high) >> 64 for a, b in drawn.view(-1, 2).tolist()]
    assert to_integers(torch.tensor([MASK, MASK, 0, 0]), 2**31).tolist() == [2**31 - 1, 0]


def test_permutations_of_several_sizes():
    sizes = torch.tensor([5, 0, 9])
    orders = permutations(Stream(keys_of(1, 2, 3)), sizes, 9)
    for row, size in zip(orders.tolist(), sizes.tolist(), strict=True):
        assert sorted(row[:size]) == list(range(size))
        assert row[size:] == list(range(size, 9))
    alone = permutations(Stream(keys_of(1)), torch.tensor([5]), 5)
    assert torch.equal(alone[0], orders[0, :5])


def test_booleans_of_several_layers_equal_those_of_each_layer_alone(monkeypatch):
    keys, steps = keys_of(1, 2, 3), torch.tensor([[0], [7]])
    counts, probabilities = [5, 1, 40, 8], [0.5, 0.0, 0.3, 1.0]
    masks = bernoulli(Stream(keys, steps, 2), counts, probabilities)
    monkeypatch.setattr(philox, "BLOCKS_AT_ONCE", 18)  # forces several parts
    in_parts = bernoulli(Stream(keys, steps, 2), counts, probabilities)
    for layer, (count, probability) in enumerate(zip(counts, probabilities, strict=True)):
        expected = words(Stream(keys, steps, 2 + layer), count) < round(probability * 2**32)
        assert torch.equal(masks[layer], expected)
        assert torch.equal(in_parts[layer], expected)
    assert not masks[1].any()
    assert masks[3].all()


def test_permutations_one_after_another_are_those_side_by_side(monkeypatch):
    sizes, steps = torch.tensor([5, 1, 0, 8, 31]), torch.tensor([0, 3, 1, 1, 2])
    stream = Stream(keys_of(1, 2, 3, 4, 5), steps)
    expected = permutations(stream, sizes, 31)
    for at_once in (2**15, 4):
        monkeypatch.setattr(philox, "BLOCKS_AT_ONCE", at_once)
        orders, of_entry = shuffles(stream, sizes, torch.tensor([0, 3, 4, 4, 8]), 24)
        begin = 0
        for row, size in enumerate(sizes.tolist()):
            assert torch.equal(orders[begin : begin + size], expected[row, :size])
            assert (of_entry[begin : begin + size] == row).all()
            begin += size + size % 2
        assert begin == len(orders) == len(of_entry)


def test_a_key_is_a_pure_function_of_all_its_arguments():
    assert draw_key(1, "batches", 2, 3) == draw_key(1, "batches", 2, 3)
    variants = {draw_key(1, "batches", 2, 3), draw_key(2, "batches", 2, 3), draw_key(1, "cohort", 2, 3)}
    variants |= {draw_key(1, "batches", 3, 2), draw_key(1, "batches", 23), draw_key(1, "batches", 2)}
    assert len(variants) == 6
    assert draw_key(0, "model") == 5784575990485341678  # equal on every machine


def test_generators_repeat_and_do_not_touch_global_state():
    before_torch, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert np.array_equal(numpy_generator(1, "x", 2).permutation(50), numpy_generator(1, "x", 2).permutation(50))
    a, b = (torch.rand(5, generator=torch_generator(1, "x", 2)) for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(before_torch, torch.get_rng_state())
    assert np.array_equal(before_numpy, np.random.get_state()[1])


def test_seeding_repeats_whatever_a_model_may_draw_from():
    draws = []
    with preserve_random_state(torch.device("cpu")):
        for worker in (3, 3, 4):
            seed_everything(torch.device("cpu"), 0, "forward", 1, worker)
            mask = torch.nn.functional.dropout(torch.ones(100))
            draws.append([*mask.tolist(), np.random.rand(), random.random()])
    assert draws[0] == draws[1]
    assert not {*draws[0][-2:]} & {*draws[2][-2:]}
    assert draws[0][:100] != draws[2][:100]


def test_the_global_random_state_is_put_back_even_after_an_error():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    def draw_and_fail():
        with preserve_random_state(torch.device("cpu")):
            seed_everything(torch.device("cpu"), 5, "x")
            raise ZeroDivisionError

    before = states()
    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert states() == before


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 10), (1, 1), (1_000_000, 5)])
def test_a_cohort_is_distinct_workers_in_ascending_order(n, size):
    cohort = sample_cohort(0, 1, n, size)
    assert len(set(cohort.tolist())) == size
    assert np.array_equal(cohort, np.sort(cohort))
    assert cohort.min() >= 0
    assert cohort.max() < n
    assert size == n or cohort.tolist() != sample_cohort(0, 2, n, size).tolist()


def test_keys_of_many_workers_are_the_keys_of_each():
    rounds, workers = np.array([1, 3, 3, 10**9]), np.array([0, 5, 2**40, 7])
    keys = draw_keys(11, "batches", rounds, workers)
    pairs = zip(rounds.tolist(), workers.tolist(), strict=True)
    assert keys.dtype == np.int64
    assert keys.tolist() == [draw_key(11, "batches", round, worker) for round, worker in pairs]
    assert len(draw_keys(11, "batches", rounds[:0], workers[:0])) == 0
