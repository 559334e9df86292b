"""The first sentence of a comparison, which names the best value."""

from __future__ import annotations

import pytest

from fedsim.comparison.tables import answer
from tests.comparison.made_up import compared

FINAL = {  # accuracy of each seed, by (rule, attack)
    ("mean", "none"): [0.80, 0.85, 0.90],
    ("median", "none"): [0.81, 0.87, 0.92],  # ahead of the mean by 0.01, 0.02 and 0.02 (0.0167 ± 0.0143)
    ("krum", "none"): [0.60, 0.66, 0.70],
    ("mean", "ipm"): [0.70, 0.75, 0.80],
    ("median", "ipm"): [0.69, 0.76, 0.80],  # behind the mean by 0.01, -0.01 and 0.00
    ("krum", "ipm"): [0.50, 0.50, 0.50],
}
AXES = {"aggregate.rule": ["mean", "median", "krum"], "attack.name": ["none", "ipm"], "seed": [0, 1, 2]}


def answer_to(axes, final=FINAL, failed=(), **settings):
    def accuracies(point):
        return None if tuple(point.values()) in failed else [final[tuple(point.values())[:2]][point.get("seed", 0)]]

    return answer(compared(axes, accuracies, **settings))


def test_of_a_few_groups_each_has_its_best_with_its_ties_or_the_difference_of_the_next():
    result = answer_to(AXES)
    assert result.sentence == "Best aggregate.rule by test accuracy, for each attack.name:"
    assert result.cases == [
        "none: median 0.8667 ± 0.1368; the next, mean, is 0.0167 ± 0.0143 lower",
        "ipm: mean 0.7500 ± 0.1242, with the same mean as median; the next, krum, is 0.2500 ± 0.1242 lower",
    ]
    assert result.remarks == []


def test_with_worst_the_best_is_that_in_its_worst_case():
    """The worst case of each rule is ipm, where the mean leads the median by 0.01, -0.01 and 0.00."""
    result = answer_to(AXES, worst="attack.name")
    assert result.sentence == (
        "Best aggregate.rule by test accuracy in its worst case over attack.name: "
        "mean (worst: ipm) 0.7500 ± 0.1242, with the same mean as median; the next, krum, is 0.2500 ± 0.1242 lower."
    )
    assert result.cases == []


def test_with_several_other_axes_a_group_has_their_names():
    final = {("mean", "none"): [0.5], ("median", "none"): [0.6]}
    axes = {"aggregate.rule": ["mean", "median"], "attack.name": ["none"], "local.lr": [0.1, 0.2]}
    result = answer_to(axes, final)
    assert result.sentence == "Best aggregate.rule by test accuracy, for each attack.name and local.lr:"
    assert result.cases[1] == "attack.name none, local.lr 0.2: median 0.6000; the next, mean, is 0.1000 lower"


def test_a_loss_that_is_next_is_higher():
    """test_loss = 1 - accuracy: the median has 0.1333, and the mean is 0.0167 higher."""
    result = answer_to({**AXES, "attack.name": ["none"]}, metric="test_loss")
    assert result.sentence == (
        "Best aggregate.rule by test loss: median 0.1333 ± 0.1368; the next, mean, is 0.0167 ± 0.0143 higher."
    )


def test_with_one_seed_there_is_no_interval_and_with_two_there_are_both_values():
    with_one_seed = answer_to({**AXES, "attack.name": ["none"], "seed": [0]})
    assert with_one_seed.sentence.endswith(": median 0.8100; the next, mean, is 0.0100 lower.")
    assert with_one_seed.remarks == ["With one seed there is no interval, and a difference may be chance."]
    final = {("mean", "none"): [0.5, 0.6], ("median", "none"): [0.7, 0.8]}
    with_two_seeds = answer_to({"aggregate.rule": ["mean", "median"], "attack.name": ["none"], "seed": [0, 1]}, final)
    assert with_two_seeds.sentence.endswith(
        ": median 0.7500 (0.7000, 0.8000); the next, mean, is 0.2000 (0.2000, 0.2000) lower."
    )


def test_a_combination_with_a_failed_run_is_not_ranked():
    every_krum = [("krum", attack, seed) for attack in ("none", "ipm") for seed in range(3)]
    result = answer_to(AXES, failed=[("median", "none", 1), *every_krum])
    assert result.cases[0] == "none: mean 0.8500 ± 0.1242, the only one that is ranked"
    assert result.remarks == ["3 of 6 combinations are not ranked: 7 runs failed, did not finish or diverged."]
    result = answer_to({**AXES, "aggregate.rule": ["mean", "krum"]}, failed=[("mean", "none", 0), *every_krum])
    assert result.cases == ["none: none is ranked", "ipm: mean 0.7500 ± 0.1242, the only one that is ranked"]


def test_of_many_groups_the_value_that_is_most_often_best_is_named():
    """The median is best for rates 0 to 4, equal to the mean for rate 5; the mean is best for rate 6."""
    rates = list(range(7))
    final = {("mean", rate): [0.5 + 0.2 * (rate == 6)] for rate in rates} | {
        ("median", rate): [0.6 - 0.1 * (rate == 5)] for rate in rates
    }
    axes = {"aggregate.rule": ["mean", "median"], "local.lr": rates}
    result = answer_to(axes, final)
    assert result.sentence == (
        "Most often the best aggregate.rule by test accuracy: median, for 6 of 7 values of local.lr."
    )
    assert result.cases == []
    equal = {(rule, rate): [0.5] for rule in ("mean", "median") for rate in rates}
    assert answer_to(axes, equal).sentence.endswith(": mean, median, each for 7 of 7 values of local.lr.")


def test_a_best_value_names_those_with_the_same_mean_and_those_that_are_not_significantly_different():
    axes = {"aggregate.rule": ["mean", "median", "krum"], "attack.name": ["none"], "seed": [0, 1, 2]}
    final = {("mean", "none"): [0.5, 0.6, 0.7], ("median", "none"): [0.6, 0.7, 0.5], ("krum", "none"): [0.6, 0.6, 0.5]}
    assert answer_to(axes, final).sentence.endswith(
        ": mean 0.6000 ± 0.2484, with the same mean as median, not significantly different from krum."
    )
    equal = {key: [0.5, 0.6, 0.7] for key in final}
    assert answer_to(axes, equal).sentence.endswith(": mean 0.6000 ± 0.2484, with the same mean as median, krum.")


@pytest.mark.parametrize("axes", [{"seed": [0, 1]}, {"aggregate.rule": ["mean"], "attack.name": ["none", "ipm"]}])
def test_without_two_values_of_the_first_axis_there_is_no_answer(axes):
    assert answer(compared(axes, lambda point: [0.5])) is None
