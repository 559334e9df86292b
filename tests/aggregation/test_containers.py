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
    "updates",
    [
        [(ZEROS, 10), (ONES, 30)],
        [(10, ZEROS), (30, ONES)],
        [[ZEROS, 10.0], [ONES, np.float64(30)]],
        ((np.int64(1), ZEROS), (np.int64(3), ONES)),
        {"alice": (ZEROS, 10), "bob": (ONES, 30)},
        [({"w": np.zeros(3), "b": np.zeros(())}, 1), ({"w": np.ones(3), "b": np.ones(())}, 3)],
    ],
)
def test_pairs_with_numbers_of_samples_give_the_weighted_mean(updates):
    """(10 * 0 + 30 * 1) / 40 = 0.75."""
    mean = fedsim.aggregate(updates)
    assert [mean["w"].tolist(), float(mean["b"])] == [[0.75] * 3, 0.75]


def test_a_dict_of_state_dicts_is_a_list_of_clients(models):
    """In the order of the dict: the median of each entry over the clients, and the counters of the first client."""
    states = {f"client {k}": model.state_dict() for k, model in enumerate(models)}
    median = fedsim.aggregate(states, "median")
    for name in ("0.weight", "1.bias"):
        assert torch.equal(median[name], torch.stack([state[name] for state in states.values()]).median(0).values)
    assert list(median) == list(states["client 0"])


@pytest.mark.parametrize(
    ("updates", "options", "line"),
    [
        ([(ZEROS, 10), (ONES, 30)], {"name": "median"}, "updates: the rule median does not support the weights in"),
        ([(ZEROS, 10), (ONES, 30)], {"weights": [1, 2]}, "weights: are also in the pairs"),
        ([(ZEROS, -1), (ONES, 3)], {}, "weights: must be finite, >= 0"),
        ([(ZEROS, 10), (30, ONES)], {}, r"updates\[0\]\[1\]: must be a tensor or an array, not the number 10"),
        ([(ZEROS, 10, {}), (ONES, 30, {})], {}, r"updates\[0\]\[1\]: .* not the number 10; pass numbers of samples"),
        ((ZEROS, 10), {}, r"updates\[1\]: must be a tensor or an array, not the number 10"),
        ([{**ZEROS, "n": 10}, {**ONES, "n": 30}], {}, r"updates\[0\]\['n'\]: .* not the number 10"),
        (
            [(ZEROS, torch.tensor(10)), (ONES, torch.tensor(30))],
            {},
            r"updates\[0\]\[1\]: a tensor or array of one number",
        ),
        ([(ZEROS, torch.tensor(10.0)), (ONES, torch.tensor(30.0))], {}, r"updates\[0\]\[1\]: .* pass n.item\(\) for a"),
        ([(np.array(10.0), ZEROS), (np.array(30.0), ONES)], {}, r"updates\[0\]\[0\]: a tensor or array of one number"),
        ([(ZEROS, np.array([10.0])), (ONES, np.array([30.0]))], {}, r"updates\[0\]\[1\]: a tensor or array of one"),
        ([(torch.zeros(3), torch.tensor(10.0))] * 2, {}, r"updates\[0\]\[1\]: a tensor or array of one number"),
        (
            list(enumerate([ZEROS, ONES, ONES])),
            {},
            r"updates: the numbers 0 to 2 in .* may be weights or client IDs; pass",
        ),
        ([(np.int64(1), ZEROS), (2, ONES)], {}, "updates: the numbers 1 to 2 in the pairs"),
        ({0: torch.zeros(2, 3), 1: torch.ones(2, 3)}, {}, "updates: a dict of tensors whose keys are not text may"),
        ({"alice": torch.zeros(3), "bob": torch.ones(3)}, {}, "updates: a dict of vectors may contain one update per"),
        ({"alice": [torch.zeros(3)], "bob": [torch.ones(3)]}, {}, "updates: a dict of lists of tensors may"),
        (
            {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3, 2)}},
            {},
            "updates: a dict of dicts with different keys",
        ),
        ({"params": {"w": torch.zeros(3, 2)}}, {}, "updates: a dict of one dict may"),
        ({"a": ZEROS, "c": {"w": torch.zeros(3)}}, {}, "updates: a dict of dicts with different keys or shapes may"),
        ({"a": {"b": ZEROS}, "c": {"b": ZEROS}}, {}, "updates: a dict of dicts with different keys or shapes may"),
    ],
)
def test_what_may_be_read_in_two_ways_is_an_error(updates, options, line):
    with pytest.raises(ExperimentError, match=f"^{line}") as caught:
        fedsim.aggregate(updates, **options)
    assert len(caught.value.lines) == 1


def test_weights_in_tensors_are_no_entries_of_other_functions_either():
    updates = [(ZEROS, torch.tensor(10.0)), (ONES, torch.tensor(30.0))]
    with pytest.raises(ExperimentError, match=r"^updates\[0\]\[1\]: a tensor or array of one number"):
        fedsim.pre_aggregate(updates, "nnm", f=0)
    with pytest.raises(ExperimentError, match=r"^honest\[0\]\[1\]: a tensor or array of one number"):
        fedsim.attack(updates, "ipm", 1)


def test_parameters_that_are_single_numbers_are_averaged():
    """In dicts, and in lists where they cannot be weights."""
    for number in (0.0, [0.0]):
        low, high = torch.tensor(number), torch.tensor(number) + 4
        mean = fedsim.aggregate([{"w": torch.zeros(2), "scale": low}, {"w": torch.ones(2), "scale": high}])
        assert [mean["w"].tolist(), float(mean["scale"])] == [[0.5, 0.5], 2.0]
        mean = fedsim.aggregate([[torch.zeros(2), low, low], [torch.ones(2), high, high]])
        assert [float(value) for value in mean[1:]] == [2.0, 2.0]
    weight, bias = fedsim.aggregate([[torch.zeros(1, 2), torch.zeros(1)], [torch.ones(1, 2), torch.ones(1)]])
    assert [weight.tolist(), bias.tolist()] == [[[0.5, 0.5]], [0.5]]


def test_numbers_that_are_no_client_ids_are_weights():
    """Keys name the clients of a dict, so that its numbers 1 and 2 are weights: (0 + 2) / 3. So are 2 and 1: 1 / 3."""
    for updates, expected in [
        ({"alice": (1, ZEROS), "bob": (2, ONES)}, 2 / 3),
        ([(2, ZEROS), (1, ONES)], 1 / 3),
        ([(ZEROS, 1), (ONES, 2)], 2 / 3),
        ([(1.0, ZEROS), (2.0, ONES)], 2 / 3),
    ]:
        assert float(fedsim.aggregate(updates)["b"]) == pytest.approx(expected)
    for number in (0.0, [0.0]):
        updates = [(torch.tensor(number), 10), (torch.tensor(number) + 1, 30)]
        assert float(fedsim.aggregate(updates)) == 0.75


def test_lists_of_numbers_and_iterators_are_updates():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for updates in (
        [[1, 2], [3.0, 4.0]],
        iter(rows),
        {"a": rows[0], "b": rows[1]}.values(),
        zip(rows, [1, 1], strict=True),
    ):
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
        ({"a": torch.zeros(2, 3), "b": torch.zeros(3)}, r"updates\['b'\]: must .*\[n, ...\] .* as updates\['a'\]"),
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


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_a_dict_of_stacked_tensors_equals_that_of_its_updates(models, kind):
    states = [model.state_dict() for model in models]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    if kind is np.ndarray:
        stacked = {name: value.numpy() for name, value in stacked.items()}
    result, expected = fedsim.aggregate(stacked, "krum", f=1), fedsim.aggregate(states, "krum", f=1)
    for name, value in expected.items():
        assert isinstance(result[name], kind)
        assert np.array_equal(result[name], value)
        assert str(result[name].dtype).endswith(str(value.dtype).removeprefix("torch."))
    assert {name: len(rows) for name, rows in fedsim.attack(stacked, "ipm", 2).items()} == dict.fromkeys(stacked, 2)
    mixed = fedsim.pre_aggregate(stacked, "nnm", f=1)
    assert [mixed[name].shape for name in mixed] == [stacked[name].shape for name in stacked]
