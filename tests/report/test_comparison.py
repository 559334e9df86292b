from __future__ import annotations

import pytest

from fedsim.intervals import estimate
from fedsim.report.comparison import combinations, compare
from fedsim.report.reading import read_records
from tests.report.folders import add_to_rounds, invent_run, write_points

# Final accuracy by (rule, attack), one per seed; None: the run has not begun.
FINAL = {
    ("mean", "none"): [0.9, 0.8, 0.7],
    ("mean", "alie"): [0.1, 0.2, 0.3],
    ("median", "none"): [0.88, 0.78, 0.68],
    ("median", "alie"): [0.6, 0.5, None],
    ("krum", "none"): [0.7, 0.8, 0.9],
    ("krum", "alie"): [None, None, None],
}


@pytest.fixture
def lines(tmp_path):
    def make(path, point):
        final = FINAL[point["aggregate.rule"], point["attack.name"]][point["seed"]]
        if final is not None:
            invent_run(path, [0.05, final])
            add_to_rounds(path, lambda record: {"coefficients": [0.25, 0.75]})
            (path / "partition.json").write_text('{"byzantine": [1]}')

    axes = {"aggregate.rule": ["mean", "median", "krum"], "attack.name": ["none", "alie"], "seed": [0, 1, 2]}
    return compare(combinations(read_records(write_points(tmp_path / "grid", axes, make))))


def by_point(lines):
    return {line.combination.place: line for line in lines}


def test_one_line_per_combination_over_the_seeds(lines):
    assert [line.combination.place for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    found = by_point(lines)
    assert found[0, 0].accuracy == estimate([0.9, 0.8, 0.7])
    assert found[1, 1].accuracy == estimate([0.6, 0.5])  # the run that is missing is not counted
    assert found[2, 1].accuracy is None


def test_the_best_of_each_group_is_marked_with_its_equals(lines):
    found = by_point(lines)
    best = {place for place, line in found.items() if line.best}
    assert best == {(0, 0), (2, 0), (1, 1)}  # against no attack, mean and krum are equal


def test_the_difference_is_taken_seed_by_seed(lines):
    found = by_point(lines)
    behind = found[1, 0].behind
    assert behind.mean == pytest.approx(-0.02)
    assert behind.half_width == pytest.approx(0, abs=1e-9)  # though each varies by 0.1 from seed to seed
    assert not behind.includes(0)
    shared = found[0, 1].behind  # of the two seeds that both have
    assert shared.n == 2
    assert shared.mean == pytest.approx(estimate([0.1 - 0.6, 0.2 - 0.5]).mean)
    assert found[0, 0].behind is None
    assert found[2, 1].behind is None


def test_the_weight_of_byzantine_workers_and_the_time(lines):
    line = by_point(lines)[0, 0]
    assert line.byzantine_weight == 0.75
    assert line.seconds == pytest.approx(2 * 0.231)


def test_unfinished_runs_are_not_counted(tmp_path):
    def make(path, point):
        invent_run(path, [0.5, 0.6], rounds=2 if point["seed"] else 9)

    grid = read_records(write_points(tmp_path / "grid", {"x": [1], "seed": [0, 1]}, make))
    (line,) = compare(combinations(grid))
    assert line.accuracy == estimate([0.6])
    assert len(line.combination.begun) == 2
    assert not line.best  # there is nothing to be better than


def test_a_grid_over_seeds_alone_and_one_without_seeds(tmp_path):
    def make(path, point):
        invent_run(path, [0.5])

    over_seeds = read_records(write_points(tmp_path / "a", {"seed": [0, 1]}, make))
    assert [line.accuracy for line in compare(combinations(over_seeds))] == [estimate([0.5, 0.5])]
    without = read_records(write_points(tmp_path / "b", {"x": ["u", "v"]}, make))
    assert [line.accuracy.n for line in compare(combinations(without))] == [1, 1]
