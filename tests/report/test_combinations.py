from __future__ import annotations

import pytest

from fedsim.core.confidence import estimate
from fedsim.records.combinations import SEED, combinations, groups_of
from fedsim.records.reader import read_records
from fedsim.report.grid_page import compare, grid_page
from tests.report.folders import add_to_rounds, invent_run, write_points

# The final accuracies of each (rule, attack), one for each seed; None for a run that has not begun.
FINAL = {
    ("mean", "none"): [0.9, 0.8, 0.7],
    ("mean", "alie"): [0.1, 0.2, 0.3],
    ("median", "none"): [0.88, 0.78, 0.68],
    ("median", "alie"): [0.6, 0.5, None],
    ("krum", "none"): [0.7, 0.8, 0.9],
    ("krum", "alie"): [None, None, None],
}


@pytest.fixture
def summaries(tmp_path):
    """The summary of each combination, by its place."""

    def make(path, point):
        final = FINAL[point["aggregate.rule"], point["attack.name"]][point["seed"]]
        if final is not None:
            invent_run(path, [0.05, final])
            add_to_rounds(path, lambda record: {"coefficients": [0.25, 0.75]})
            (path / "partition.json").write_text('{"byzantine": [1]}')

    axes = {"aggregate.rule": ["mean", "median", "krum"], "attack.name": ["none", "alie"], "seed": [0, 1, 2]}
    return summaries_of(write_points(tmp_path / "grid", axes, make))


def summaries_of(folder):
    grid = read_records(folder)
    groups = groups_of(combinations(grid.runs, [axis for axis in grid.axes if axis != SEED]))
    return {each.combination.place: each for group in groups for each in compare(group)}


def test_each_combination_has_statistics_over_the_seeds_of_its_runs(summaries):
    found = {place: summary.combination for place, summary in summaries.items()}
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert found[0, 0].score == estimate([0.9, 0.8, 0.7])
    assert found[1, 1].score == estimate([0.6, 0.5])  # one run is missing
    assert found[2, 1].metrics == {}
    assert summaries[0, 0].byzantine_weight == 0.75


def test_the_best_of_each_group_is_marked_and_so_are_its_equals(summaries):
    """Under alie the mean alone has all its runs."""
    assert {place for place, summary in summaries.items() if summary.best} == {(0, 0), (2, 0), (0, 1)}


@pytest.mark.parametrize("how", ["failed", "diverged", "not finite"])
def test_a_combination_without_a_result_of_every_seed_has_no_star(how, tmp_path):
    def make(path, point):
        bad = point == {"aggregate.rule": "mean", "seed": 1}
        invent_run(path, [0.5, 0.9 if point["aggregate.rule"] == "mean" else 0.6])
        if bad and how == "failed":
            (path / "error.txt").write_text("no")
        if bad and how == "diverged":
            add_to_rounds(path, lambda record: {"diverged": "NaN"} if record["round"] == 2 else {})
        if bad and how == "not finite":
            add_to_rounds(path, lambda record: {"test_accuracy": None, "test_loss": None})

    axes = {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}
    folder = write_points(tmp_path / "grid", axes, make)
    assert {place for place, summary in summaries_of(folder).items() if summary.best} == {(1,)}
    context, _ = grid_page(read_records(folder))
    assert [(row["labels"], row["best"]) for row in context["table"]["rows"]] == [(["mean"], False), (["median"], True)]


def test_differences_from_the_best_are_paired_by_seed(summaries):
    assert summaries[1, 0].difference.mean == pytest.approx(-0.02)
    shared = summaries[1, 1].difference  # two seeds have both
    assert (shared.n, shared.mean) == (2, pytest.approx((0.6 - 0.1 + 0.5 - 0.2) / 2))
    assert summaries[0, 0].difference is None
    assert summaries[2, 1].difference is None


def test_unfinished_runs_are_not_counted(tmp_path):
    def make(path, point):
        invent_run(path, [0.5, 0.6], rounds=2 if point["seed"] else 9)

    (summary,) = summaries_of(write_points(tmp_path / "grid", {"x": [1], "seed": [0, 1]}, make)).values()
    assert summary.combination.score == estimate([0.6])
    assert not summary.best  # there is no other combination


def test_the_share_of_byzantine_workers_is_a_mean_over_rounds_with_weights(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5, 0.5, 0.5])
    weights = {1: [0.5, -0.5], 2: [0.75, 0.25], 3: [0.0, 0.0]}
    add_to_rounds(folder, lambda record: {"coefficients": weights[record["round"]]})
    (folder / "partition.json").write_text('{"byzantine": [1]}')
    assert read_records(folder).byzantine_weight == pytest.approx((0.5 + 0.25) / 2)
