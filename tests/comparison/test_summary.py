"""The summary rows of a comparison, its printed table and its CSV files."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import replace

import pytest

import fedsim
from fedsim.comparison import ComparisonSettings
from fedsim.comparison.results import read_records
from fedsim.comparison.tables import curves_csv, results_csv, summary_csv, summary_text
from fedsim.core.confidence import estimate
from fedsim.report.comparison_page import comparison_page
from fedsim.report.on_page import scales_of
from tests.comparison.made_up import compared, in_last_round, lines_of, on_the_clock
from tests.report.folders import add_to_rounds, invent_run, write_points

AXES = {"aggregate.rule": ["mean", "median", "krum"], "local.lr": [0.1, 0.2], "seed": [0, 1, 2]}
FINAL = {  # accuracy of each seed, by (rule, learning rate)
    ("mean", 0.1): [0.80, 0.85, 0.90],
    ("median", 0.1): [0.81, 0.87, 0.92],
    ("krum", 0.1): [0.60, 0.66, 0.70],
    ("mean", 0.2): [0.70, 0.75, 0.80],
    ("median", 0.2): [0.69, 0.755, 0.80],
    ("krum", 0.2): [0.50, 0.50, 0.50],
}


def made_up(failed=(), **axes):
    def accuracies(point):
        rule, lr, seed = point.values()
        return None if (rule, lr, seed) in failed else [0.1, 0.95, FINAL[rule, lr][seed]]

    return compared({**AXES, **axes}, accuracies)


def test_means_and_paired_differences_equal_those_of_plain_loops_also_in_the_csv_file():
    comparison = made_up()
    assert [tuple(row.point.values()) for row in comparison.summary] == list(FINAL)
    for row, line in zip(comparison.summary, lines_of(summary_csv(comparison)), strict=True):
        rule, lr = row.point.values()
        final, reference = FINAL[rule, lr], FINAL["mean", lr]
        assert row.score == row.accuracy == estimate(final)
        assert (float(line["accuracy"]), float(line["accuracy_ci95"])) == (row.score.mean, row.score.half_width)
        differences = None if rule == "mean" else estimate([a - b for a, b in zip(final, reference, strict=True)])
        assert row.difference == differences
        cells = ["", ""] if differences is None else [str(differences.mean), "3"]
        assert [line["difference"], line["pairs"]] == cells
        assert (row.metrics["best_accuracy"].mean, row.metrics["seconds"].mean) == (pytest.approx(0.95), 4.5)
        assert (len(row.runs), row.failed, line["runs"], line["failed"]) == (3, 0, "3", "0")


def test_the_best_of_each_group_and_its_ties_are_marked():
    """At lr 0.1 the median leads the mean by 0.01, 0.02 and 0.02 (0.017 ± 0.014), at lr 0.2 by -0.01, 0.005 and 0."""
    comparison = made_up()
    mean, median, *_ = comparison.summary
    assert mean.accuracy.mean + mean.accuracy.half_width > median.accuracy.mean  # the intervals of the means overlap
    assert [row.mark for row in comparison.summary] == ["", "*", "", "*", "~", ""]
    assert [line["mark"] for line in lines_of(summary_csv(comparison))] == ["", "best", "", "best", "tie", ""]


def test_failed_runs_count_in_no_mean_and_their_row_has_no_mark():
    comparison = made_up(failed=[("median", 0.1, 2), ("mean", 0.2, 0), ("mean", 0.2, 1)])
    by_point = {tuple(row.point.values()): row for row in comparison.summary}
    median = by_point["median", 0.1]
    assert (len(median.runs), median.failed, median.mark) == (3, 1, "")
    assert median.accuracy.mean == pytest.approx((0.81 + 0.87) / 2)
    assert [lines_of(summary_csv(comparison))[1][name] for name in ("runs", "failed")] == ["3", "1"]
    assert median.difference.mean == pytest.approx((0.01 + 0.02) / 2)
    assert by_point["mean", 0.1].mark == "*"
    krum = by_point["krum", 0.2]
    assert (krum.difference.n, krum.difference.mean) == (1, pytest.approx(-0.3))


def test_if_all_runs_failed_there_are_no_means_and_no_marks():
    comparison = made_up(failed=[(*key, seed) for key in FINAL for seed in range(3)])
    assert all(row.accuracy is row.difference is None and row.mark == "" for row in comparison.summary)
    assert summary_text(comparison).count("failed  ") == 6


def test_one_seed_has_no_intervals_and_equal_values_are_all_best():
    accuracy = {"mean": 0.5, "median": 0.6, "krum": 0.6}
    comparison = compared({"aggregate.rule": list(accuracy)}, lambda point: [accuracy[point["aggregate.rule"]]])
    assert [row.mark for row in comparison.summary] == ["", "*", "*"]
    assert math.isinf(comparison.summary[0].accuracy.half_width)
    text = summary_text(comparison)
    assert "±" not in text
    assert "a difference may be chance" in text


def test_of_two_seeds_the_table_shows_both_values():
    text = summary_text(made_up(seed=[0, 1]))
    assert "0.8400 (0.8100, 0.8700)" in text
    assert "+0.0150 (+0.0100, +0.0200)" in text
    assert "±" not in text
    text = summary_text(made_up(failed=[("krum", 0.2, 1)]))
    assert "0.5000 (0.5000, 0.5000)" in text
    assert "for two runs the two values in brackets" in " ".join(text.split())


def test_seeds_alone_are_one_row_without_difference_or_mark():
    comparison = compared({"seed": [0, 1, 2]}, lambda point: [point["seed"] / 10])
    (row,) = comparison.summary
    assert (row.point, row.mark, row.difference, row.accuracy.mean) == ({}, "", None, pytest.approx(0.1))
    assert "difference" not in summary_text(comparison).splitlines()[0]


def test_the_table_is_aligned_and_lists_failed_runs():
    lines = summary_text(made_up(failed=[("krum", 0.2, 1)])).splitlines()
    assert lines[0].split("  ")[0] == "aggregate.rule"
    assert "difference to mean" in lines[0]
    assert lines[2].split() == ["median", "0.1", "*", "0.8667", "±", "0.1368", "+0.0167", "±", "0.0143", "0.9500", "3"]
    assert lines[4] == ""
    column = lines[0].index("test accuracy")
    assert all(line[column : column + 2] == "0." for line in lines[1:4] + lines[5:8])
    assert lines[7].endswith("2 of 3")
    assert lines[-1] == "  aggregate.rule=krum local.lr=0.2 seed=1: worker 1 in round 2 failed: no"


def test_the_csv_of_results_has_one_row_per_run():
    rows = lines_of(results_csv(made_up(failed=[("mean", 0.1, 1)])))
    assert len(rows) == 18
    assert rows[0]["id"] == "run0"
    assert [rows[0][key] for key in AXES] == ["mean", "0.1", "0"]
    assert [float(rows[0][key]) for key in ("test_accuracy", "best_accuracy", "seconds")] == [0.8, 0.95, 4.5]
    assert (rows[1]["error"], rows[1]["test_accuracy"]) == ("worker 1 in round 2 failed: no", "")
    assert "attack_success" not in rows[0]


def test_a_spreadsheet_runs_no_text_of_a_csv_file():
    labels = ["=1+1", "+cmd", "-x", "@SUM(A1)", "'quoted'", "\tx", "krum", "-0.5", "1e-3", 'a,"b']
    comparison = compared({"variant": [{"label": label} for label in labels]}, lambda point: [0.5])
    for table in (results_csv, curves_csv, summary_csv):
        cells = [row["variant"] for row in lines_of(table(comparison))]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t")) or cell[:2] == "-x"]
        assert [cell.removeprefix("'") for cell in cells] == labels, "the leading apostrophe is not part of the value"


def test_attack_success_and_the_metrics_of_components_are_reported():
    comparison = compared({"local.lr": [0.1, 0.2], "seed": [0, 1]}, lambda point: [0.5])
    for index, run in enumerate(comparison.runs):
        run.history[-1] = replace(run.history[-1], attack_success=index / 10, metrics={"update_norm": 2.0 + index})
    assert [row.metrics["attack_success"].mean for row in comparison.summary] == pytest.approx([0.05, 0.25])
    assert lines_of(results_csv(comparison))[3]["attack_success"] == "0.3"
    last = [(results_csv, 3), (curves_csv, 3), (summary_csv, 1)]
    assert [lines_of(table(comparison))[row]["metrics.update_norm"] for table, row in last] == ["5.0", "5.0", "4.5"]
    head, line = summary_text(comparison).splitlines()[:2]
    assert re.search(r"attack success +update_norm +runs", head)
    assert "2.50 (2.00, 3.00)" in line


def test_the_table_fits_120_columns_and_names_what_it_leaves_out():
    comparison = made_up()
    names = [f"{model}_worker_accuracy_{what}" for what in ("gini", "mean") for model in ("global", "personal")]
    metrics = dict.fromkeys([*names, *(f"other_number_{index}" for index in range(20))], 0.5)
    in_last_round(comparison, lambda run: {"metrics": metrics})
    lines = summary_text(comparison).splitlines()
    assert max(map(len, lines)) <= 120
    assert re.search(r"difference to mean +global_worker_accuracy_mean +other_number_0 +runs$", lines[0])
    start = "summary.csv has 23 more columns: personal_worker_accurac"
    assert [line.endswith(" ...") for line in lines if line.startswith(start)] == [True]
    assert {f"metrics.{name}" for name in names} <= set(lines_of(summary_csv(comparison))[0])


@pytest.fixture
def timed():
    """Return runs on the virtual clock of two policies and three seeds. The second policy misses 0.9 at seed 2."""
    accuracies = {
        ("sync", 0): [0.5, 0.9, 0.95],  # the target is reached in round 2, after 2 rounds of 10 s
        ("sync", 1): [0.9, 0.2, 0.3],  # reached in round 1; later rounds do not matter
        ("sync", 2): [0.1, 0.1, 0.91],
        ("asgd", 0): [0.1, 0.95, 0.99],
        ("asgd", 1): [0.1, 0.2, 0.93],
        ("asgd", 2): [0.1, 0.2, 0.8999],
    }
    runs = {"policy": ["sync", "asgd"], "seed": [0, 1, 2]}
    comparison = compared(runs, lambda point: accuracies[point["policy"], point["seed"]], target=0.9)
    on_the_clock(comparison.runs, lambda point: 10.0 if point["policy"] == "sync" else 3.0)
    return comparison


def test_the_target_is_reached_at_the_first_test_with_it(timed):
    sync, asgd = timed.summary
    assert (sync.reached, asgd.reached) == (3, 2)
    for name, scale in {"rounds": 1, "virtual_seconds": 10.0, "updates": 2, "arrivals": 4}.items():
        assert sync.metrics[f"{name}_to_target"] == estimate([scale * round for round in (2, 1, 3)])
    assert asgd.metrics["virtual_seconds_to_target"].mean == pytest.approx(3.0 * (2 + 3) / 2)
    assert [row.metrics["virtual_seconds"].mean for row in (sync, asgd)] == [30.0, 9.0]
    assert [row.metrics["staleness"].mean for row in (sync, asgd)] == [1.0, 1.0]


def test_the_table_names_targets_that_were_not_reached(timed):
    table = summary_text(timed)
    head, sync, asgd = table.splitlines()[:3]
    assert re.search(r"virtual s to 90 percent +updates to target +", head)
    assert "20.0 ± 24.8" in sync
    assert "7.50 (6.00, 9.00) (2 of 3)" in asgd
    assert "where only some runs reached the target" in table
    runs = [replace(run, target=1.0) for run in timed.runs]
    never = replace(timed, runs=runs, settings=ComparisonSettings(target=1.0))
    table = summary_text(never)
    assert table.count("not reached") == 2
    assert "if not all" not in table
    assert all(row.metrics["arrivals_to_target"] is None for row in never.summary)


def test_without_a_clock_the_target_is_reached_after_rounds(timed):
    axes = {"aggregate.rule": ["mean"], "seed": [0, 1]}
    comparison = compared(axes, lambda point: [0.1, 0.92] if point["seed"] else [0.9], target=0.9)
    (row,) = comparison.summary
    assert [row.metrics.get(f"{name}_to_target") for name in ("virtual_seconds", "rounds")] == [None, estimate([1, 2])]
    head, line = summary_text(comparison).splitlines()[:2]
    assert "rounds to 90 percent" in head
    assert "virtual" not in head
    assert "1.50 (1.00, 2.00)" in line
    for run in timed.runs[:3]:  # next to runs with a clock
        run.history[:] = [replace(record, virtual_seconds=None, asynchronous=None) for record in run.history]
    sync, asgd = summary_text(timed).splitlines()[1:3]
    assert "2.00 ± 2.48 rounds" in sync
    assert "rounds" not in asgd


def test_the_csv_files_have_the_clock_and_the_target(timed):
    first, *_, last = lines_of(results_csv(timed))
    clock = ("virtual_seconds", "updates", "arrivals", "staleness")
    assert [float(first[key]) for key in clock] == [30.0, 6, 12, 1.0]
    to_target = ("rounds_to_target", "virtual_seconds_to_target", "updates_to_target", "arrivals_to_target")
    assert [float(first[key]) for key in to_target] == [2, 20.0, 4, 8]
    assert [last[key] for key in to_target] == [""] * 4
    sync, asgd = lines_of(summary_csv(timed))
    assert (sync["target"], sync["reached"], asgd["reached"]) == ("0.9", "3", "2")
    assert float(sync["virtual_seconds_to_target"]) == 20.0
    assert float(sync["arrivals_to_target_ci95"]) == timed.summary[0].metrics["arrivals_to_target"].half_width
    first, *_, last = rounds = lines_of(curves_csv(timed))
    assert len(rounds) == 6 * 3
    assert list(first)[:6] == ["id", "policy", "seed", "round", "virtual_seconds", "updates"]
    assert (first["id"], first["policy"], first["seed"], first["round"]) == ("run0", "sync", "0", "1")
    numbers = (*clock[:3], "test_accuracy", "test_loss", "train_loss", "seconds")
    assert [float(first[key]) for key in numbers] == [10.0, 2, 4, 0.5, 0.5, 0.5, 1.5]
    assert (first["attack_success"], last["test_accuracy"]) == ("", "0.8999")


def test_a_failed_run_reached_nothing():
    def accuracies(point):
        return None if point["policy"] == "asgd" or point["seed"] else [0.6]

    comparison = compared({"policy": ["sync", "asgd"], "seed": [0, 1]}, accuracies, target=0.5)
    assert [row.reached for row in comparison.summary] == [1, 0]
    table = summary_text(comparison)
    assert "not reached" not in table
    assert "(1 of" not in table
    assert "only some runs reached the target" not in table
    assert "rounds_to_target" in results_csv(comparison)


# -- The terminal, the files and the page show the same rows


def stored(folder, bad=None):
    """Return a stored comparison of three rules and two seeds in which the mean's run of seed 1 is `bad`."""
    final = {"mean": 0.9, "median": 0.6, "krum": 0.6}

    def make(path, point):
        is_bad = (point["aggregate.rule"], point["seed"]) == ("mean", 1)
        rounds = 9 if is_bad and bad == "unfinished" else 2
        invent_run(path, [0.5, final[point["aggregate.rule"]] + point["seed"] / 10], rounds)
        if is_bad and bad == "failed":
            (path / "error.txt").write_text("no")
        if is_bad and bad == "diverged":
            change = {"diverged": "NaN", "train_loss": None}
            add_to_rounds(path, lambda record: change if record["round"] == 2 else {})
        if is_bad and bad == "not finite":
            add_to_rounds(path, lambda record: {"test_accuracy": None, "test_loss": None})

    axes = {"aggregate.rule": list(final), "local.lr": [0.1], "seed": [0, 1]}
    return read_records(write_points(folder, axes, make))


@pytest.mark.parametrize("bad", [None, "failed", "unfinished", "diverged", "not finite"])
def test_the_page_stars_the_rule_that_the_answer_and_the_table_name(bad, tmp_path):
    """The median and Krum are equal."""
    comparison, best = stored(tmp_path, bad), ["median", "krum"] if bad else ["mean"]
    context, _ = comparison_page(comparison)
    rows = context["table"]["rows"]
    assert [row["labels"][-1] for row in rows if row["cells"][0].mark == "★"] == best
    assert [row["labels"][-1] for row in rows if row["best"]] == best
    assert context["answer"].sentence.startswith(f"Best rule by test accuracy: {best[0]} ")
    assert comparison.answer.startswith(f"Best aggregate.rule by test accuracy: {best[0]} ")
    assert ("with the same mean as krum" in comparison.answer) == bool(bad)
    assert [row.point["aggregate.rule"] for row in comparison.summary if row.mark == "*"] == best


def test_a_diverged_run_has_one_train_loss_in_the_files_and_on_the_page(tmp_path):
    """The mean over the seeds is None too, instead of the value of the other seed."""
    comparison = stored(tmp_path, "diverged")
    assert math.isnan(comparison.runs[1].metrics["train_loss"])
    lines = lines_of(results_csv(comparison))[1], lines_of(summary_csv(comparison))[0]
    assert [line["train_loss"] for line in lines] == ["nan", "nan"]
    if importlib.util.find_spec("pandas"):
        assert math.isnan(comparison.to_dataframe("run")["train_loss"][1])
    _, charts = comparison_page(comparison)
    (figure,) = [each for each in charts["heat-map-chart"] if each["when"]["value"] == "Final train loss"]
    assert [row[0] for row in figure["data"][0]["z"]] == [None, pytest.approx(1.35), pytest.approx(1.35)]


def test_compressed_runs_are_compared_by_the_bytes_they_need(tmp_path):
    """The columns of bytes appear only if the compared runs send different numbers of bytes."""
    axes = {"processors": [[], ["sign"]], "seed": [0, 1]}
    tables = {"rounds": 3, "workers": 3, "model": "logistic", "data": "tests.components:tiny", "engine": "serial"}
    comparison = fedsim.compare(tables, axes, tmp_path / "a", jobs=1, target=0.01, progress=False)
    head = next(line for line in summary_text(comparison).splitlines() if "MB" in line)
    assert "MB to 1 percent" in head
    plain, signs = comparison.summary
    one_round = 2 * 3 * 4 * 7850
    assert plain.metrics["bytes"].mean == 3 * one_round
    assert signs.metrics["bytes"].mean == 3 * (one_round // 2 + 3 * (982 + 4))
    assert plain.metrics["bytes_to_target"].mean == one_round
    same = fedsim.compare(tables, {"local.lr": [0.1, 0.2]}, tmp_path / "b", jobs=1, target=0.01, progress=False)
    assert "MB" not in summary_text(same)
    assert scales_of(comparison.runs) == ["bytes"]
    assert scales_of(same.runs) == []
