"""Rows that are finite, but whose squares are not, or are nothing."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import Gram, pre_aggregator, rule
from fedsim.aggregation.columns import combine, distances_to, norms
from fedsim.aggregation.magnitude import in_range, power_of_two, unit_for
from fedsim.errors import ExperimentError

N, D, F = 11, 40, 2
VANISHING = {"qfedavg"}  # the larger a row, the less there is of any of them
UNBOUNDED = {"mean", "weighted_mean", "foolsgold"}  # by definition, one row moves the result as far as it likes
ABSOLUTE = {"norm_clipping", "centered_clipping", "geometric_median", "qfedavg", "sign_vote"}  # parameters in units

every_rule = pytest.mark.parametrize("plug", list(rule), ids=lambda plug: plug.name)
every_pre_aggregator = pytest.mark.parametrize("plug", list(pre_aggregator), ids=lambda plug: plug.name)


def rows(size: float, count: int = F) -> torch.Tensor:
    """Honest rows around 1, and `count` whose every entry is `size` or minus that."""
    x = torch.randn(N, D, dtype=torch.double, generator=torch.Generator().manual_seed(3)) + 1
    x[N - count :] = size * x[N - count :].sign()
    return x


def given(plug, x):
    params = {name: value for name, value in {"f": F, "c": 2.0}.items() if name in plug.parameters.model_fields}
    if plug.name == "dnc":
        params["c"] = 1.0
    if "root" in plug.takes:
        params["root"] = x[:3].mean(0)
    if "losses" in plug.takes:
        params["losses"] = torch.arange(1.0, N + 1)
    return params


def apply(plug, x):
    return fedsim.aggregate(x, rule=plug.name, **given(plug, x))


def close(result, expected, rtol=1e-9):
    return torch.allclose(result, expected, rtol=0, atol=rtol * float(expected.abs().max()))


@every_rule
@pytest.mark.parametrize("count", [1, F])
@pytest.mark.parametrize("size", [1e160, 1e200, 1e280])
def test_a_huge_row_counts_as_a_large_one_does(plug, size, count):
    expected, result = apply(plug, rows(1e100, count)), apply(plug, rows(size, count))
    if plug.name in UNBOUNDED:
        expected = expected * (size / 1e100)
    if plug.name in VANISHING:
        assert float(result.abs().max()) < 1e-9
    else:
        assert close(result, expected)
        assert plug.name in UNBOUNDED or float(result.abs().max()) < 10


@every_pre_aggregator
@pytest.mark.parametrize("size", [1e160, 1e200, 1e280])
def test_pre_aggregators_make_of_huge_rows_what_they_make_of_large_ones(plug, size):
    expected, result = (fedsim.pre_aggregate(x, plug.name, **given(plug, x)) for x in (rows(1e100), rows(size)))
    huge = expected.abs().amax(1) > 10
    expected[huge] *= size / 1e100
    assert all(close(*pair) for pair in zip(result, expected, strict=True))


@every_rule
@pytest.mark.parametrize("make", [lambda: rows(1.0), lambda: rows(1e6)], ids=["alike", "outliers"])
@pytest.mark.parametrize("power", [-700, -560, 520, 900])
def test_all_rows_times_a_power_of_two_give_the_result_times_that(plug, power, make):
    if plug.name in ABSOLUTE:
        return
    x = make()
    scaled = apply(plug, x * 2.0**power)
    assert close(scaled * 2.0**-power, apply(plug, x), 1e-12)


@every_rule
@pytest.mark.parametrize("size", [1e19, 1e38])
def test_huge_rows_in_float32_give_what_they_give_in_double(plug, size):
    x = rows(size).float()
    result, exact = apply(plug, x).double(), apply(plug, x.double())
    assert close(result, exact, 1e-5) or (plug.name in VANISHING and float(result.abs().max()) < 1e-9)


def weiszfeld(x, nu=1e-6, tol=1e-10):
    """In extended precision, whose range no square leaves."""
    x = np.array(x.tolist(), dtype=np.longdouble)
    z, step = x.mean(0), np.inf
    while step > tol * np.sqrt((z**2).sum()):
        pull = 1 / np.maximum(nu, np.sqrt(((z - x) ** 2).sum(1)))
        moved = (pull / pull.sum()) @ x
        z, step = moved, np.sqrt(((moved - z) ** 2).sum())
    return torch.tensor(z.astype(float))


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="no extended precision here")
@pytest.mark.parametrize("size", [1e3, 1e8, 1e15, 1e30, 1e100, 1e153, 1e200, 1e280])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_geometric_median_is_exact_however_far_the_outliers_are(size, shift):
    x = rows(size) + shift
    assert torch.allclose(fedsim.aggregate(x, rule="geometric_median"), weiszfeld(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1e6, 1e12])
@pytest.mark.parametrize("n", [3, 5, 12])
def test_an_outlier_does_not_make_all_other_rows_as_good_a_medoid(n, size):
    for seed in range(20):
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, 17)))
        x[n // 2] *= size
        exact = [[Decimal(float(value)) for value in row] for row in x]
        sums = [sum(sum((p - q) ** 2 for p, q in zip(a, b, strict=True)).sqrt() for b in exact) for a in exact]
        if sorted(sums)[1] - min(sums) > 1e-3:  # more than the outlier's distance has digits for
            assert torch.equal(fedsim.aggregate(x, rule="medoid"), x[sums.index(min(sums))])


@pytest.mark.parametrize("size", [1e6, 1e12])
@pytest.mark.parametrize("f", [1, 2, 4])
def test_beside_an_outlier_dnc_still_tells_the_other_rows_apart(f, size):
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


def test_dnc_of_rows_that_lie_equally_far_along_keeps_the_first():
    x = torch.tensor([[1.0, 0.1], [-1.0, -0.1], [1.0, -0.1], [-1.0, 0.1]], dtype=torch.double)
    assert torch.equal(fedsim.aggregate(x, rule="dnc", f=2), x[:2].mean(0))


@pytest.mark.parametrize("name", ["krum", "medoid", "caf", "geometric_median", "foolsgold"])
def test_what_no_unit_of_length_can_hold_is_an_error_with_the_numbers(name):
    params = {"f": 2} if "f" in rule.get(name).parameters.model_fields else {}
    with pytest.raises(ExperimentError, match=r"values up to 1.7e\+308 beside rows that are \S+ apart"):
        fedsim.aggregate(rows(1.7e308), rule=name, **params)


@pytest.mark.parametrize(
    ("name", "params"), [("norm_clipping", {"c": 1.0}), ("arc", {"f": 2}), ("centered_clipping", {})]
)
def test_a_norm_beyond_float64_is_an_error_where_rows_are_clipped(name, params):
    with pytest.raises(ExperimentError, match=r"2 of 11 rows are longer than float64 can say \(1.8e\+308\)"):
        fedsim.aggregate(rows(1.7e308), rule=name, **params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_that_is_not_finite_is_an_error_with_the_numbers(dtype):
    most = torch.finfo(dtype).max
    with pytest.raises(ExperimentError, match=r"mean: the result is not finite; the updates hold values up to "):
        fedsim.aggregate(torch.full((3, 2), most, dtype=dtype))
    assert fedsim.aggregate(torch.full((3, 2), most, dtype=dtype), nonfinite="keep").isinf().all()


def test_a_gram_says_in_what_unit_it_counts():
    plain, huge = Gram(rows(1.0)), Gram(rows(1.0) * 2.0**600)
    assert plain.unit == Gram(torch.zeros(3, 2)).unit == 1
    assert math.log2(huge.unit).is_integer()
    assert torch.allclose(huge.distances * (huge.unit / 2.0**600), plain.distances, rtol=1e-12)
    assert huge.mixed(torch.eye(N, dtype=torch.double)).unit == huge.unit


def test_distances_are_right_where_their_squares_are_out_of_range():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-1.0, 2.0]], dtype=torch.double)
    for scale in (1e-300, 1e-200, 1.0, 1e200, 1e300):
        assert torch.allclose(norms(x * scale) / scale, x.norm(dim=1), rtol=1e-12)
        assert torch.allclose(distances_to(x * scale, x[0] * scale) / scale, (x - x[0]).norm(dim=1), rtol=1e-12)
    assert norms(torch.tensor([[1.7e308, 1.7e308]], dtype=torch.double)).isinf()
    assert norms(torch.zeros(2, 0)).tolist() == [0, 0]


def test_a_coefficient_below_what_float32_holds_still_counts():
    updates = torch.tensor([[2e38, 1e38], [1.0, 2.0]])
    result = combine(torch.tensor([1e-44, 0.5], dtype=torch.double), updates)
    assert torch.allclose(result, torch.tensor([0.5 + 2e-6, 1.0 + 1e-6]), rtol=0, atol=1e-7)


def test_units_are_powers_of_two_that_bring_sums_of_squares_into_range():
    for dtype, peaks in ((torch.double, [5e-324, 1e-200, 1e200, 1.7e308]), (torch.float32, [1e-38, 1.0, 3e38])):
        for peak in peaks:
            for terms in (1, 1_000, 10**9):
                scaled = peak / unit_for(peak, terms, dtype)
                assert math.log2(unit_for(peak, terms, dtype)).is_integer()
                assert bool(in_range(torch.tensor(terms * scaled**2, dtype=dtype))) or peak == 5e-324
    assert [unit_for(peak, 5, torch.double) for peak in (0.0, math.inf, math.nan)] == [1, 1, 1]
    assert [power_of_two(value) for value in (0.0, 1.0, 3.0, math.inf)] == [1, 0.5, 0.25, 1]
