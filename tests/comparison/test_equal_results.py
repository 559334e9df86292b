"""Results that are equal up to rounding are equal in every table, rank, figure and choice."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from scipy import stats

from fedsim.comparison.figures import heatmap_csv
from fedsim.comparison.on_paper import draw_heatmap
from fedsim.comparison.tables import breaking_points, summary_csv
from fedsim.config.schema import Stop
from fedsim.core.confidence import estimate
from fedsim.core.equality import levels
from fedsim.records.early_stopping import stop_reason
from fedsim.records.record import RoundRecord
from fedsim.report.on_page import best_heat_maps
from tests.comparison.made_up import compared, in_last_round, lines_of

SAMPLES = 90  # test samples of each run
# Of these, correct with the two seeds. The means are equal, but as floats they are 0.788888888888889 for the mean and
# the median, and 0.7888888888888889 for krum.
RIGHT = {"mean": (70, 72), "median": (71, 71), "krum": (66, 76), "rfa": (40, 41)}
RULES = list(RIGHT)


def shares(right):
    return [count / SAMPLES for count in right]


def made_up(right_in, rules=RULES, attacks=("none",), seeds=(0, 1), scales=(1,), **settings):
    """Return a comparison in which `right_in(rule, attack)` samples per seed are classified correctly."""

    def accuracies(point):
        return [right_in(point["aggregate.rule"], point["attack.name"])[point["seed"]] / SAMPLES]

    axes = {"aggregate.rule": list(rules), "attack.name": list(attacks), "attack.scale": list(scales)}
    return compared(axes | {"seed": list(seeds)}, accuracies, **settings)


def test_the_examples_differ_as_floats():
    means = [estimate(shares(RIGHT[rule])).mean for rule in ("mean", "median", "krum")]
    assert len(set(means)) > 1
    assert len({Fraction(sum(RIGHT[rule]), SAMPLES) for rule in ("mean", "median", "krum")}) == 1


def test_values_that_are_equal_up_to_rounding_share_a_level():
    assert levels([0.7888888888888889, 0.1, 0.788888888888889, 0.7888888889]) == [1, 2, 1, 0]
    assert levels([]) == []
    chain = [1.0, 1.0 + 0.8e-12, 1.0 + 1.6e-12]  # neighbours are equal, so all three are
    assert levels(chain) == [0, 0, 0]


def test_values_that_cancel_have_the_mean_zero():
    assert 0.1 + 0.2 - 0.3 != 0.0
    assert estimate([0.1, 0.2, -0.3]).mean == 0.0
    assert estimate([1.0, -1.0 + 1e-9]).mean == pytest.approx(5e-10)


@pytest.mark.parametrize("rules", [RULES, RULES[::-1], ["krum", "rfa", "median", "mean"]])
def test_the_table_the_answer_the_files_and_the_heat_maps_name_the_same_best_rules(rules):
    comparison = made_up(lambda rule, attack: RIGHT[rule], rules, scales=(1, 2), heatmap="attack.name,attack.scale")
    best = [rule for rule in rules if rule != "rfa"]
    assert [row.point["aggregate.rule"] for row in comparison.summary if row.mark == "*"] == best * 2
    assert [row.mark for row in comparison.summary if row.point["aggregate.rule"] == "rfa"] == ["~", "~"]  # two seeds
    lines = lines_of(summary_csv(comparison))
    assert [line["aggregate.rule"] for line in lines if line["mark"] == "best"] == best * 2
    assert f"{best[0]} 0.7889" in comparison.answer
    tied = f"with the same mean as {best[1]}, {best[2]}, not significantly different from rfa"
    assert tied in " ".join(comparison.answer.split())
    keys = ["attack.name", "attack.scale"]
    cells = lines_of(heatmap_csv(comparison, keys))
    assert [(cell["best aggregate.rule"], cell["tied"]) for cell in cells] == [("; ".join(best), "rfa")] * 2
    texts = [text.get_text() for text in draw_heatmap(comparison, over=keys).axes[0].texts]
    assert texts[0] == f"{best[0]}, {best[1]} and 1 more"
    (page,) = best_heat_maps(comparison, [*keys, "aggregate.rule"])
    assert texts[0] in page["data"][0]["text"][0][0]


def test_equal_means_are_all_bold_in_a_single_heat_map():
    comparison = compared(
        {"aggregate.rule": RULES, "attack.name": ["none"], "seed": [0, 1]},
        lambda point: [shares(RIGHT[point["aggregate.rule"]])[point["seed"]]],
    )
    texts = draw_heatmap(comparison).axes[0].texts
    assert [text.get_fontweight() for text in texts[::2]] == ["bold", "bold", "bold", "normal"]


def test_ranks_and_friedman_equal_those_of_exact_fractions():
    """Each run classifies 60 to 64 of 90 samples correctly, so many of the exact means are equal."""
    draw = random.Random(5)
    attacks, rules = [f"attack{index}" for index in range(40)], RULES[:3]
    right = {(rule, attack): [draw.randint(60, 64) for _ in range(3)] for attack in attacks for rule in rules}
    exact = [[-Fraction(sum(right[rule, attack]), SAMPLES) for rule in rules] for attack in attacks]
    assert any(
        estimate(shares(right["mean", attack])).mean != estimate(shares(right["krum", attack])).mean
        for attack in attacks
        if sum(right["mean", attack]) == sum(right["krum", attack])
    )
    ranks = [stats.rankdata([sorted(set(cell)).index(value) for value in cell]) for cell in exact]
    board = made_up(lambda rule, attack: right[rule, attack], rules, attacks, seeds=(0, 1, 2)).leaderboard
    expected = {rule: sum(of_cell[place] for of_cell in ranks) / len(attacks) for place, rule in enumerate(rules)}
    assert {standing.name: standing.mean_rank for standing in board.standings} == pytest.approx(expected)
    best = {rule: sum(cell[place] == min(cell) for cell in exact) for place, rule in enumerate(rules)}
    assert {standing.name: standing.best for standing in board.standings} == best
    friedman = stats.friedmanchisquare(*zip(*ranks, strict=True))
    assert (board.chi_square, board.p) == pytest.approx((friedman.statistic, friedman.pvalue))


def test_the_worst_cell_of_a_rule_is_the_first_of_equally_bad_ones():
    of_attack = {"none": (80, 80), "ipm": (71, 71), "alie": (70, 72), "gaussian": (66, 76), "min_max": (80, 80)}
    for attacks in (list(of_attack), list(of_attack)[::-1]):
        board = made_up(lambda rule, attack: of_attack[attack], RULES[:3], attacks).leaderboard
        worst = next(attack for attack in attacks if sum(of_attack[attack]) == 142)
        assert {standing.worst_cell for standing in board.standings} == {f"{worst}, 1"}


@pytest.mark.parametrize("order", [RULES[:3], RULES[2::-1], ["median", "krum", "mean"]])
def test_of_equal_values_tune_and_worst_choose_the_first(order):
    rates = dict(zip((0.1, 0.2, 0.4), (RIGHT[rule] for rule in order), strict=True))
    axes = {"aggregate.rule": ["mean", "median"], "local.lr": list(rates), "seed": [0, 1]}
    plain = compared(axes, lambda point: shares(rates[point["local.lr"]])[point["seed"] : point["seed"] + 1])
    in_last_round(plain, lambda run: {"validation_accuracy": run.test_accuracy})
    for setting in ("tune", "worst"):
        comparison = replace(plain, settings=replace(plain.settings, **{setting: "local.lr"}))
        assert [row.chosen["local.lr"] for row in comparison.summary] == [0.1, 0.1]


def test_runs_whose_seeds_are_equal_up_to_rounding_do_not_differ():
    values = {"mean": [0.1 + 0.2, 0.7], "median": [0.3, 0.1 * 7]}
    axes = {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}
    comparison = compared(axes, lambda point: [values[point["aggregate.rule"]][point["seed"]]])
    assert comparison.summary[1].difference.values == (0.0, 0.0)
    assert "≈" not in comparison.table
    assert "+0.0000 (+0.0000, +0.0000)" in comparison.table


def test_a_mean_that_equals_the_target_up_to_rounding_reaches_it():
    """(0.85 + 0.95 + 0.9) / 3 is 0.8999999999999999 as a float."""
    values = [0.85, 0.95, 0.9]
    assert sum(values) / 3 < 0.9
    axes = {"attack.scale": [1, 2, 3], "seed": [0, 1, 2]}
    comparison = compared(axes, lambda point: [values[point["seed"]] - 0.1 * (point["attack.scale"] - 1)], target=0.8)
    ((_, points),) = breaking_points(comparison).items()
    assert [(point.breaks_at, point.reached_at) for _, point in points] == [(3, 2)]


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_early_stopping_compares_up_to_rounding(mode, sign):
    """0.81 - 0.8 is 0.010000000000000009 as a float, but an improvement must be larger than 0.01."""
    history = [
        RoundRecord(round=k, cohort=[0], metrics={"x": sign * value})
        for k, value in enumerate([0.8, 0.81, 0.811], start=1)
    ]
    stop = Stop(metric="metrics.x", mode=mode, patience=1, min_delta=0.01)
    assert "has not improved by more than 0.01 for 1 round; the best is" in stop_reason(history[:2], stop)
    assert stop_reason([history[0], history[2]], stop) is None
    reached = [RoundRecord(round=1, cohort=[0], metrics={"x": sign * 0.1 * 3})]
    assert "has reached the target" in stop_reason(reached, Stop(metric="metrics.x", mode=mode, target=sign * 0.3))
