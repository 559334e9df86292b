"""Statistical tests of random draws: of words, of what is made of them, and between streams that belong to neighbours.

All seeds are fixed, so a test passes always or never. The bounds are 4 standard deviations, or p > 0.001.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from fedsim.core.philox import Stream, normal, shuffles, words
from fedsim.core.randomness import Draws, draw_key

STREAMS, LONG = 64, 4_000
LIMIT = 4.0  # standard deviations
FAMILIES = ["seed", "purpose", "round", "worker", "step", "layer", "block"]


def neighbours(family: str) -> torch.Tensor:
    """Words [STREAMS, LONG] of streams that differ in one coordinate, by one from each to the next."""
    coordinates = {"seed": 0, "purpose": "dropout", "round": 3, "worker": 7}
    numbers = torch.arange(STREAMS)
    if family == "block":  # number k of all streams, k from 0 to STREAMS - 1, for one stream as long as all of them
        return (
            words(Stream(key_of(*coordinates.values())), STREAMS * LONG)
            .view(LONG // 4, STREAMS, 4)
            .transpose(0, 1)
            .flatten(1)
        )
    if family in ("step", "layer"):
        return words(Stream(key_of(*coordinates.values()), **{family: numbers}), LONG)
    keys = []
    for number in range(STREAMS):
        change = f"purpose{number}" if family == "purpose" else coordinates[family] + number
        keys.append(key_of(*(coordinates | {family: change}).values()))
    return words(Stream(torch.stack(keys), 1, 2), LONG)


def key_of(*drawn) -> torch.Tensor:
    return torch.tensor(draw_key(*drawn))


def bits_of(numbers: torch.Tensor, count: int = 32) -> torch.Tensor:
    """The bits of each number, the lowest first, float64 [count, numbers]."""
    return torch.stack([(numbers.flatten() >> bit & 1).double() for bit in range(count)])


def assert_uniform(cells: torch.Tensor, count: int) -> None:
    """Pearson's test that cells 0 to count - 1 are equally frequent; too even is a fault too."""
    found = torch.bincount(cells.flatten(), minlength=count).numpy()
    assert len(found) == count
    assert 1e-3 < stats.chisquare(found).pvalue < 1 - 1e-3


@pytest.mark.parametrize("distance", [1, STREAMS // 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_of_neighbours_are_independent(family, distance):
    drawn = neighbours(family)
    one, other = drawn[:-distance], drawn[distance:]
    assert abs(correlation(one, other)) < LIMIT
    differing = bits_of(one ^ other)
    assert ((differing.mean(1) - 0.5).abs() * 2 * math.sqrt(differing.shape[1])).max() < LIMIT
    per_pair = torch.stack([torch.tensor(correlation(a, b)) for a, b in zip(one, other, strict=True)])
    assert stats.kstest(per_pair.numpy(), "norm").pvalue > 1e-3
    assert_uniform((one >> 28) * 16 + (other >> 28), 256)
    assert_uniform((one & 15) * 16 + (other & 15), 256)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Correlation of two equally long sets of words, in standard deviations of that of independent ones."""
    pair = torch.stack([one.flatten(), other.flatten()]).double()
    return float(torch.corrcoef(pair)[0, 1]) * math.sqrt(pair.shape[1])


def test_keys_of_neighbours_share_nothing():
    keys = torch.tensor([draw_key(seed, "x", r, w) for seed in range(5) for r in range(20) for w in range(200)])
    assert len(keys.unique()) == len(keys)
    for bits in (bits_of(keys, 63), bits_of(keys[1:] ^ keys[:-1], 63)):
        assert ((bits.mean(1) - 0.5).abs() * 2 * math.sqrt(bits.shape[1])).max() < LIMIT
    texts = [(1, "x", 2, 3), (1, "x", 23), (12, "x", 3), (1, "x", 3, 2), (1, "x2", 3)]
    assert len({draw_key(*text) for text in texts}) == len(texts)


@pytest.mark.parametrize("varied", ["worker", "epoch"])
def test_orders_of_workers_and_epochs_are_uniform_permutations(varied):
    if varied == "worker":
        stream = Stream(torch.tensor([draw_key(0, "batches", 1, worker) for worker in range(24_000)]))
    else:
        stream = Stream(key_of(0, "batches", 1, 1), torch.arange(24_000))
    found = shuffles(stream, torch.tensor(5).expand(24_000), 3 * torch.arange(24_000), 3 * 24_000)[0].view(24_000, 6)[
        :, :5
    ]
    ranks = (found * torch.tensor([625, 125, 25, 5, 1])).sum(1).unique(return_counts=True)[1]
    assert len(ranks) == 120
    assert 1e-3 < stats.chisquare(ranks.numpy()).pvalue < 1 - 1e-3
    kept = found[1:] == found[:-1]  # places at which two neighbours agree: one in five
    assert abs(float(kept.double().mean()) - 0.2) < LIMIT * math.sqrt(0.16 / kept.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_pass_for_normal_ones(dtype):
    drawn = normal(Stream(key_of(5, "test")), 200_000, dtype).double()
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert stats.anderson(drawn[:50_000].numpy(), method="interpolate").pvalue > 1e-2
    first, second = drawn.view(-1, 2).unbind(1)  # of one pair of words
    for power in (1, 2):
        assert abs(correlation(first**power, second**power)) < LIMIT
    assert stats.kstest((first**2 + second**2).numpy(), stats.chi2(2).cdf).pvalue > 1e-3


def test_calls_of_draws_are_independent_of_each_other_and_of_other_steps():
    at = Draws.of(0, "x").steps()
    calls = []
    for step in range(3):
        draws = at(step)
        calls += [draws.uniform(20_000), draws.uniform(20_000), draws.normal(20_000), draws.integers(1000, 20_000)]
    pairs = torch.corrcoef(torch.stack([call.double() for call in calls])) - torch.eye(len(calls))
    assert pairs.abs().max() * math.sqrt(20_000) < LIMIT
