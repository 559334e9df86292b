"""Rules with very distant outliers: bounded effect, exact results, and errors for overflow."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import pre_aggregator, rule
from fedsim.errors import ExperimentError
from tests.aggregation import reference
from tests.aggregation.rules import parameters_of

N, D, F = 11, 40, 2
VANISHING = {"qfedavg"}  # the longer a row, the smaller the result
UNBOUNDED = {"mean", "weighted_mean", "foolsgold"}  # one row can move the result by any amount

every_rule = pytest.mark.parametrize("plug", list(rule), ids=lambda plug: plug.name)


def rows(size: float, count: int = F) -> torch.Tensor:
    """Honest rows around 1, and `count` rows whose entries are `size` or -`size`."""
    x = torch.randn(N, D, dtype=torch.double, generator=torch.Generator().manual_seed(3)) + 1
    x[N - count :] = size * x[N - count :].sign()
    return x


def apply(plug, x):
    return fedsim.aggregate(x, rule=plug.name, **parameters_of(plug, x, f=F))


def close(result, expected, rtol=1e-9):
    return torch.allclose(result, expected, rtol=0, atol=rtol * float(expected.abs().max()))


@every_rule
@pytest.mark.parametrize("count", [1, F])
def test_a_huge_row_has_the_effect_of_a_large_row(plug, count):
    expected, result = apply(plug, rows(1e50, count)), apply(plug, rows(1e150, count))
    if plug.name in VANISHING:
        assert float(result.abs().max()) < 1e-9
    else:
        assert close(result, expected * (1e100 if plug.name in UNBOUNDED else 1))
        assert plug.name in UNBOUNDED or float(result.abs().max()) < 10


@pytest.mark.parametrize("plug", list(pre_aggregator), ids=lambda plug: plug.name)
def test_pre_aggregators_treat_huge_rows_as_large_rows(plug):
    expected, result = (
        fedsim.pre_aggregate(x, plug.name, **parameters_of(plug, x, f=F)) for x in (rows(1e50), rows(1e150))
    )
    expected[expected.abs().amax(1) > 10] *= 1e100
    assert all(close(*pair) for pair in zip(result, expected, strict=True))


@every_rule
def test_huge_rows_in_float32_give_the_result_of_float64(plug):
    x = rows(1e38).float()
    result, exact = apply(plug, x).double(), apply(plug, x.double())
    assert close(result, exact, 1e-5) or (plug.name in VANISHING and float(result.abs().max()) < 1e-9)


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="no extended precision here")
@pytest.mark.parametrize("size", [1e3, 1e15, 1e30, 1e150])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_geometric_median_is_exact_beside_distant_outliers(size, shift):
    x = rows(size) + shift
    exact = reference.geometric_median(np.array(x.tolist(), dtype=np.longdouble)).astype(float)
    assert np.allclose(fedsim.aggregate(x, rule="geometric_median"), exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1e6, 1e12])
@pytest.mark.parametrize("n", [3, 5, 12])
def test_medoid_distinguishes_rows_beside_an_outlier(n, size):
    for seed in range(20):
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, 17)))
        x[n // 2] *= size
        exact = [[Decimal(float(value)) for value in row] for row in x]
        sums = [sum(sum((p - q) ** 2 for p, q in zip(a, b, strict=True)).sqrt() for b in exact) for a in exact]
        if sorted(sums)[1] - min(sums) > 1e-3:  # else the outlier's distance has too few digits
            assert torch.equal(fedsim.aggregate(x, rule="medoid"), x[sums.index(min(sums))])


@pytest.mark.parametrize("size", [1e6, 1e12])
@pytest.mark.parametrize("f", [1, 2, 4])
def test_dnc_distinguishes_rows_beside_an_outlier(f, size):
    compared = 0
    for seed in range(10):
        x = np.random.default_rng(seed).standard_normal((6, 17))
        x[2] *= size
        centred = x - x.mean(0)
        along = np.abs(centred @ np.linalg.svd(centred)[2][0])
        kept, gap = np.argsort(along)[: 6 - f], np.diff(np.sort(along))[5 - f]
        if gap < 0.01:  # fewer digits than the outlier leaves
            continue
        result = fedsim.aggregate(torch.from_numpy(x), rule="dnc", f=f)
        assert np.allclose(result, x[np.sort(kept)].mean(0), rtol=0, atol=1e-9 * np.abs(x[kept]).max())
        compared += 1
    assert compared


def test_dnc_keeps_the_first_of_rows_with_equal_projections():
    x = torch.tensor([[1.0, 0.1], [-1.0, -0.1], [1.0, -0.1], [-1.0, 0.1]], dtype=torch.double)
    assert torch.equal(fedsim.aggregate(x, rule="dnc", f=2), x[:2].mean(0))


@pytest.mark.parametrize(
    "name", ["krum", "medoid", "caf", "geometric_median", "foolsgold", "dnc", "norm_clipping", "arc"]
)
def test_a_norm_that_overflows_is_an_error(name):
    line = r"rows are too long: .* overflow \(values up to 1e\+200\)"
    if name in ("norm_clipping", "arc"):
        line = "2 of 11 rows have infinite norms"
    with pytest.raises(ExperimentError, match=f"^updates: {line}$"):
        apply(rule.get(name), rows(1e200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_that_is_not_finite_is_an_error(dtype):
    most = torch.finfo(dtype).max
    with pytest.raises(ExperimentError, match=r"mean: the result is not finite; updates have values up to "):
        fedsim.aggregate(torch.full((3, 2), most, dtype=dtype))
    assert fedsim.aggregate(torch.full((3, 2), most, dtype=dtype), nonfinite="keep").isinf().all()
