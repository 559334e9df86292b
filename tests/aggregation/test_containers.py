"""Arrays, lists of tensors and state_dicts, aggregated as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.errors import ExperimentError


@pytest.fixture
def models():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(5)]


def test_an_array_gives_an_array():
    updates = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    result = fedsim.aggregate(updates, rule="median")
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.float32
    assert np.array_equal(result, np.median(updates, axis=0))
    assert fedsim.pre_aggregate(updates, "nnm", f=1).shape == (5, 4)


def test_tensors_of_any_shape_keep_their_shape():
    updates = [torch.randn(2, 3, dtype=torch.double) for _ in range(5)]
    result = fedsim.aggregate(updates, rule="median")
    assert torch.equal(result, torch.stack(updates).median(0).values)
    assert [rows.shape for rows in fedsim.pre_aggregate(updates, "nnm", f=1)] == [(2, 3)] * 5


def test_state_dicts_keep_the_first_counters(models):
    states = [model.state_dict() for model in models]
    states[0]["1.num_batches_tracked"] += 7
    mean = fedsim.aggregate(states, weights=range(1, 6))
    assert {name: (value.dtype, value.shape) for name, value in mean.items()} == {
        name: (value.dtype, value.shape) for name, value in states[0].items()
    }
    assert mean["1.num_batches_tracked"] == 7
    expected = sum((place + 1) * state["0.weight"] for place, state in enumerate(states)) / 15
    assert torch.allclose(mean["0.weight"], expected)
    models[0].load_state_dict(mean)


def test_lists_of_arrays_as_in_flower():
    generator = np.random.default_rng(0)
    updates = [[generator.standard_normal((2, 3)), generator.standard_normal(4)] for _ in range(5)]
    result = fedsim.aggregate(updates, rule="krum", f=1)
    assert [type(each) for each in result] == [np.ndarray, np.ndarray]
    assert any(all(map(np.array_equal, result, update)) for update in updates)
    byzantine = fedsim.attack(updates, 2, "sign_flipping")
    assert [[each.shape for each in update] for update in byzantine] == [[(2, 3), (4,)]] * 2


def test_entries_keep_their_dtypes():
    updates = [{"half": torch.ones(2).half() * k, "full": torch.ones(3) * k} for k in range(3)]
    result = fedsim.aggregate(updates)
    assert (result["half"].dtype, result["full"].dtype) == (torch.float16, torch.float32)
    assert result["half"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("updates", "line"),
    [
        ([torch.zeros(2), torch.zeros(3)], r"updates\[1\]: must have shape \(2,\) as in updates\[0\], not \(3,\)"),
        ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], r"updates\[1\]\['b'\]: the first update has"),
        ([[torch.zeros(2)], [torch.zeros(2)] * 2], r"updates\[1\]: has 2 entries, the first has 1"),
        ([{"a": torch.zeros(2, dtype=torch.long)}], r"updates\[0\]: has no floating numbers"),
        ([torch.zeros(2), "x"], r"updates\[1\]: must be a tensor or an array of numbers, not str"),
        (np.array([["a", "b"]]), r"updates: must be a tensor or an array of numbers, not array of <U1"),
        ([[1.0, 2.0], [3.0, 4.0]], r"updates: must be a floating tensor \[n, d\]"),
    ],
)
def test_updates_with_different_entries_are_an_error(updates, line):
    with pytest.raises(ExperimentError, match=f"^{line}") as caught:
        fedsim.aggregate(updates)
    assert len(caught.value.lines) == 1
