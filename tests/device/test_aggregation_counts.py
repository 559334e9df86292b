"""Kernel launches and host waits of one aggregation. The bounds may only decrease."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, column_blocks, make_pipeline, resolve, rule
from fedsim.aggregation.numerics.columns import LINE, most_columns, small_blocks
from tests.device.agreement import some_gpu, to_gpu
from tests.device.pretend import GPU, download, upload

N, D, F = 10, 40_000, 1
DRAW = 140  # launches of one Draws call, most of them in the ten rounds of Philox
BOUNDS = {  # (launches, waits)
    "mean": (1, 0),
    "weighted_mean": (1, 0),
    "qfedavg": (6, 1),
    "norm_clipping": (6, 1),
    "arc": (6, 1),
    "centered_clipping": (6, 1),
    "geometric_median": (15, 1),
    "median": (5, 0),
    "trimmed_mean": (4, 0),
    "meamed": (10, 0),
    "phocas": (9, 0),
    "sign_vote": (5, 0),
    "krum": (15, 1),
    "multi_krum": (17, 1),
    "bulyan": (24, 1),
    "mda": (17, 1),
    "smea": (17, 1),
    "medoid": (15, 1),
    "cge": (8, 1),
    "aksel": (13, 1),
    "monna": (9, 1),
    "caf": (15, 1),
    "dnc": (10 + DRAW, 2),
    "signguard": (17 + DRAW, 2),
    "fltrust": (18, 3),
    "foolsgold": (15, 1),
}
PIPELINES = {"nnm + median": (20, 1), "nnm + mean": (15, 1), "bucketing + krum": (17, 1), "arc + mean": (6, 1)}


@pytest.fixture(autouse=True)
def clear_the_cache_of_memory_sizes():
    yield
    most_columns.cache_clear()


def rows(n=N, d=D):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


def cohort_of(pipeline, updates):
    weights = torch.arange(1.0, N + 1, dtype=torch.double) if pipeline.needs_weights else None
    root = updates[0] if pipeline.accepts("root") else None
    return AggregationInputs(updates, weights, root, losses=torch.ones(N, dtype=torch.double))


@pytest.mark.parametrize("name", [*(registration.name for registration in rule), *PIPELINES])
def test_an_aggregation_on_a_gpu_takes_few_launches_and_waits(name, gpu):
    names = name.split(" + ")
    known = {name for part in names for name in (fedsim.rules() | fedsim.pre_aggregators())[part].parameters}
    pipeline = make_pipeline(resolve(names, {key: value for key, value in {"f": F, "c": 1.0}.items() if key in known}))
    expected = pipeline(cohort_of(pipeline, rows()))
    on_gpu = cohort_of(pipeline, upload(rows()))
    with gpu.counting() as counts:
        result = pipeline(on_gpu)
    assert torch.allclose(
        download(result.update), expected.update, rtol=0, atol=1e-5 * float(expected.update.abs().max())
    )
    launches, waits = (BOUNDS | PIPELINES)[name]
    assert counts.launches <= launches, counts.table()
    assert counts.waits <= waits, counts.table()


@pytest.mark.parametrize(("weights", "launches"), [(None, 1), ([1.0, 0.0, 3.0], 3)])
def test_a_mean_on_a_gpu_looks_at_its_result_alone(weights, launches, gpu):
    updates = rows(3)
    updates[1] = torch.nan if weights else updates[1]  # its weight is zero, so NaN is allowed
    expected, on_gpu = fedsim.aggregate(updates, weights), upload(updates)
    with gpu.counting() as counts:
        result = fedsim.aggregate(on_gpu, weights)
    assert torch.allclose(download(result), expected, rtol=0, atol=1e-6)
    assert (counts.launches, counts.waits) == (launches + 1, 1), counts.table()


@pytest.mark.parametrize("name", ["median", "meamed", "krum", "multi_krum", "bulyan", "signguard", "dnc"])
def test_a_rule_that_exceeds_the_memory_of_a_gpu_works_in_blocks(name, gpu, monkeypatch):
    monkeypatch.setattr("fedsim.aggregation.numerics.columns.total_memory_of", lambda device: 8 * 64 * N * 1_000)
    params = {"f": F} if "f" in fedsim.rules()[name].parameters else {}
    updates = rows()
    on_gpu = upload(updates)
    assert [block.stop - block.start for block in small_blocks(on_gpu)] == [960] * 41 + [640]
    result = download(fedsim.aggregate(on_gpu, rule=name, **params))
    assert torch.allclose(result, fedsim.aggregate(updates, rule=name, **params), rtol=0, atol=1e-5)


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


def drawn_mean(updates, draws):
    """A linear rule with random coefficients that are drawn on the device of the updates."""
    coefficients = draws.uniform(len(updates), dtype=updates.dtype)
    return coefficients / coefficients.sum() @ updates


drawn_mean.columnwise = drawn_mean.linear = True


@pytest.mark.gpu
def test_a_linear_rule_draws_the_same_coefficients_on_a_gpu():
    updates = rows().double()
    for rules in (drawn_mean, ["bucketing", drawn_mean]):
        expected = fedsim.aggregate(updates, rule=rules, seed=3)
        with some_gpu():
            result = fedsim.aggregate(to_gpu(updates), rule=rules, seed=3)
        assert torch.allclose(result.cpu(), expected, rtol=0, atol=1e-12)
