from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace

import pytest
import scipy

from fedsim.comparison.results import curves_csv, results_csv
from fedsim.comparison.summary import summarise, summary_csv, summary_table
from fedsim.core.confidence import estimate
from tests.comparison.made_up import grid_of, on_the_clock, results_of

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


def test_means_and_paired_differences_are_those_of_plain_loops(grid):
    rows = summarise(grid, results(grid))
    assert [tuple(row.point.values()) for row in rows] == list(FINAL)
    for row in rows:
        rule, lr = row.point.values()
        own, reference = FINAL[rule, lr], FINAL["mean", lr]
        assert row.accuracy.mean == pytest.approx(sum(own) / 3, abs=1e-12)
        assert row.accuracy.half_width == pytest.approx(scipy.stats.sem(own) * scipy.stats.t.ppf(0.975, 2), abs=1e-9)
        if rule == "mean":
            assert row.difference is None
        else:
            differences = [a - b for a, b in zip(own, reference, strict=True)]
            assert row.difference.mean == pytest.approx(sum(differences) / 3, abs=1e-12)
            assert row.difference.half_width == pytest.approx(
                scipy.stats.sem(differences) * scipy.stats.t.ppf(0.975, 2), abs=1e-9
            )
        assert row.metrics["best_accuracy"].mean == pytest.approx(0.95, abs=1e-12)
        assert row.metrics["seconds"].mean == 4.5
        assert (row.runs, row.failed) == (3, 0)


def test_the_best_of_each_group_and_its_ties_are_marked(grid):
    """lr 0.1: median is ahead of mean by 0.01, 0.02, 0.02 (0.017 ± 0.014). lr 0.2: by -0.01, 0.01, 0.00."""
    mean, median, *_ = rows = summarise(grid, results(grid))
    assert mean.accuracy.mean + mean.accuracy.half_width > median.accuracy.mean  # the intervals of the means overlap
    marks = {tuple(row.point.values()): row.mark for row in rows}
    assert [marks[rule, 0.1] for rule in AXES["aggregate.rule"]] == ["", "*", ""]
    assert [marks[rule, 0.2] for rule in AXES["aggregate.rule"]] == ["*", "~", ""]


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


def test_if_all_runs_failed_there_are_no_means_and_no_marks(grid):
    everything = [(*key, seed) for key in FINAL for seed in range(3)]
    rows = summarise(grid, results(grid, failed=everything))
    assert all(row.accuracy is row.difference is None for row in rows)
    assert {row.mark for row in rows} == {""}
    assert summary_table(grid, rows, results(grid, failed=everything)).count("failed  ") == 6


def test_one_seed_has_no_intervals_and_only_equal_values_are_ties():
    grid = grid_of({"aggregate.rule": ["mean", "median", "krum"]})
    runs = results_of(grid, lambda point: [{"mean": 0.5, "median": 0.6, "krum": 0.6}[point["aggregate.rule"]]])
    rows = summarise(grid, runs)
    assert [row.mark for row in rows] == ["", "*", "~"]
    assert math.isinf(rows[0].accuracy.half_width)
    text = summary_table(grid, rows, runs)
    assert "±" not in text
    assert "a difference may be chance" in text


def test_of_two_seeds_the_table_shows_both_values(grid):
    two = grid_of({**AXES, "seed": [0, 1]})
    runs = results(two)
    text = summary_table(two, summarise(two, runs), runs)
    assert "0.8400 (0.8100, 0.8700)" in text
    assert "+0.0150 (+0.0100, +0.0200)" in text
    assert "±" not in text
    one_failed = results(grid, failed=[("krum", 0.2, 1)])
    text = summary_table(grid, summarise(grid, one_failed), one_failed)
    assert "0.5000 (0.5000, 0.5000)" in text
    assert "of two runs with the two values in brackets" in " ".join(text.split())


def test_seeds_alone_are_one_row_without_difference_or_mark():
    grid = grid_of({"seed": [0, 1, 2]})
    runs = results_of(grid, lambda point: [point["seed"] / 10])
    (row,) = summarise(grid, runs)
    assert (row.point, row.mark, row.difference, row.accuracy.mean) == ({}, "", None, pytest.approx(0.1))
    assert "difference" not in summary_table(grid, [row], runs).splitlines()[0]


def test_the_table_is_aligned_and_lists_failed_runs(grid):
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


def test_a_spreadsheet_runs_no_text_of_a_csv_file():
    labels = ["=1+1", "+cmd", "-x", "@SUM(A1)", "'quoted'", "\tx", "krum", "-0.5", "1e-3", 'a,"b']
    grid = grid_of({"variant": [{"label": label} for label in labels]})
    runs = results_of(grid, lambda point: [0.5])
    for text in (results_csv(grid, runs), curves_csv(grid, runs), summary_csv(grid, summarise(grid, runs))):
        rows = read(text)
        cells = [row["variant"] for row in rows]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t")) or cell[:2] == "-x"]
        assert [cell.removeprefix("'") for cell in cells] == labels, "one apostrophe at the beginning is no part of it"


def test_the_csv_of_curves_has_one_row_per_run_and_round(timed):
    grid, runs = timed
    rows = read(curves_csv(grid, runs))
    assert len(rows) == 6 * 3
    first = rows[0]
    assert list(first)[:6] == ["id", "policy", "seed", "round", "virtual_seconds", "updates"]
    assert (first["id"], first["policy"], first["seed"], first["round"]) == ("run0", "sync", "0", "1")
    numbers = ("virtual_seconds", "updates", "arrivals", "test_accuracy", "test_loss", "train_loss", "seconds")
    assert [float(first[key]) for key in numbers] == [10.0, 2, 4, 0.5, 0.5, 0.5, 1.5]
    assert (first["attack_success"], rows[-1]["test_accuracy"]) == ("", "0.8999")


def test_attack_success_and_the_metrics_of_plugs_are_reported():
    grid = grid_of({"local.lr": [0.1, 0.2], "seed": [0, 1]})
    runs = results_of(grid, lambda point: [0.5])
    for index, run in enumerate(runs):
        metrics = {"update_norm": 2.0 + index}
        run.history[-1] = replace(run.history[-1], attack_success=index / 10, metrics=metrics)
    summary = summarise(grid, runs)
    assert [row.metrics["attack_success"].mean for row in summary] == [pytest.approx(0.05), pytest.approx(0.25)]
    assert read(results_csv(grid, runs))[3]["attack_success"] == "0.3"
    assert read(results_csv(grid, runs))[3]["metrics.update_norm"] == "5.0"
    assert read(curves_csv(grid, runs))[3]["metrics.update_norm"] == "5.0"
    assert read(summary_csv(grid, summary))[1]["metrics.update_norm"] == "4.5"
    head, line = summary_table(grid, summary, runs).splitlines()[:2]
    assert re.search(r"attack success +update_norm +runs", head)
    assert "2.50 (2.00, 3.00)" in line


def test_the_table_fits_120_columns_and_names_what_it_leaves_out(grid):
    runs = results(grid)
    names = [f"{model}_worker_accuracy_{what}" for what in ("gini", "mean") for model in ("global", "personal")]
    for run in runs:
        metrics = dict.fromkeys([*names, *(f"other_number_{index}" for index in range(20))], 0.5)
        run.history[-1] = replace(run.history[-1], metrics=metrics)
    summary = summarise(grid, runs)
    text = summary_table(grid, summary, runs)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert re.search(r"difference to mean +global_worker_accuracy_mean +other_number_0 +runs$", lines[0])
    (left_out,) = [
        line for line in lines if line.startswith("summary.csv has 23 more columns: personal_worker_accurac")
    ]
    assert left_out.endswith(" ...")
    assert {f"metrics.{name}" for name in names} <= set(read(summary_csv(grid, summary))[0])


@pytest.fixture
def timed():
    """Runs on a clock of two policies and three seeds, of which the second never reaches 0.9 with seed 2."""
    grid = grid_of({"policy": ["sync", "asgd"], "seed": [0, 1, 2]}, target=0.9)
    accuracies = {
        ("sync", 0): [0.5, 0.9, 0.95],  # the target is reached in round 2, at 2 rounds of 10 s
        ("sync", 1): [0.9, 0.2, 0.3],  # in round 1: what comes later does not matter
        ("sync", 2): [0.1, 0.1, 0.91],
        ("asgd", 0): [0.1, 0.95, 0.99],
        ("asgd", 1): [0.1, 0.2, 0.93],
        ("asgd", 2): [0.1, 0.2, 0.8999],
    }
    runs = results_of(grid, lambda point: accuracies[point["policy"], point["seed"]])
    return grid, on_the_clock(runs, lambda point: 10.0 if point["policy"] == "sync" else 3.0)


def test_the_target_is_reached_at_the_first_test_with_it(timed):
    grid, runs = timed
    sync, asgd = summarise(grid, runs)
    assert (sync.reached, asgd.reached) == (3, 2)
    rounds = [2, 1, 3]
    for name, scale in {"rounds": 1, "virtual_seconds": 10.0, "updates": 2, "arrivals": 4}.items():
        found = sync.metrics[f"{name}_to_target"]
        assert found.mean == pytest.approx(2 * scale, abs=1e-12)
        expected = scipy.stats.sem([scale * round for round in rounds]) * scipy.stats.t.ppf(0.975, 2)
        assert found.half_width == pytest.approx(expected, abs=1e-9)
    assert asgd.metrics["virtual_seconds_to_target"].mean == pytest.approx(3.0 * (2 + 3) / 2)
    assert [row.metrics["virtual_seconds"].mean for row in (sync, asgd)] == [30.0, 9.0]
    assert [row.metrics["staleness"].mean for row in (sync, asgd)] == [1.0, 1.0]


def test_the_table_names_targets_that_were_not_reached(timed):
    grid, runs = timed
    table = summary_table(grid, summarise(grid, runs), runs)
    head, sync, asgd = table.splitlines()[:3]
    assert re.search(r"virtual s to 90 percent +updates +arrivals +", head)
    assert "20.0 ± 24.8" in sync
    assert "7.50 (6.00, 9.00) (2 of 3)" in asgd
    assert "if not all runs reached the target" in table
    never, runs = grid_of(grid.axes, target=1.0), [replace(run, target=1.0) for run in runs]
    table = summary_table(never, summarise(never, runs), runs)
    assert table.count("not reached") == 2
    assert "if not all" not in table
    assert all(row.metrics["arrivals_to_target"] is None for row in summarise(never, runs))


def test_without_a_clock_the_target_is_reached_after_rounds():
    grid = grid_of({"aggregate.rule": ["mean"], "seed": [0, 1]}, target=0.9)
    runs = results_of(grid, lambda point: [0.1, 0.92] if point["seed"] else [0.9])
    (row,) = summarise(grid, runs)
    assert [row.metrics.get(f"{name}_to_target") for name in ("virtual_seconds", "rounds")] == [None, estimate([1, 2])]
    head, line = summary_table(grid, [row], runs).splitlines()[:2]
    assert "rounds to 90 percent" in head
    assert "virtual" not in head
    assert "1.50 (1.00, 2.00)" in line


def test_runs_without_a_clock_show_rounds_beside_runs_with_one(timed):
    grid, runs = timed
    for run in runs[:3]:
        run.history[:] = [replace(record, virtual_seconds=None, asynchronous=None) for record in run.history]
    sync, asgd = summary_table(grid, summarise(grid, runs), runs).splitlines()[1:3]
    assert "2.00 ± 2.48 rounds" in sync
    assert "rounds" not in asgd


def test_the_csv_files_have_the_clock_and_the_target(timed):
    grid, runs = timed
    first, *_, last = read(results_csv(grid, runs))
    clock = ("virtual_seconds", "updates", "arrivals", "staleness")
    assert [float(first[key]) for key in clock] == [30.0, 6, 12, 1.0]
    to_target = ("rounds_to_target", "virtual_seconds_to_target", "updates_to_target", "arrivals_to_target")
    assert [float(first[key]) for key in to_target] == [2, 20.0, 4, 8]
    assert [last[key] for key in to_target] == [""] * 4
    summary = summarise(grid, runs)
    sync, asgd = read(summary_csv(grid, summary))
    assert (sync["target"], sync["reached"], asgd["reached"]) == ("0.9", "3", "2")
    assert float(sync["virtual_seconds_to_target"]) == 20.0
    assert float(sync["arrivals_to_target_ci95"]) == summary[0].metrics["arrivals_to_target"].half_width
    assert float(asgd["staleness"]) == 1.0


def test_a_failed_run_reached_nothing():
    grid = grid_of({"policy": ["sync", "asgd"], "seed": [0, 1]}, target=0.5)
    runs = results_of(grid, lambda point: None if point["policy"] == "asgd" or point["seed"] else [0.6])
    sync, asgd = summarise(grid, runs)
    assert (sync.reached, asgd.reached) == (1, 0)
    table = summary_table(grid, [sync, asgd], runs)
    assert "not reached" not in table
    assert "(1 of" not in table
    assert "rounds_to_target" in results_csv(grid, runs)
