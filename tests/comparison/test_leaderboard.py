"""The leaderboard of a comparison: mean ranks over the cells, the Friedman test and the critical difference."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedsim.comparison.leaderboard import friedman, leaderboard_csv, leaderboard_text, nemenyi, ranks_of
from fedsim.comparison.on_paper import draw_leaderboard
from tests.comparison.made_up import compared, lines_of

RULES = ["mean", "median", "krum"]
CELLS = ["none", "ipm", "alie", "gaussian", "min_max"]
ACCURACY = {  # accuracies of mean, median and krum, by attack; None: failed
    "none": [0.9, 0.8, 0.7],  # ranks 1, 2, 3
    "ipm": [0.2, 0.8, 0.8],  # 3, 1.5, 1.5
    "alie": [None, 0.6, 0.5],  # 3, 1, 2
    "gaussian": [0.4, 0.5, 0.6],  # 3, 2, 1
    "min_max": [None, None, 0.1],  # 2.5, 2.5, 1
}


def comparison_of(accuracy=ACCURACY, rules=RULES, seeds=(0, 1)):
    def of(point):
        value = accuracy[point["attack.name"]][RULES.index(point["aggregate.rule"])]
        return None if value is None else [value + 0.01 * point["seed"]]

    return compared({"aggregate.rule": rules, "attack.name": list(accuracy), "seed": list(seeds)}, of)


def test_mean_ranks_and_counts_are_those_computed_by_hand():
    board = comparison_of().leaderboard
    standings = {each.name: (each.mean_rank, each.best, each.tied, each.worst_cell) for each in board.standings}
    assert board.cells == 5
    assert standings == {
        "krum": (pytest.approx((3 + 1.5 + 2 + 1 + 1) / 5), 3, 3, "min_max"),
        "median": (pytest.approx((2 + 1.5 + 1 + 2 + 2.5) / 5), 2, 2, "min_max"),
        "mean": (pytest.approx((1 + 3 + 3 + 3 + 2.5) / 5), 1, 1, "alie"),
    }
    assert [each.name for each in board.standings] == ["krum", "median", "mean"]
    assert {each.name: each.worst is None for each in board.standings} == {"krum": False, "median": True, "mean": True}


@pytest.mark.parametrize(("cells", "candidates"), [(5, 3), (12, 4), (8, 10)])
def test_the_tests_agree_with_scipy(cells, candidates):
    values = np.random.default_rng(cells).integers(0, 6, (cells, candidates)).astype(float)  # with ties
    ranks = ranks_of(values)
    statistic, p, f, p_of_f = friedman(ranks)
    expected = stats.friedmanchisquare(*values.T)
    assert (statistic, p) == pytest.approx((expected.statistic, expected.pvalue))
    assert ranks == pytest.approx(stats.rankdata(-values, axis=1))
    # Iman and Davenport's F equals that of an analysis of variance of the ranks, with cells as blocks.
    between = cells * ((ranks.mean(0) - ranks.mean()) ** 2).sum() / (candidates - 1)
    residual = ranks - ranks.mean(0) - ranks.mean(1, keepdims=True) + ranks.mean()
    left = (residual**2).sum() / ((candidates - 1) * (cells - 1))
    assert f == pytest.approx(between / left)
    assert p_of_f == pytest.approx(stats.f.sf(between / left, candidates - 1, (candidates - 1) * (cells - 1)))


def test_equal_candidates_and_a_perfect_order():
    assert friedman(np.full((6, 3), 2.0)) == (0.0, 1.0, 0.0, 1.0)
    statistic, _, f, p_of_f = friedman(np.tile([1.0, 2.0, 3.0], (6, 1)))
    assert (statistic, f, p_of_f) == (pytest.approx(12.0), math.inf, 0.0)  # 12 = cells (candidates - 1)


@pytest.mark.parametrize(("candidates", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_values_equal_those_of_demsar(candidates, q):
    """Compare with Demsar 2006, table 5 (a)."""
    assert nemenyi(7, candidates) / math.sqrt(candidates * (candidates + 1) / 42) == pytest.approx(q, abs=1e-3)


def test_groups_join_neighbours_within_the_critical_difference():
    accuracy = {f"attack{index}": [0.9, 0.5 + 0.01 * (index % 2), 0.5 - 0.01 * (index % 3)] for index in range(12)}
    board = comparison_of(accuracy).leaderboard
    ranks = [each.mean_rank for each in board.standings]
    assert board.critical_difference == pytest.approx(2.343 * math.sqrt(12 / 72), abs=1e-3)
    assert ranks[0] == 1.0
    assert board.groups == [(1, 2)]


def test_the_order_of_the_runs_does_not_matter():
    """With a tuned axis in front, the order of the candidates may differ between cells."""
    comparison = comparison_of()
    backwards = comparison.runs[::2] + comparison.runs[1::2][::-1]
    mixed = [*backwards[3:], *backwards[:3]]
    board = replace(comparison, runs=mixed).leaderboard
    expected = {each.name: each.mean_rank for each in comparison.leaderboard.standings}
    assert {each.name: each.mean_rank for each in board.standings} == pytest.approx(expected)


def test_a_cell_in_which_every_candidate_failed_is_not_a_tie_and_is_left_out():
    board = comparison_of({**ACCURACY, "inf": [None, None, None]}).leaderboard
    without = comparison_of().leaderboard
    assert (board.cells, board.left_out) == (5, 1)
    assert (board.standings, board.p) == (without.standings, without.p)
    assert "1 cell is not ranked" in leaderboard_text(board, "aggregate.rule")
    four = {attack: ACCURACY[attack] for attack in CELLS[:4]}
    assert comparison_of({**four, "inf": [None, None, None]}).leaderboard is None


def test_there_is_none_with_few_candidates_or_cells():
    assert comparison_of(rules=RULES[:2]).leaderboard is None
    assert comparison_of({attack: ACCURACY[attack] for attack in CELLS[:4]}).leaderboard is None


def test_text_csv_and_figure():
    comparison = comparison_of()
    board = comparison.leaderboard
    assert comparison.table.endswith(leaderboard_text(board, "aggregate.rule"))
    rows = lines_of(leaderboard_csv(board, "aggregate.rule"))
    assert [row["aggregate.rule"] for row in rows] == ["krum", "median", "mean"]
    assert rows[1]["worst"] == ""
    labels = [each.get_text() for each in draw_leaderboard(board, "made_up").axes[0].get_yticklabels()]
    assert labels == ["krum", "median", "mean"]
