from __future__ import annotations

import math
from dataclasses import replace

import pytest

import fedsim
from fedsim.comparison.results import read_records
from fedsim.comparison.tables import MOST_LINES, breaking_points, breaking_points_csv, summary_text
from fedsim.report.comparison_page import comparison_page
from tests.comparison.made_up import compared, in_last_round, lines_of
from tests.report.folders import invent_run, write_points

AXES = {"aggregate.rule": ["mean", "krum", "median", "caf", "rfa"], "attack.scale": [10, 1, 0.5, 2], "seed": [0, 1]}
FINAL = {  # mean accuracies at the scales 0.5, 1, 2, 10, by rule; None: a run failed
    "mean": [0.9, 0.6, 0.5, 0.1],
    "krum": [0.3, 0.7, 0.4, 0.4],
    "median": [0.9, 0.3, 0.7, 0.6],
    "caf": [0.5, 0.4, 0.3, 0.2],
    "rfa": [0.8, 0.7, None, None],
}
TEXTS = {
    "mean": "2",
    "krum": "2, but also missed at 0.5",
    "median": "none up to 10, but missed at 1",
    "caf": "0.5, the smallest value",
    "rfa": "none up to 1; no result at 2, 10",
}


def accuracies(point):
    """Return accuracies that differ by ±0.25 between the seeds. Where the mean is None, the run of seed 1 fails."""
    mean = FINAL[point["aggregate.rule"]][[0.5, 1, 2, 10].index(point["attack.scale"])]
    if mean is None:
        return None if point["seed"] else [0.9, 0.1]
    return [0.9, mean + (0.25 if point["seed"] else -0.25)]


def test_a_line_breaks_at_the_smallest_value_from_which_on_no_mean_reaches_the_target():
    ((key, points),) = breaking_points(compared(AXES, accuracies, target=0.6)).items()
    assert key == "attack.scale"
    assert {others["aggregate.rule"]: point.text for others, point in points} == TEXTS
    assert {others["aggregate.rule"]: tuple(point) for others, point in points} == {
        "mean": (2, 1, [], []),
        "krum": (2, 1, [0.5], []),
        "median": (None, 10, [1], []),
        "caf": (0.5, None, [], []),
        "rfa": (None, 1, [], [2, 10]),
    }


def points_of(accuracies, change=None, **axes):
    """Return the breaking-point text of a comparison of three scales; `change` alters its last run's last record."""
    comparison = compared({"attack.scale": [1, 2, 5], **axes}, accuracies, target=0.6)
    if change:
        history = comparison.runs[-1].history
        history[-1] = replace(history[-1], **change)
    ((_, point),) = breaking_points(comparison)["attack.scale"]
    return point.text


def test_a_loss_reaches_the_target_from_below():
    comparison = compared({"attack.scale": [1, 2, 5]}, lambda point: [0.5], target=0.6)
    in_last_round(comparison, lambda run: {"test_accuracy": None, "test_loss": run.point["attack.scale"] / 5})
    ((_, point),) = breaking_points(comparison)["attack.scale"]
    assert point.text == "5"


@pytest.mark.parametrize("change", [{"diverged": "NaN"}, {"test_accuracy": math.nan}])
def test_a_value_of_which_a_run_diverged_misses_the_target(change):
    """The value misses the target although the last finite model and the other seed reach it."""
    assert points_of(lambda point: [0.9], change, seed=[0, 1]) == "5"


def test_of_failed_runs_alone_nothing_is_known():
    assert points_of(lambda point: None) == "unknown; no result at 1, 2, 5"


def test_the_table_has_the_first_breaking_points_below_it():
    lines = summary_text(compared(AXES, accuracies, target=0.6)).splitlines()
    assert [line for line in lines if line.startswith("attack.scale: smallest value from which on")]
    assert all(f"  {rule}: {text}" in lines for rule, text in TEXTS.items())
    rules = [f"rule{number}" for number in range(MOST_LINES + 3)]
    many = summary_text(compared({"aggregate.rule": rules, "workers": [5, 6, 7]}, lambda point: [0.5], target=0.6))
    assert many.count(": 5, the smallest value\n") == MOST_LINES
    assert "  3 more" in many.splitlines()
    assert "from which on" not in summary_text(compared(AXES, accuracies))


def test_the_file_has_a_row_for_each_axis_of_numbers_and_line():
    axes = {"attack.scale": [1, 2, 5], "attack.name": ["ipm", "foe"], "workers": [5, 6, 7]}
    comparison = compared(axes, lambda point: [0.7 if point["attack.scale"] == 2 else 0.1], target=0.6)
    rows = lines_of(breaking_points_csv(comparison))
    assert [row["key"] for row in rows] == ["attack.scale"] * 6 + ["workers"] * 6
    assert list(rows[3].values()) == ["attack.scale", "", "foe", "5", "0.6", "5", "2", "1", ""]
    assert list(rows[6].values()) == ["workers", "1", "ipm", "", "0.6", "5", "", "", ""]


def test_a_comparison_writes_the_file_if_it_has_a_target(serial, tmp_path):
    axes = {"local.lr": [0.01, 0.02, 0.03]}
    for out, target in (("with", 1.0), ("without", None)):
        fedsim.compare(serial, axes, tmp_path / out, target=target)
    assert not (tmp_path / "without" / "breaking_points.csv").exists()
    rows = lines_of((tmp_path / "with" / "breaking_points.csv").read_text())
    assert [(row["key"], row["target"]) for row in rows] == [("local.lr", "1.0")]


@pytest.mark.parametrize("target", [0.6, None])
def test_the_report_has_the_same_texts(tmp_path, target):
    def make(path, point):
        if (values := accuracies(point)) is not None:
            invent_run(path, values)

    folder = write_points(tmp_path / "comparison", AXES, make, target=target)
    context, _ = comparison_page(read_records(folder))
    assert context["breaking"] == ([("attack scale", list(TEXTS.items()))] if target else [])
