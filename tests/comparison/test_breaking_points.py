from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest

import fedsim
from fedsim.comparison.summary import summarise, summary_table
from fedsim.records.reader import read_records
from fedsim.records.value_curves import MOST_LINES, breaking_points, breaking_points_csv
from fedsim.report.grid_page import grid_page
from tests.comparison.made_up import grid_of, results_of
from tests.report.folders import invent_run, write_points

SCALES = [10, 1, 0.5, 2]
AXES = {"aggregate.rule": ["mean", "krum", "median", "caf", "rfa"], "attack.scale": SCALES, "seed": [0, 1]}
FINAL = {  # by rule: the mean accuracies of the scales 0.5, 1, 2, 10; None: a run failed
    "mean": [0.9, 0.6, 0.5, 0.1],
    "krum": [0.3, 0.7, 0.4, 0.4],
    "median": [0.9, 0.3, 0.7, 0.6],
    "caf": [0.5, 0.4, 0.3, 0.2],
    "rfa": [0.8, 0.7, None, None],
}
POINTS = {
    "mean": ("2", (2, 1, [], [])),
    "krum": ("2, but also missed at 0.5", (2, 1, [0.5], [])),
    "median": ("none up to 10, but missed at 1", (None, 10, [1], [])),
    "caf": ("0.5, the smallest value", (0.5, None, [], [])),
    "rfa": ("none up to 1; no result at 2, 10", (None, 1, [], [2, 10])),
}
TEXTS = {rule: text for rule, (text, _) in POINTS.items()}


def accuracies(point):
    """Each seed is 0.25 above or below the mean. Where a mean is None, the run of seed 1 fails."""
    mean = FINAL[point["aggregate.rule"]][sorted(SCALES).index(point["attack.scale"])]
    if mean is None:
        return None if point["seed"] else [0.9, 0.1]
    return [0.9, mean + (0.25 if point["seed"] else -0.25)]


def only_point(accuracy, change=None, seeds=(0,)):
    """The text of the breaking point of one line over the scales 1, 2 and 5; `change` is made to the last records."""
    grid = grid_of({"attack.scale": [1, 2, 5], "seed": list(seeds)}, target=0.6)
    runs = results_of(grid, accuracy)
    for run in runs:
        if change is not None:
            run.history[-1] = replace(run.history[-1], **change(run.point))
    ((_, point),) = breaking_points(grid, runs)["attack.scale"]
    return point.text


def test_a_line_breaks_at_the_smallest_value_from_which_on_no_mean_reaches_the_target():
    grid = grid_of(AXES, target=0.6)
    ((key, found),) = breaking_points(grid, results_of(grid, accuracies)).items()
    assert key == "attack.scale"
    assert {others["aggregate.rule"]: (point.text, tuple(point)) for others, point in found} == POINTS


def test_a_loss_reaches_the_target_from_below():
    losses = lambda point: {"test_accuracy": None, "test_loss": point["attack.scale"] / 5}  # noqa: E731
    assert only_point(lambda point: [0.5], losses) == "5"


@pytest.mark.parametrize("change", [{"diverged": "NaN"}, {"test_accuracy": math.nan}])
def test_a_value_of_which_a_run_diverged_misses_the_target(change):
    """Though the last finite model reaches it, as that of the other seed."""
    last = {"attack.scale": 5, "seed": 1}
    assert only_point(lambda point: [0.9], lambda point: change if point == last else {}, seeds=(0, 1)) == "5"


def test_of_failed_runs_alone_nothing_is_known():
    assert only_point(lambda point: None) == "unknown; no result at 1, 2, 5"


@pytest.mark.parametrize("target", [0.6, None])
def test_the_table_and_the_report_have_the_breaking_points_if_there_is_a_target(target, tmp_path):
    grid = grid_of(AXES, target)
    runs = results_of(grid, accuracies)
    lines = summary_table(grid, summarise(grid, runs), runs).splitlines()
    assert any(line.startswith("attack.scale from which on") for line in lines) == (target is not None)
    assert all(f"  {rule}: {text}" in lines for rule, text in TEXTS.items() if target)

    def make(path, point):
        if (values := accuracies(point)) is not None:
            invent_run(path, values)

    folder = write_points(tmp_path / "grid", AXES, make)
    description = json.loads((folder / "grid.json").read_text())
    (folder / "grid.json").write_text(json.dumps({**description, "target": target}))
    context, _ = grid_page(read_records(folder))
    assert context["breaking"] == ([("attack scale", list(TEXTS.items()))] if target else [])


def test_of_many_lines_the_table_has_the_first():
    grid = grid_of({"aggregate.rule": [f"rule{n}" for n in range(MOST_LINES + 3)], "workers": [5, 6, 7]}, target=0.6)
    runs = results_of(grid, lambda point: [0.5])
    table = summary_table(grid, summarise(grid, runs), runs)
    assert table.count(": 5, the smallest value\n") == MOST_LINES
    assert "  3 more" in table.splitlines()


def test_the_file_has_a_row_for_each_axis_of_numbers_and_line():
    grid = grid_of({"attack.scale": [1, 2, 5], "attack.name": ["ipm", "foe"], "workers": [5, 6, 7]}, target=0.6)
    runs = results_of(grid, lambda point: [0.7 if point["attack.scale"] == 2 else 0.1])
    rows = list(csv.DictReader(io.StringIO(breaking_points_csv(grid, breaking_points(grid, runs)))))
    assert [row["key"] for row in rows] == ["attack.scale"] * 6 + ["workers"] * 6
    assert list(rows[3].values()) == ["attack.scale", "", "foe", "5", "0.6", "5", "2", "1", ""]
    assert list(rows[6].values()) == ["workers", "1", "ipm", "", "0.6", "5", "", "", ""]


@pytest.mark.parametrize("target", [1.0, None])
def test_a_comparison_writes_the_files_that_it_has_numbers_for(serial, tmp_path, target):
    """That of breaking points with a target, and the figure of workers if they are tested."""
    tables = {**serial, "rounds": 1} | ({"data.worker_test": 0.3} if target else {})
    fedsim.compare(tables, {"local.lr": [0.01, 0.02, 0.03]}, tmp_path / "out", jobs=1, target=target)
    names = ("breaking_points.csv", "workers.png")
    assert {(tmp_path / "out" / name).is_file() for name in names} == {target is not None}
    if target:
        rows = list(csv.DictReader((tmp_path / "out" / "breaking_points.csv").read_text().splitlines()))
        assert [(row["key"], row["target"]) for row in rows] == [("local.lr", "1.0")]
