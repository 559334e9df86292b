"""Kernel launches and host waits of one aggregation. The bounds may only decrease."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.aggregation import column_blocks, rule
from fedsim.aggregation.numerics.columns import LINE, SHARE, WORKING, most_columns, small_blocks
from tests.device.agreement import some_gpu, to_gpu
from tests.device.pretend import GPU, SMALL, download, pretend_gpu, upload

N, D, F = 10, 40_000, 1
DRAW = 140  # launches of one Draws call, most of them in the ten rounds of Philox
BOUNDS = {  # (launches, waits, uploads) of fedsim.aggregate, also for ten times as many updates
    "mean": (1, 0, 0),
    "weighted_mean": (1, 0, 0),
    "qfedavg": (2, 1, 1),
    "norm_clipping": (2, 1, 1),
    "arc": (2, 1, 1),
    "centered_clipping": (2, 1, 1),
    "geometric_median": (7, 1, 1),
    "median": (4, 0, 0),  # two of these launches make the result NaN if an update is not finite
    "trimmed_mean": (4, 0, 0),
    "meamed": (9, 0, 0),
    "phocas": (9, 0, 0),
    "sign_vote": (5, 0, 0),
    "krum": (7, 1, 0),
    "multi_krum": (7, 1, 1),
    "bulyan": (15, 1, 1),
    "mda": (7, 1, 1),
    "smea": (7, 1, 1),
    "medoid": (7, 1, 0),
    "cge": (2, 1, 1),
    "aksel": (6, 1, 1),
    "monna": (4, 1, 1),
    "caf": (7, 1, 0),
    "dnc": (6 + DRAW, 1, 1),
    "signguard": (11 + DRAW, 1, 1),
    "fltrust": (7, 1, 1),
    "zeno_plus_plus": (8, 1, 2),
    "afl_guard": (7, 1, 1),
    "foolsgold": (7, 1, 0),
    "clipped_gossip": (5, 1, 2),  # the weights go to the device and back with the distances
    "ios": (7, 1, 1),
    "bridge": (7, 0, 0),
}
PIPELINES = {
    "nnm + median": (9, 1, 1),
    "nnm + mean": (7, 1, 1),
    "nnm + krum": (7, 1, 1),
    "arc + mean": (2, 1, 1),
    "norm_clipping + krum": (8, 2, 0),
    "bucketing + krum": (8, 1, 1),
    "bucketing + median": (5, 0, 1),
}
NAMES = [registration.name for registration in rule if "models" not in registration.takes]
PRE_AGGREGATORS = {"nnm": (7, 1, 1), "bucketing": (1, 0, 1), "arc": (2, 1, 1), "norm_clipping": (2, 1, 1)}


@pytest.fixture(autouse=True)
def clear_the_cache_of_memory_sizes():
    yield
    most_columns.cache_clear()


def rows(n=N, d=D):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


def parameters_of(names):
    known = {
        name
        for part in names
        for name in (fedsim.components("rules") | fedsim.components("pre-aggregators"))[part].parameters
    }
    return {key: value for key, value in {"f": F, "c": 1.0, "lam": 1.5}.items() if key in known}


def call_of(name, updates):
    """Return a function that aggregates `updates` by the rule or pipeline called `name`."""
    names = name.split(" + ")
    inputs = {"root": updates[0].clone()} if name in ("fltrust", "zeno_plus_plus", "afl_guard") else {}
    inputs |= {"losses": torch.ones(len(updates))} if name == "qfedavg" else {}
    inputs |= {"own": 0} if name in rule.names() and "own" in rule.get(name).takes else {}
    return lambda: fedsim.aggregate(updates, names, **parameters_of(names), **inputs)


def assert_at_most(bounds, counts):
    for count, bound in zip((counts.launches, counts.waits, counts.uploads), bounds, strict=True):
        assert count <= bound, counts.table()


@pytest.mark.parametrize("n", [N, 10 * N])
@pytest.mark.parametrize("name", [*NAMES, *PIPELINES])
def test_an_aggregation_on_a_gpu_takes_few_launches_and_waits(name, n, gpu):
    updates = rows(n, N * D // n)
    expected, on_gpu = call_of(name, updates)(), upload(updates)
    aggregate = call_of(name, on_gpu)
    with gpu.counting() as counts:
        result = aggregate()
    assert torch.allclose(download(result), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert_at_most((BOUNDS | PIPELINES)[name], counts)


@pytest.mark.parametrize("n", [N, 10 * N])
@pytest.mark.parametrize("name", fedsim.components("pre-aggregators"))
def test_a_pre_aggregator_on_a_gpu_takes_few_launches_and_waits(name, n, gpu):
    on_gpu = upload(rows(n, N * D // n))
    with gpu.counting() as counts:
        fedsim.pre_aggregate(on_gpu, name, **parameters_of([name]))
    assert_at_most(PRE_AGGREGATORS[name], counts)


@pytest.mark.parametrize("name", ["krum", "mean", "nnm + median"])
def test_the_number_of_updates_changes_no_launches(name, gpu):
    """Equal updates, and lists of state_dicts, need no launches for each update."""
    launches = []
    for n in (N, 4 * N):
        updates = rows(n, 50)
        updates[n // 2 :] = updates[0]  # Byzantine workers often send equal updates
        as_dicts = [{"w": row[:30].view(5, 6), "b": row[30:]} for row in map(upload, updates)]
        aggregate = call_of(name, as_dicts)
        with gpu.counting() as counts:
            aggregate()
        launches.append(counts.launches)
    assert launches[0] == launches[1], counts.table()


@pytest.mark.parametrize(("weights", "counted"), [(None, (1, 0, 0)), ([1.0, 0.0, 3.0], (2, 0, 2))])
def test_a_mean_on_a_gpu_waits_for_nothing(weights, counted, gpu):
    updates = rows(3)
    updates[1] = torch.nan if weights else updates[1]  # its weight is zero, so NaN is allowed
    expected, on_gpu = fedsim.aggregate(updates, weights=weights), upload(updates)
    with gpu.counting() as counts:
        result = fedsim.aggregate(on_gpu, weights=weights)
    assert torch.allclose(download(result), expected, rtol=0, atol=1e-6)
    assert (counts.launches, counts.waits, counts.uploads) == counted, counts.table()


@pytest.mark.parametrize("name", ["median", "meamed", "krum", "multi_krum", "bulyan", "signguard", "dnc"])
def test_a_rule_that_exceeds_the_memory_of_a_gpu_works_in_blocks(name, gpu, monkeypatch):
    monkeypatch.setattr("fedsim.aggregation.numerics.columns.total_memory_of", lambda device: 8 * 64 * N * 1_000)
    params = {"f": F} if "f" in fedsim.components("rules")[name].parameters else {}
    updates = rows()
    on_gpu = upload(updates)
    assert [block.stop - block.start for block in small_blocks(on_gpu)] == [960] * 41 + [640]
    result = download(fedsim.aggregate(on_gpu, name, **params))
    assert torch.allclose(result, fedsim.aggregate(updates, name, **params), rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("d", [1, 21_840, 1_663_370])
def test_each_process_has_one_block_of_columns_of_a_gpu(d, count, gpu):
    blocks = [list(column_blocks(d, index, count, n=100, device=GPU)) for index in range(count)]
    assert all(len(own) <= 1 for own in blocks)
    columns = [column for own in blocks for block in own for column in (block.start, block.stop)]
    assert columns[0] == 0
    assert columns[-1] == d
    assert columns[1:-1:2] == columns[2::2]
    assert all(start % LINE == 0 for start in columns[::2])


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_the_blocks_of_all_processes_together_fit_into_the_share_of_a_gpu(count):
    n, d = 1_000, 1_663_370
    with pretend_gpu(SMALL):
        blocks = [max(column_blocks(d, index, count, n=n, device=GPU), key=width) for index in range(count)]
    assert 0.9 < WORKING * n * sum(map(width, blocks)) / (SHARE * SMALL.total) <= 1


def width(block):
    return block.stop - block.start


def drawn_mean(updates, draws):
    """A linear rule with random coefficients that are drawn on the device of the updates."""
    coefficients = draws.uniform(len(updates), dtype=updates.dtype)
    return coefficients / coefficients.sum() @ updates


drawn_mean.columnwise = drawn_mean.linear = True


@pytest.mark.gpu
def test_a_linear_rule_draws_the_same_coefficients_on_a_gpu():
    updates = rows().double()
    for rules in (drawn_mean, ["bucketing", drawn_mean]):
        expected = fedsim.aggregate(updates, rules, seed=3)
        with some_gpu():
            result = fedsim.aggregate(to_gpu(updates), rules, seed=3)
        assert torch.allclose(result.cpu(), expected, rtol=0, atol=1e-12)


def test_a_rule_may_return_coefficients_that_are_on_the_gpu(gpu):
    def halves(updates):
        return fedsim.aggregation.LinearCombination(updates.new_full((len(updates),), 0.5))

    assert torch.equal(download(fedsim.aggregate(upload(torch.ones(3, 2)), halves)), torch.full((2,), 1.5))
