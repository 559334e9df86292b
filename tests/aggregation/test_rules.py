from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import fedsim
from fedsim.aggregation import column_blocks, rule
from fedsim.aggregation.rules import BLOCK, lookup
from fedsim.errors import ExperimentError


@pytest.fixture
def updates():
    return torch.randn(5, 33, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def test_mean_is_the_plain_average(updates):
    assert torch.allclose(fedsim.aggregate(updates), sum(updates) / 5, rtol=0, atol=1e-12)
    assert torch.equal(fedsim.aggregate(updates), fedsim.aggregate(updates, rule="mean"))


@pytest.mark.parametrize("name", ["mean", "weighted_mean"])
@pytest.mark.parametrize("as_type", [list, torch.tensor])
def test_weights_are_normalised(updates, name, as_type):
    weights = [1.0, 2.0, 3.0, 0.0, 4.0]
    expected = sum(w / 10 * row for w, row in zip(weights, updates, strict=True))
    assert torch.allclose(fedsim.aggregate(updates, as_type(weights), name), expected, rtol=0, atol=1e-12)


def test_weighted_mean_without_weights_is_the_mean(updates):
    assert torch.allclose(fedsim.aggregate(updates, rule="weighted_mean"), updates.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("plug", list(rule), ids=lambda plug: plug.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_every_rule_keeps_dtype_and_leaves_its_input_alone(plug, dtype, updates):
    updates = updates.to(dtype)
    before = updates.clone()
    result = fedsim.aggregate(updates, rule=plug.name)
    assert result.dtype == dtype
    assert result.shape == (33,)
    assert torch.equal(updates, before)


@pytest.mark.parametrize("plug", list(rule), ids=lambda plug: plug.name)
def test_every_rule_works_on_one_row_and_on_one_column(plug, updates):
    assert torch.allclose(fedsim.aggregate(updates[:1], rule=plug.name), updates[0])
    assert fedsim.aggregate(updates[:, :1], rule=plug.name).shape == (1,)


@pytest.mark.parametrize("plug", list(rule), ids=lambda plug: plug.name)
def test_what_is_declared_columnwise_is(plug, updates):
    if plug.target.columnwise:
        whole = fedsim.aggregate(updates, rule=plug.name)
        parts = [fedsim.aggregate(part, rule=plug.name) for part in updates.split(10, dim=1)]
        assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_a_users_own_rule_comes_by_import_path(updates):
    result = fedsim.aggregate(updates, rule="tests.plugs:clipped_mean", c=0.5)
    assert result.norm() <= 0.5
    with pytest.raises(ExperimentError, match="the rule tests.plugs:clipped_mean has no weighted form"):
        fedsim.aggregate(updates, [1.0] * 5, rule="tests.plugs:clipped_mean")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"5 rows need shape \(5,\), not \(2,\)"),
        ([0.0] * 5, "not all zero"),
        ([1, 1, 1, 1, -1], "must be finite, >= 0"),
        ([1, 1, 1, 1, float("nan")], "must be finite, >= 0"),
        ([1, 1, 1, 1, float("inf")], "must be finite, >= 0"),
    ],
)
def test_impossible_weights_are_refused(updates, weights, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.aggregate(updates, weights)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(2, 3, dtype=torch.long)])
def test_anything_but_a_floating_matrix_is_refused(bad):
    with pytest.raises(ExperimentError, match=r"must be a floating tensor \[n, d\]"):
        fedsim.aggregate(bad)


def test_an_unknown_rule_or_parameter_names_the_nearest(updates):
    with pytest.raises(ExperimentError, match='rule = "meen": .*did you mean "mean"'):
        fedsim.aggregate(updates, rule="meen")
    with pytest.raises(ExperimentError, match="f = 2: unknown key"):
        fedsim.aggregate(updates, f=2)


def test_the_signature_says_whether_a_rule_takes_weights():
    assert not lookup("tests.plugs:clipped_mean", {}).takes_weights
    assert lookup("mean", {}).takes_weights
    assert not lookup("mean", {}).needs_weights
    assert lookup("weighted_mean", {}).needs_weights


@pytest.mark.parametrize("d", [1, BLOCK, BLOCK + 1, 199_210, 1_663_370, 100_000_000])
@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_blocks_cover_every_column_once_and_do_not_depend_on_the_number_of_processes(d, count):
    blocks = sorted((b.start, b.stop) for index in range(count) for b in column_blocks(d, index, count))
    assert blocks == [(b.start, b.stop) for b in column_blocks(d)]
    assert blocks[0][0] == 0
    assert blocks[-1][1] == d
    assert all(before[1] == after[0] for before, after in pairwise(blocks))
    assert len(blocks) <= 64
