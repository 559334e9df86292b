"""Aggregation of NumPy arrays, lists of tensors and state_dicts."""

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
    result = fedsim.aggregate(updates, "median")
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.float32
    assert np.array_equal(result, np.median(updates, axis=0))
    assert fedsim.pre_aggregate(updates, "nnm", f=1).shape == (5, 4)


def test_tensors_of_any_shape_keep_their_shape():
    updates = [torch.randn(2, 3, dtype=torch.double) for _ in range(5)]
    result = fedsim.aggregate(updates, "median")
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
    assert mean._metadata == states[0]._metadata  # version numbers of the modules
    expected = sum((place + 1) * state["0.weight"] for place, state in enumerate(states)) / 15
    assert torch.allclose(mean["0.weight"], expected)
    models[0].load_state_dict(mean)


def test_lists_of_arrays_as_in_flower():
    generator = np.random.default_rng(0)
    updates = [[generator.standard_normal((2, 3)), generator.standard_normal(4)] for _ in range(5)]
    result = fedsim.aggregate(updates, "krum", f=1)
    assert [type(each) for each in result] == [np.ndarray, np.ndarray]
    assert any(all(map(np.array_equal, result, update)) for update in updates)
    byzantine = fedsim.attack(updates, "sign_flipping", 2)
    assert [[each.shape for each in update] for update in byzantine] == [[(2, 3), (4,)]] * 2


ZEROS, ONES = {"w": torch.zeros(3), "b": torch.zeros(())}, {"w": torch.ones(3), "b": torch.ones(())}


@pytest.mark.parametrize(
    ("updates", "line"),
    [
        ([(ZEROS, 10), (ONES, 30)], r"updates\[0\]\[1\]: must .* number 10; pass numbers of samples as weights"),
        (list(enumerate([ZEROS, ONES])), r"updates\[0\]\[0\]: must be a tensor or an array, not the number 0"),
        ((ZEROS, 10), r"updates\[1\]: must be a tensor or an array, not the number 10"),
        ([{**ZEROS, "n": 10}, {**ONES, "n": 30}], r"updates\[0\]\['n'\]: .* not the number 10"),
        ({"alice": ZEROS, "bob": ONES}, "updates: .*, not a dict; pass a list of updates, such as one state_dict per"),
    ],
)
def test_weights_and_names_of_clients_are_no_updates(updates, line):
    with pytest.raises(ExperimentError, match=f"^{line}") as caught:
        fedsim.aggregate(updates)
    assert len(caught.value.lines) == 1


def test_parameters_that_are_single_numbers_are_averaged():
    for number in (0.0, [0.0]):
        low, high = torch.tensor(number), torch.tensor(number) + 4
        mean = fedsim.aggregate([{"w": torch.zeros(2), "scale": low}, {"w": torch.ones(2), "scale": high}])
        assert [mean["w"].tolist(), float(mean["scale"])] == [[0.5, 0.5], 2.0]
        mean = fedsim.aggregate([[torch.zeros(2), low, low], [torch.ones(2), high, high]])
        assert [float(value) for value in mean[1:]] == [2.0, 2.0]
    weight, bias = fedsim.aggregate([[torch.zeros(1, 2), torch.zeros(1)], [torch.ones(1, 2), torch.ones(1)]])
    assert [weight.tolist(), bias.tolist()] == [[[0.5, 0.5]], [0.5]]


def test_lists_of_numbers_and_iterators_are_updates():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for updates in ([[1, 2], [3.0, 4.0]], iter(rows), {"a": rows[0], "b": rows[1]}.values()):
        assert torch.equal(fedsim.aggregate(updates), torch.tensor([2.0, 3.0]))
    assert torch.equal(fedsim.aggregate([iter(rows), iter(rows)])[1], rows[1])  # as from model.parameters()
    assert torch.equal(fedsim.attack(iter(rows), "ipm", 1, eps=1.0)[0], torch.tensor([-2.0, -3.0]))


@pytest.mark.parametrize(
    ("updates", "line"),
    [
        ([torch.zeros(2), torch.zeros(3)], r"updates\[1\]: must have shape \(2,\) as in updates\[0\], not \(3,\)"),
        ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], r"updates\[1\]: has no entry \['a'\], .*; .* has \['b'\]"),
        (
            [{"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int)}],
            r"updates\[1\]\['a'\]: must be torch.float32",
        ),
        ([{"a": torch.zeros(2, dtype=torch.long)}], r"updates\[0\]: contains no floating-point numbers"),
        ([[1.0, 2.0], [3.0]], r"updates: must all have the same number of entries"),
        ([1.0, 2.0], r"updates: must be a floating-point tensor of shape \[n, d\] .*, not a list of float objects"),
        ([], r"updates: must be a floating-point tensor of shape \[n, d\] .*, not an empty list"),
        ([torch.nn.Linear(1, 1)], r"updates\[0\]: is a module; pass the state_dict\(\) of each model"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_updates_with_different_entries_are_an_error(updates, line):
    with pytest.raises(ExperimentError, match=f"^{line}") as caught:
        fedsim.aggregate(updates)
    assert len(caught.value.lines) == 1


def test_the_order_of_keys_does_not_matter():
    first, second = (
        {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])},
        {"b": torch.tensor([4.0]), "a": torch.tensor([3.0])},
    )
    mean = fedsim.aggregate([first, second])
    assert (list(mean), mean["a"].item(), mean["b"].item()) == (["a", "b"], 2, 3)
    near = fedsim.aggregate([first, first], "centered_clipping", last=second, tau=1e-6)
    assert (near["a"].item(), near["b"].item()) == (pytest.approx(3), pytest.approx(4))


def test_tied_weights_count_once_and_stay_tied(models):
    def tied(row):
        return {"embedding": row, "bias": row[:1] * 0 + 1, "head": row}

    rows = torch.randn(5, 4)
    result = fedsim.aggregate([tied(row.clone()) for row in rows], "norm_clipping", c=1.0)
    expected = fedsim.aggregate([{"embedding": row, "bias": torch.ones(1)} for row in rows], "norm_clipping", c=1.0)
    assert torch.equal(result["embedding"], expected["embedding"])
    assert result["head"].data_ptr() == result["embedding"].data_ptr()
    apart = fedsim.aggregate([tied(rows[0]), {name: value.clone() for name, value in tied(rows[1]).items()}])
    assert apart["head"].data_ptr() != apart["embedding"].data_ptr()
