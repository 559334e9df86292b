"""Properties of every rule for any rows; with distant outliers: bounded effect, exact results, and errors."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import column_blocks, pre_aggregator, rule
from fedsim.aggregation.numerics.columns import BLOCK
from fedsim.errors import ExperimentError
from tests.aggregation import reference


def parameters_of(registration, updates, f=1):
    """Return the arguments that a rule needs in `fedsim.aggregate` (f, c, lam, root, losses, own)."""
    values = {"f": f, "c": 1.0 if registration.name == "dnc" else 2.0, "lam": 1.5}
    params = {name: value for name, value in values.items() if name in registration.parameters.model_fields}
    if "root" in registration.takes:
        params["root"] = updates[:3].double().mean(0).to(updates.dtype)
    if "losses" in registration.takes:
        params["losses"] = torch.arange(1.0, len(updates) + 1)
    if "own" in registration.takes:
        params["own"] = 0
    return params


@pytest.fixture
def updates():
    return torch.randn(5, 33, dtype=torch.double, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["mean", "weighted_mean"])
@pytest.mark.parametrize("as_type", [list, torch.tensor])
def test_weights_are_normalised(updates, name, as_type):
    weights = [1.0, 2.0, 3.0, 0.0, 4.0]
    expected = sum(w / 10 * row for w, row in zip(weights, updates, strict=True))
    assert torch.allclose(fedsim.aggregate(updates, name, weights=as_type(weights)), expected, rtol=0, atol=1e-12)
    assert torch.allclose(fedsim.aggregate(updates, name), updates.mean(0), rtol=0, atol=1e-12)


def apply(registration, updates, f=1, **more):
    return fedsim.aggregate(updates, registration.name, **{**parameters_of(registration, updates, f), **more})


COLUMNWISE = [registration for registration in rule if getattr(registration.target, "columnwise", False)]
ALONE = [registration for registration in rule if "models" not in registration.takes]  # also work without a run
every_rule = pytest.mark.parametrize("registration", ALONE, ids=lambda registration: registration.name)


TOLERANCES = {torch.float64: 0, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@every_rule
def test_every_rule_keeps_the_dtype_and_its_input_and_is_close_to_double(registration, updates):
    in_double = torch.cat([updates, updates * 0.9, updates * 0.8])
    for dtype, tolerance in TOLERANCES.items():
        updates = in_double.to(dtype)
        before = updates.clone()
        result = apply(registration, updates)
        assert result.dtype == dtype
        assert result.shape == (33,)
        assert torch.equal(updates, before)
        assert result.data_ptr() not in {row.data_ptr() for row in updates}
        exact = apply(registration, updates.double())
        assert torch.allclose(result.double(), exact, rtol=0, atol=tolerance * float(exact.abs().max())), dtype


@every_rule
def test_every_rule_accepts_one_row_or_states_its_constraint(registration, updates):
    if "f" in registration.parameters.model_fields or registration.name == "foolsgold":
        with pytest.raises(ExperimentError, match=f"{registration.name}: needs .*n = 1"):
            apply(registration, updates[:1])
    elif registration.name in {"sign_vote", "norm_clipping", "qfedavg"}:
        assert apply(registration, updates[:1]).shape == (33,)
    else:
        assert torch.allclose(apply(registration, updates[:1]), updates[0])


@every_rule
def test_every_rule_accepts_equal_rows_zero_rows_and_one_column(registration):
    row = torch.tensor([0.5, -1.0, 0.0, 0.25], dtype=torch.double)
    assert torch.isfinite(apply(registration, row.repeat(8, 1))).all()
    assert not apply(
        registration, torch.zeros(8, 4, dtype=torch.double), root=row if "root" in registration.takes else None
    ).any()
    if registration.name not in {"sign_vote", "foolsgold", "qfedavg"}:
        assert torch.allclose(apply(registration, row.repeat(8, 1)), row, rtol=0, atol=1e-12)
    assert apply(registration, torch.tensor([[1.0], [2.0], [4.0], [8.0], [1.5], [3.0], [2.5], [0.5]])).shape == (1,)


@every_rule
def test_every_rule_is_deterministic_and_leaves_global_generators(registration, updates):
    updates = torch.cat([updates, updates * 0.9])
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert torch.equal(apply(registration, updates), apply(registration, updates))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_outside_a_run_an_error_names_no_setting_of_a_run():
    for nonfinite in ("error", "exclude"):
        with pytest.raises(ExperimentError) as caught:
            fedsim.aggregate(torch.full((4, 3), torch.nan), "median", nonfinite=nonfinite)
        assert str(caught.value) == "all 4 updates contain NaN or infinity; correct what computes the updates"


@every_rule
def test_rows_that_are_not_finite_are_an_error_or_excluded(registration, updates):
    updates = torch.cat([updates, updates * 0.9, updates * 0.8])
    spoilt = updates.clone()
    spoilt[3, 7] = float("inf")  # see test_bad_rows_finds_nan_and_infinity
    root = {"root": updates.mean(0)} if "root" in registration.takes else {}
    with pytest.raises(ExperimentError, match=r"1 of 15 updates contain NaN or infinity \(from workers 3\)"):
        apply(registration, spoilt, **root)
    good = [row for row in range(15) if row != 3]
    losses = {"losses": torch.arange(1.0, 16.0)} if "losses" in registration.takes else {}
    left = {"losses": losses["losses"][good]} if losses else {}
    # the excluded row counts as one of the f Byzantine rows
    fewer = {"f": 0} if "f" in registration.parameters.model_fields else {}
    expected = apply(registration, updates[good], **root, **left, **fewer)
    assert torch.equal(apply(registration, spoilt, nonfinite="exclude", **root, **losses), expected)


def test_a_rule_can_be_an_import_path(updates):
    result = fedsim.aggregate(updates, "tests.components:clipped_mean", c=0.5)
    assert result.norm() <= 0.5
    with pytest.raises(ExperimentError, match="the rule tests.components:clipped_mean does not support weights"):
        fedsim.aggregate(updates, "tests.components:clipped_mean", weights=[1.0] * 5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"must have shape \(5,\) for 5 updates, not \(2,\)"),
        ([0.0] * 5, "not all zero"),
        ([1, 1, 1, 1, -1], "must be finite, >= 0"),
        ([1, 1, 1, 1, float("inf")], "must be finite, >= 0"),
    ],
)
def test_wrong_weights_are_an_error(updates, weights, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.aggregate(updates, weights=weights)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(0, 3), np.zeros((2, 3), int), [1.0], None])
def test_updates_must_be_a_floating_matrix(bad):
    with pytest.raises(ExperimentError, match=r"updates: must be a floating-point tensor of shape \[n, d\]"):
        fedsim.aggregate(bad)


@pytest.mark.parametrize("d", [1, BLOCK, BLOCK + 1, 199_210, 1_663_370, 100_000_000])
@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_blocks_cover_every_column_for_any_number_of_processes(d, count):
    blocks = sorted((b.start, b.stop) for index in range(count) for b in column_blocks(d, index, count))
    assert blocks == [(b.start, b.stop) for b in column_blocks(d)]
    assert blocks[0][0] == 0
    assert blocks[-1][1] == d
    assert all(before[1] == after[0] for before, after in pairwise(blocks))
    assert len(blocks) <= 64


@pytest.mark.parametrize("registration", COLUMNWISE, ids=lambda registration: registration.name)
@pytest.mark.parametrize(("d", "width"), [(33, 10), (BLOCK + 5, BLOCK), (2 * BLOCK, BLOCK)])
def test_columnwise_rules_are_columnwise(registration, d, width):
    updates = torch.randn(9, d, dtype=torch.double, generator=torch.Generator().manual_seed(d))
    parts = [apply(registration, part) for part in updates.split(width, dim=1)]
    assert torch.allclose(apply(registration, updates), torch.cat(parts), rtol=0, atol=1e-14)


N, D, F = 11, 40, 2
VANISHING = {"qfedavg"}  # the longer a row, the smaller the result
UNBOUNDED = {"mean", "weighted_mean", "foolsgold"}  # a single row can move the result arbitrarily far


def rows(size: float, count: int = F) -> torch.Tensor:
    """Return honest rows around 1, followed by `count` rows whose entries are `size` or -`size`."""
    x = torch.randn(N, D, dtype=torch.double, generator=torch.Generator().manual_seed(3)) + 1
    x[N - count :] = size * x[N - count :].sign()
    return x


def close(result, expected, rtol=1e-9):
    return torch.allclose(result, expected, rtol=0, atol=rtol * float(expected.abs().max()))


@every_rule
@pytest.mark.parametrize("count", [1, F])
def test_a_huge_row_has_the_effect_of_a_large_row(registration, count):
    expected, result = apply(registration, rows(1e50, count), F), apply(registration, rows(1e150, count), F)
    if registration.name in VANISHING:
        assert float(result.abs().max()) < 1e-9
    else:
        assert close(result, expected * (1e100 if registration.name in UNBOUNDED else 1))
        assert registration.name in UNBOUNDED or float(result.abs().max()) < 10


@pytest.mark.parametrize("registration", list(pre_aggregator), ids=lambda registration: registration.name)
def test_pre_aggregators_treat_huge_rows_as_large_rows(registration):
    expected, result = (
        fedsim.pre_aggregate(x, registration.name, **parameters_of(registration, x, f=F))
        for x in (rows(1e50), rows(1e150))
    )
    expected[expected.abs().amax(1) > 10] *= 1e100
    assert all(close(*pair) for pair in zip(result, expected, strict=True))


@every_rule
def test_huge_rows_in_float32_give_the_result_of_float64(registration):
    x = rows(1e38).float()
    result, exact = apply(registration, x, F).double(), apply(registration, x.double(), F)
    assert close(result, exact, 1e-5) or (registration.name in VANISHING and float(result.abs().max()) < 1e-9)


@pytest.mark.skipif(
    np.finfo(np.longdouble).max == np.finfo(float).max, reason="this platform has no extended precision"
)
@pytest.mark.parametrize("size", [1e3, 1e15, 1e30, 1e150])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_geometric_median_is_exact_beside_distant_outliers(size, shift):
    x = rows(size) + shift
    exact = reference.geometric_median(np.array(x.tolist(), dtype=np.longdouble)).astype(float)
    assert np.allclose(fedsim.aggregate(x, "geometric_median"), exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1e6, 1e12])
@pytest.mark.parametrize("n", [3, 5, 12])
def test_medoid_distinguishes_rows_beside_an_outlier(n, size):
    for seed in range(20):
        x = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, 17)))
        x[n // 2] *= size
        exact = [[Decimal(float(value)) for value in row] for row in x]
        sums = [sum(sum((p - q) ** 2 for p, q in zip(a, b, strict=True)).sqrt() for b in exact) for a in exact]
        if sorted(sums)[1] - min(sums) > 1e-3:  # otherwise too few digits of the distance to the outlier are correct
            assert torch.equal(fedsim.aggregate(x, "medoid"), x[sums.index(min(sums))])


@pytest.mark.parametrize("size", [1e6, 1e12])
@pytest.mark.parametrize("f", [1, 2, 4])
def test_dnc_distinguishes_rows_beside_an_outlier(f, size):
    compared = 0
    for seed in range(10):
        x = np.random.default_rng(seed).standard_normal((6, 17))
        x[2] *= size
        centred = x - x.mean(0)
        along = np.abs(centred @ np.linalg.svd(centred)[2][0])
        kept_rows, gap = np.argsort(along)[: 6 - f], np.diff(np.sort(along))[5 - f]
        if gap < 0.01:  # below the precision that the outlier leaves
            continue
        result = fedsim.aggregate(torch.from_numpy(x), "dnc", f=f)
        assert np.allclose(result, x[np.sort(kept_rows)].mean(0), rtol=0, atol=1e-9 * np.abs(x[kept_rows]).max())
        compared += 1
    assert compared


def test_dnc_keeps_the_first_of_rows_with_equal_projections():
    x = torch.tensor([[1.0, 0.1], [-1.0, -0.1], [1.0, -0.1], [-1.0, 0.1]], dtype=torch.double)
    assert torch.equal(fedsim.aggregate(x, "dnc", f=2), x[:2].mean(0))


@pytest.mark.parametrize(
    "name", ["krum", "medoid", "caf", "geometric_median", "foolsgold", "dnc", "norm_clipping", "arc"]
)
def test_a_norm_that_overflows_is_an_error(name):
    line = r"their squared norms overflow \(values up to 1e\+200\); scale the updates down"
    if name in ("norm_clipping", "arc"):
        line = "2 of 11 updates have infinite norms; scale the updates down"
    with pytest.raises(ExperimentError, match=f"^updates: {line}$"):
        apply(rule.get(name), rows(1e200), F)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_that_is_not_finite_is_an_error(dtype):
    most = torch.finfo(dtype).max
    with pytest.raises(ExperimentError, match=r"mean: the result is not finite: updates contain values up to "):
        fedsim.aggregate(torch.full((3, 2), most, dtype=dtype))
    assert fedsim.aggregate(torch.full((3, 2), most, dtype=dtype), nonfinite="keep").isinf().all()
