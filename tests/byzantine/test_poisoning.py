from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from fedsim.byzantine import attack, attack_strategy
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError
from tests.byzantine.test_attacks import bound

CORNERS = {
    "top_left": (slice(0, 2), slice(0, 2)),
    "top_right": (slice(0, 2), slice(5, 7)),
    "bottom_left": (slice(7, 9), slice(0, 2)),
    "bottom_right": (slice(7, 9), slice(5, 7)),
}


@pytest.fixture
def batch():
    inputs = torch.randn(40, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    return inputs, torch.arange(40) % 10


@pytest.fixture
def draws():
    return Draws.of(0, "poison")


def poisoned_samples(before, after):
    return [k for k, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]


def test_label_flipping_flips_labels(batch):
    inputs, targets = bound("label_flipping").poison(*batch, 10)
    assert torch.equal(inputs, batch[0])
    assert targets.tolist() == [9 - k % 10 for k in range(40)]
    assert targets.dtype == torch.long


@pytest.mark.parametrize("corner", CORNERS)
def test_a_backdoor_poisons_a_share_of_the_batch(corner, batch, draws):
    backdoor = bound("backdoor", corner=corner, size=2, value=2.5, target=4, poisoned=0.25)
    inputs, targets = backdoor.poison(*batch, 10, draws)
    changed = poisoned_samples(batch[0], inputs)
    assert len(changed) == 10
    for k in range(40):
        expected, label = batch[0][k].clone(), k % 10
        if k in changed:
            expected[:, CORNERS[corner][0], CORNERS[corner][1]] = 2.5
            label = 4
        assert torch.equal(inputs[k], expected)
        assert targets[k] == label
    assert targets.dtype == torch.long


def test_the_goal_of_a_backdoor(batch):
    inputs, wanted = bound("backdoor", size=2, value=2.5, target=4).goal(*batch, 10)
    expected = batch[0][batch[1] != 4].clone()
    expected[:, :, 7:, 5:] = 2.5
    assert torch.equal(inputs, expected)
    assert wanted.tolist() == [4] * 36


def test_the_share_of_poisoned_samples_is_right_on_average(batch, draws):
    backdoor = bound("backdoor", value=9.0, poisoned=0.35)
    inputs, targets = batch[0][:5], batch[1][:5]
    counts = [len(poisoned_samples(inputs, backdoor.poison(inputs, targets, 10, draws)[0])) for _ in range(400)]
    assert set(counts) == {1, 2}
    assert np.mean(counts) == pytest.approx(1.75, abs=0.1)
    for size in (1, 7, 40):
        all_of_them = bound("backdoor", poisoned=1.0, target=3).poison(batch[0][:size], batch[1][:size], 10, draws)
        assert all_of_them[1].tolist() == [3] * size


@pytest.mark.parametrize("name", ["label_flipping", "backdoor"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_poisoning_keeps_the_batch_and_its_memory_format(name, memory_format, batch):
    inputs, targets = batch[0].contiguous(memory_format=memory_format), batch[1]
    before = inputs.clone(), targets.clone()
    given = {"draws": Draws.of(0, "poison")} if name == "backdoor" else {}
    poisoned, _ = bound(name).poison(inputs, targets, 10, **given)
    shown, _ = bound(name).goal(inputs, targets, 10)
    assert poisoned.is_contiguous(memory_format=memory_format)
    assert poisoned.dtype == shown.dtype == inputs.dtype
    assert torch.equal(inputs, before[0])
    assert torch.equal(targets, before[1])


@pytest.mark.parametrize(
    ("name", "params", "scale"), [("label_flipping", {}, 1), ("backdoor", {}, 1), ("backdoor", {"gamma": 2.5}, 2.5)]
)
def test_a_backdoor_scales_its_rows_and_label_flipping_does_not(name, params, scale, honest, own_updates):
    assert torch.equal(attack(honest, 3, name, own_updates=own_updates, **params), scale * own_updates)
    assert bound(name, **params).alters_rows == (scale != 1)


@pytest.mark.parametrize(
    ("params", "shape", "message"),
    [
        ({"size": 8}, (4, 1, 9, 7), r"attack.size = 8: the trigger must fit into images of 9x7"),
        ({}, (4, 10), r"a backdoor's trigger needs images .* not samples of shape \(10,\)"),
        ({"target": 10}, (4, 1, 9, 7), "attack.target = 10: must be below the number of classes, 10"),
    ],
)
def test_an_impossible_backdoor_is_refused(params, shape, message, draws):
    backdoor = bound("backdoor", **params)
    inputs, targets = torch.zeros(shape), torch.arange(4)
    with pytest.raises(ExperimentError, match=message):
        backdoor.poison(inputs, targets, 10, draws)
    with pytest.raises(ExperimentError, match=message):
        backdoor.goal(inputs, targets, 10)


@pytest.mark.parametrize("plug", list(attack_strategy), ids=lambda plug: plug.name)
def test_bound_attacks_can_be_pickled(plug):
    there = pickle.loads(pickle.dumps(bound(plug.name)))
    assert there.name == plug.name
    assert (there.poison is None) == (bound(plug.name).poison is None)
