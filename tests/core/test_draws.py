"""The methods of Draws: the stream that each reads, and the numbers that it makes of its words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch

import fedsim
from fedsim.core.philox import blocks
from fedsim.core.randomness import WORDS_AHEAD, Draws, draw_key

CALLS = {
    "uniform": lambda draws: draws.uniform(5, 3),
    "normal": lambda draws: draws.normal(7),
    "integers": lambda draws: draws.integers(10, 4),
    "permutation": lambda draws: draws.permutation(9),
    "choice": lambda draws: draws.choice(30, 6),
    "choice of few": lambda draws: draws.choice(1000, 6),
}


def words_of(*coordinates, count, step=0, layer=0):
    """The words of a stream, computed block by block."""
    key = torch.tensor(draw_key(*coordinates))
    found = []
    for number in range(-(-count // 4)):
        found += map(int, blocks(tuple(torch.tensor(c) for c in (number, step, layer, 0)), key))
    return found[:count]


def pairs(words):
    return list(zip(words[::2], words[1::2], strict=True))


def test_each_method_reads_the_next_stream():
    draws = fedsim.Draws.of(3, "test", 1, 2)
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


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_draws_of_a_step_do_not_depend_on_other_steps(call):
    def expected(step, calls):
        fresh = Draws.of(0, "x", 7).steps()(step)
        return [call(fresh) for _ in range(calls)]

    at = Draws.of(0, "x", 7).steps()
    seen = []
    for step in (0, 1, 2, 5000, 3, 0, 10**9):
        draws = at(step)
        found = [call(draws), call(draws)]
        assert all(map(torch.equal, found, expected(step, 2)))
        seen += found[: 1 + (step != 0)]
    assert len({str(numbers.tolist()) for numbers in seen}) == len(seen) - 1, "step 0 came twice"


@pytest.mark.parametrize("count", [1, 7, WORDS_AHEAD // 2 - 3, WORDS_AHEAD // 2, WORDS_AHEAD // 2 + 1, 3 * WORDS_AHEAD])
def test_drawing_ahead_does_not_change_numbers(count):
    at = Draws.of(1, "x").steps()
    at(0).uniform(count)
    for step in (0, 1):
        ahead, alone = at(step), Draws(torch.tensor(draw_key(1, "x")), step)
        for dtype in (torch.float32, torch.float64):
            assert torch.equal(ahead.normal(count, dtype=dtype), alone.normal(count, dtype=dtype))


def test_types_and_shapes_are_those_of_pytorch():
    draws = Draws.of(0, "x")
    assert draws.uniform().shape == ()
    assert draws.normal(0, 3).shape == (0, 3)
    assert draws.normal(2).dtype == torch.get_default_dtype()
    assert draws.uniform(2, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert [draws.integers(5, 3).dtype, draws.permutation(0).dtype, draws.choice(5, 0).dtype] == [torch.int64] * 3


@pytest.mark.parametrize(("n", "expected"), [(6, 100), (128, 20)])
def test_a_choice_is_distinct_ascending_and_uniform(n, expected):
    counts, draws = np.zeros(n), Draws.of(0, "choice")
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
        (lambda draws: draws.integers(0, 2), "high = 0: must be from 1 to 2.31"),
        (lambda draws: draws.choice(3, 4), "count = 4: must be from 0 to n = 3"),
    ],
)
def test_a_wrong_range_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(Draws.of(0, "x"))
