from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsim.byzantine import attack, attack_strategy, bind_attack
from fedsim.errors import ExperimentError
from fedsim.randomness import Draws

CORNERS = {
    "top_left": (slice(0, 2), slice(0, 2)),
    "top_right": (slice(0, 2), slice(5, 7)),
    "bottom_left": (slice(7, 9), slice(0, 2)),
    "bottom_right": (slice(7, 9), slice(5, 7)),
}


def bound(name, **params):
    plug = attack_strategy.get(name)
    return bind_attack(plug, plug.check(params))


@pytest.fixture
def batch():
    inputs = torch.randn(40, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    return inputs, torch.arange(40) % 10


@pytest.fixture
def draws():
    return Draws.of(0, "poison")


def poisoned_samples(before, after):
    return [k for k, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]


def test_only_attacks_on_data_poison_and_only_they_have_a_goal():
    poisons = {plug.name for plug in attack_strategy if bound(plug.name).poison is not None}
    goals = {plug.name for plug in attack_strategy if bound(plug.name).goal is not None}
    assert poisons == goals == {"label_flipping", "backdoor"}


def test_label_flipping_turns_the_labels_round(batch):
    inputs, targets = bound("label_flipping").poison(*batch, 10)
    assert torch.equal(inputs, batch[0])
    assert targets.tolist() == [9 - k % 10 for k in range(40)]
    assert targets.dtype == torch.long


def test_the_goal_of_label_flipping_is_the_flipped_answer_to_unchanged_inputs(batch):
    inputs, wanted = bound("label_flipping").goal(*batch, 10)
    assert torch.equal(inputs, batch[0])
    assert wanted.tolist() == [9 - k % 10 for k in range(40)]


def test_a_middle_class_is_no_goal(batch):
    targets = batch[1] % 3
    inputs, wanted = bound("label_flipping").goal(batch[0], targets, 3)
    assert torch.equal(inputs, batch[0][targets != 1])
    assert wanted.tolist() == [2 - k for k in targets.tolist() if k != 1]


@pytest.mark.parametrize("corner", CORNERS)
def test_a_backdoor_puts_its_patch_and_its_label_on_a_fraction_of_the_batch(corner, batch, draws):
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


def test_the_goal_of_a_backdoor_is_its_label_for_all_other_classes_with_the_patch(batch):
    inputs, wanted = bound("backdoor", size=2, value=2.5, target=4).goal(*batch, 10)
    expected = batch[0][batch[1] != 4].clone()
    expected[:, :, 7:, 5:] = 2.5
    assert torch.equal(inputs, expected)
    assert wanted.tolist() == [4] * 36


def test_a_batch_of_the_target_alone_leaves_no_goal(batch):
    inputs, wanted = bound("backdoor").goal(batch[0], torch.zeros_like(batch[1]), 10)
    assert inputs.shape == (0, 3, 9, 7)
    assert wanted.shape == (0,)


def test_which_samples_are_poisoned_is_a_function_of_the_draws(batch):
    backdoor = bound("backdoor", value=9.0)
    one, again, other = (backdoor.poison(*batch, 10, Draws.of(seed, "poison")) for seed in (1, 1, 2))
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], other[0])


def test_a_fraction_that_is_no_whole_number_of_samples_is_right_on_average(batch, draws):
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
def test_poisoning_leaves_the_batch_alone_and_keeps_its_layout(name, memory_format, batch):
    inputs, targets = batch[0].contiguous(memory_format=memory_format), batch[1]
    before = inputs.clone(), targets.clone()
    given = {"draws": Draws.of(0, "poison")} if name == "backdoor" else {}
    poisoned, _ = bound(name).poison(inputs, targets, 10, **given)
    shown, _ = bound(name).goal(inputs, targets, 10)
    assert poisoned.is_contiguous(memory_format=memory_format)
    assert poisoned.dtype == shown.dtype == inputs.dtype
    assert torch.equal(inputs, before[0])
    assert torch.equal(targets, before[1])


def test_a_backdoor_scales_its_rows_and_label_flipping_does_not(honest, own):
    assert torch.equal(attack(honest, 3, "label_flipping", own=own), own)
    assert torch.equal(attack(honest, 3, "backdoor", own=own), own)
    assert torch.equal(attack(honest, 3, "backdoor", own=own, gamma=2.5), 2.5 * own)


def test_images_without_channels_have_a_corner_too(draws):
    inputs, _ = bound("backdoor", size=1, value=5.0, poisoned=1.0).poison(
        torch.zeros(2, 4, 4), torch.zeros(2, dtype=torch.long), 10, draws
    )
    assert inputs[:, 3, 3].tolist() == [5.0, 5.0]
    assert inputs.sum() == 10


@pytest.mark.parametrize(
    ("params", "shape", "message"),
    [
        ({"size": 8}, (4, 1, 9, 7), r"attack.size = 8: the trigger must fit into images of 9x7"),
        ({}, (4, 10), r"a backdoor's trigger needs images .* not samples of shape \(10,\)"),
        ({"target": 10}, (4, 1, 9, 7), "attack.target = 10: must be below the number of classes, 10"),
    ],
)
def test_a_backdoor_that_cannot_be_planted_is_refused(params, shape, message, draws):
    backdoor = bound("backdoor", **params)
    inputs, targets = torch.zeros(shape), torch.arange(4)
    with pytest.raises(ExperimentError, match=message):
        backdoor.poison(inputs, targets, 10, draws)
    with pytest.raises(ExperimentError, match=message):
        backdoor.goal(inputs, targets, 10)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"poisoned": 0.0}, "poisoned = 0.0: must be greater than 0"),
        ({"poisoned": 1.5}, "poisoned = 1.5: must be less than or equal to 1"),
        ({"corner": "middle"}, 'corner = "middle": must be "top_left"'),
        ({"size": 0}, "size = 0: must be greater than 0"),
        ({"gamma": -1.0}, "gamma = -1.0: must be greater than 0"),
        ({"target": -1}, "target = -1: must be greater than or equal to 0"),
    ],
)
def test_impossible_parameters_are_refused(params, message):
    with pytest.raises(ExperimentError, match=message):
        bound("backdoor", **params)


@pytest.mark.parametrize("plug", list(attack_strategy), ids=lambda plug: plug.name)
def test_a_bound_attack_travels_to_other_processes(plug):
    there = pickle.loads(pickle.dumps(bound(plug.name)))
    assert there.name == plug.name
    assert (there.poison is None) == (bound(plug.name).poison is None)


@pytest.mark.parametrize(
    ("name", "params", "alters"),
    [("alie", {}, True), ("label_flipping", {}, False), ("backdoor", {}, False), ("backdoor", {"gamma": 2.0}, True)],
)
def test_it_is_known_which_attacks_alter_rows(name, params, alters):
    plug = attack_strategy.get(name)
    assert bind_attack(plug, plug.check(params)).alters_rows == alters


@dataclass(frozen=True)
class Misnamed:
    def __call__(self, own):
        return own

    def poison(self, x, y):
        return x, y


def test_a_method_poison_with_other_arguments_is_refused():
    with pytest.raises(ExperimentError, match=r"its poison cannot be used: the argument x is not one that fedsim pass"):
        bound(Misnamed)
