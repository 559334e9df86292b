from __future__ import annotations

import csv
import io
import math

import pytest
from scipy import stats

from fedsim.comparison.results import results_csv
from fedsim.comparison.summary import summarise, summary_csv, summary_table
from tests.comparison.made_up import grid_of, results_of

AXES = {"aggregate.rule": ["mean", "median", "krum"], "local.lr": [0.1, 0.2], "seed": [0, 1, 2]}
FINAL = {  # by rule and lr: the accuracy of each seed
    ("mean", 0.1): [0.80, 0.85, 0.90],
    ("median", 0.1): [0.81, 0.87, 0.92],
    ("krum", 0.1): [0.60, 0.66, 0.70],
    ("mean", 0.2): [0.70, 0.75, 0.80],
    ("median", 0.2): [0.69, 0.76, 0.80],
    ("krum", 0.2): [0.50, 0.50, 0.50],
}


@pytest.fixture
def grid():
    return grid_of(AXES)


def results(grid, failed=()):
    def accuracies(point):
        rule, lr, seed = point.values()
        final = FINAL[rule, lr][seed]
        return None if (rule, lr, seed) in failed else [0.1, 0.95, final]

    return results_of(grid, accuracies)


def test_groups_stand_together_in_the_order_of_the_axes(grid):
    rows = summarise(grid, results(grid))
    assert [tuple(row.point.values()) for row in rows] == list(FINAL)


def test_means_and_paired_differences_are_those_of_plain_loops(grid):
    for row in summarise(grid, results(grid)):
        rule, lr = row.point.values()
        own, reference = FINAL[rule, lr], FINAL["mean", lr]
        assert row.accuracy.mean == pytest.approx(sum(own) / 3, abs=1e-12)
        assert row.accuracy.half_width == pytest.approx(stats.sem(own) * stats.t.ppf(0.975, 2), abs=1e-9)
        if rule == "mean":
            assert row.difference is None
        else:
            differences = [a - b for a, b in zip(own, reference, strict=True)]
            assert row.difference.mean == pytest.approx(sum(differences) / 3, abs=1e-12)
            assert row.difference.half_width == pytest.approx(stats.sem(differences) * stats.t.ppf(0.975, 2), abs=1e-9)
        assert row.best_accuracy.mean == pytest.approx(0.95, abs=1e-12)
        assert row.seconds.mean == 4.5
        assert (row.runs, row.failed) == (3, 0)


def test_the_best_of_each_group_is_marked_and_what_cannot_be_told_from_it(grid):
    """lr 0.1: median is ahead of mean by 0.01, 0.02, 0.02 (0.017 ± 0.014). lr 0.2: by -0.01, 0.01, 0.00."""
    marks = {tuple(row.point.values()): row.mark for row in summarise(grid, results(grid))}
    assert [marks[rule, 0.1] for rule in AXES["aggregate.rule"]] == ["", "*", ""]
    assert [marks[rule, 0.2] for rule in AXES["aggregate.rule"]] == ["*", "~", ""]


def test_pairing_tells_apart_what_means_alone_would_not(grid):
    """Intervals of mean and median at lr 0.1 overlap by far; that of their differences excludes 0."""
    mean, median, *_ = summarise(grid, results(grid))
    assert mean.accuracy.mean + mean.accuracy.half_width > median.accuracy.mean
    assert not median.difference.includes(0.0)


def test_failed_runs_count_in_no_mean_and_their_row_has_no_mark(grid):
    rows = summarise(grid, results(grid, failed=[("median", 0.1, 2), ("mean", 0.2, 0), ("mean", 0.2, 1)]))
    by_point = {tuple(row.point.values()): row for row in rows}
    median = by_point["median", 0.1]
    assert (median.runs, median.failed, median.mark) == (3, 1, "")
    assert median.accuracy.mean == pytest.approx((0.81 + 0.87) / 2)
    assert median.difference.mean == pytest.approx((0.01 + 0.02) / 2)
    assert by_point["mean", 0.1].mark == "*"
    krum = by_point["krum", 0.2]
    assert (krum.difference.n, krum.difference.mean) == (1, pytest.approx(-0.3))


def test_where_all_runs_failed_there_are_no_figures_and_no_mark(grid):
    everything = [(*key, seed) for key in FINAL for seed in range(3)]
    rows = summarise(grid, results(grid, failed=everything))
    assert all(row.accuracy is row.difference is row.best_accuracy is None for row in rows)
    assert {row.mark for row in rows} == {""}
    assert summary_table(grid, rows, results(grid, failed=everything)).count("failed  ") == 6


def test_equal_results_are_ties():
    grid = grid_of({"aggregate.rule": ["mean", "median"], "seed": [0, 1]})
    assert [row.mark for row in summarise(grid, results_of(grid, lambda point: [0.5 + point["seed"] / 10]))] == [
        "*",
        "~",
    ]


def test_one_seed_has_no_intervals_and_ties_only_equals():
    grid = grid_of({"aggregate.rule": ["mean", "median", "krum"]})
    runs = results_of(grid, lambda point: [{"mean": 0.5, "median": 0.6, "krum": 0.6}[point["aggregate.rule"]]])
    rows = summarise(grid, runs)
    assert [row.mark for row in rows] == ["", "*", "~"]
    assert math.isinf(rows[0].accuracy.half_width)
    text = summary_table(grid, rows, runs)
    assert "±" not in text
    assert "a difference may be chance" in text


def test_seeds_alone_are_one_row_without_difference_or_mark():
    grid = grid_of({"seed": [0, 1, 2]})
    runs = results_of(grid, lambda point: [point["seed"] / 10])
    (row,) = summarise(grid, runs)
    assert (row.point, row.mark, row.difference, row.accuracy.mean) == ({}, "", None, pytest.approx(0.1))
    assert "difference" not in summary_table(grid, [row], runs).splitlines()[0]


def test_the_table_is_aligned_and_says_what_it_shows(grid):
    runs = results(grid, failed=[("krum", 0.2, 1)])
    text = summary_table(grid, summarise(grid, runs), runs)
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "aggregate.rule"
    assert "difference to mean" in lines[0]
    assert lines[2].split() == ["median", "0.1", "*", "0.8667", "±", "0.1368", "+0.0167", "±", "0.0143", "0.9500", "3"]
    assert lines[4] == ""
    column = lines[0].index("test accuracy")
    assert all(line[column : column + 2] == "0." for line in lines[1:4] + lines[5:8])
    assert lines[7].endswith("2 of 3")
    assert text.splitlines()[-1] == "  aggregate.rule=krum local.lr=0.2 seed=1: worker 1 in round 2 failed: no"


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_csv_of_the_summary_has_the_same_figures(grid):
    runs = results(grid, failed=[("krum", 0.2, 1)])
    summary = summarise(grid, runs)
    rows = read(summary_csv(grid, summary))
    assert [row["aggregate.rule"] for row in rows] == [row.point["aggregate.rule"] for row in summary]
    assert float(rows[1]["difference"]) == summary[1].difference.mean
    assert float(rows[1]["difference_ci95"]) == summary[1].difference.half_width
    assert rows[1]["mark"] == "best"
    assert (rows[0]["difference"], rows[0]["pairs"]) == ("", "")
    assert (rows[-1]["runs"], rows[-1]["failed"], rows[-1]["pairs"]) == ("3", "1", "2")


def test_the_csv_of_results_has_one_row_per_run(grid):
    rows = read(results_csv(grid, results(grid, failed=[("mean", 0.1, 1)])))
    assert len(rows) == 18
    assert rows[0]["id"] == "run0"
    assert [rows[0][key] for key in AXES] == ["mean", "0.1", "0"]
    assert [float(rows[0][key]) for key in ("test_accuracy", "best_accuracy", "seconds")] == [0.8, 0.95, 4.5]
    assert rows[1]["error"] == "worker 1 in round 2 failed: no"
    assert rows[1]["test_accuracy"] == ""
    assert "attack_success" not in rows[0]


def test_attack_success_is_reported_where_there_is_such_a_thing():
    grid = grid_of({"aggregate.rule": ["mean", "median"], "seed": [0, 1]})
    runs = results_of(grid, lambda point: [0.5])
    for index, run in enumerate(runs):
        run.history[-1]["attack_success"] = index / 10
    summary = summarise(grid, runs)
    assert [row.attack_success.mean for row in summary] == [pytest.approx(0.05), pytest.approx(0.25)]
    assert read(results_csv(grid, runs))[3]["attack_success"] == "0.3"
    assert "attack success" in summary_table(grid, summary, runs)
