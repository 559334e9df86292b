"""Comparisons by another number than the test accuracy."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

import fedsim
from fedsim.comparison import ComparisonSettings
from fedsim.comparison.grid import plan_grid
from fedsim.comparison.heat_map import draw_heatmap
from fedsim.comparison.plots import draw_curves
from fedsim.comparison.summary import summarise, summary_csv, summary_table
from fedsim.errors import ExperimentError
from fedsim.records.reader import read_records
from fedsim.records.record import metric_called
from fedsim.report.grid_page import grid_page
from tests.comparison.made_up import grid_of, results_of

AXES = {"aggregate.rule": ["mean", "median"], "attack.name": ["none", "ipm"], "seed": [0, 1, 2]}
DRIFT = {("mean", "none"): 3.0, ("mean", "ipm"): 5.0, ("median", "none"): 2.0, ("median", "ipm"): 7.0}


def made_up(**choices):
    """Runs of equal accuracy, with a metric `drift`, and bytes in proportion to it."""
    grid = replace(grid_of(AXES), settings=ComparisonSettings(**choices))
    runs = results_of(grid, lambda point: [0.1, 0.8])
    for run in runs:
        drift = DRIFT[run.point["aggregate.rule"], run.point["attack.name"]] + run.point["seed"] / 10
        for place, each in enumerate(run.history):
            run.history[place] = replace(each, metrics={"drift": drift}, bytes_up=round(20 * drift))
    return grid, runs


@pytest.mark.parametrize("by", ["metrics.drift", "-metrics.drift", "-bytes_up"])
def test_the_sign_of_the_name_says_which_is_better(by):
    grid, runs = made_up(by=by)
    best = {row.point["attack.name"]: row.point["aggregate.rule"] for row in summarise(grid, runs) if row.mark == "*"}
    up = not by.startswith("-")
    assert best == {"none": "mean" if up else "median", "ipm": "median" if up else "mean"}
    worst = summarise(*made_up(by=by, worst="attack.name"))
    assert [row.chosen["attack.name"] for row in worst] == (["none"] * 2 if up else ["ipm"] * 2)


def test_the_table_the_files_and_the_figures_show_the_number():
    grid, runs = made_up(by="-metrics.drift")
    summary = summarise(grid, runs)
    (mean, median, *_) = csv.DictReader(io.StringIO(summary_csv(grid, summary)))
    assert (float(mean["metrics.drift"]), mean["mark"]) == (pytest.approx(3.1), "")
    assert (float(median["difference"]), median["mark"]) == (pytest.approx(-1.0), "best")
    assert float(mean["test_accuracy"]) == pytest.approx(0.8)
    head = summary_table(grid, summary, runs).splitlines()[0]
    assert head.index("drift") < head.index("difference to mean") < head.index("test accuracy")
    figures = draw_curves(grid, runs), draw_heatmap(grid, runs)
    assert ["drift by" in figure.get_suptitle() for figure in figures] == [True, True]
    assert max(figures[0].axes[0].lines[0].get_ydata()) == pytest.approx(3.1)


def test_the_number_is_stored_and_reported(cli, tmp_path):
    words = ["rounds=2", "workers=3", "model=logistic", "data=tests.plugs:tiny", "engine=serial", "seed=0,1"]
    done = cli("compare", *words, "aggregate.rule=mean,median", "--by", "-train_loss", "--out", "grid")
    assert done.exit_code == 0, done.output
    assert "train loss after the last round" in done.stdout
    assert json.loads((tmp_path / "grid" / "grid.json").read_text())["by"] == "-train_loss"
    assert (tmp_path / "grid" / "train_loss.png").is_file()
    context, _ = grid_page(read_records(tmp_path / "grid"))
    assert context["table"]["head"][:3] == ["train_loss", "difference to best", "test accuracy"]
    assert context["metrics"][0] == "Train loss"
    again = cli("compare", "grid", "--allow-imports", "--by", "test_loss")
    assert "test loss after the last round" in again.stdout
    wrong = cli("compare", "grid", "--allow-imports", "--by", "metrics.drift")
    assert wrong.exit_code == 2
    assert 'by = "metrics.drift": no run has recorded this number in its last round' in wrong.stderr


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("test_lost", 'by = "test_lost": no such number of a round; did you mean "test_loss"'),
        ("metrics", 'by = "metrics": no such number of a round'),
        (3, "by = 3: must be the name of a number of a round"),
        ("validation_loss", 'by = "validation_loss": add data.validation=0.1'),
    ],
)
def test_a_number_that_rounds_do_not_have_is_refused_before_the_runs(by, message, serial):
    with pytest.raises(ExperimentError, match=message):
        plan_grid(serial, {"seed": [0, 1], "by": by})


def test_a_number_of_no_run_is_refused_with_the_nearest(serial):
    tables = {**serial, "metrics": ["macro_f1"]}
    with pytest.raises(
        ExperimentError, match=r'by = "metrics.macro_f2": no run has .* did you mean "metrics.macro_f1"'
    ):
        fedsim.compare(tables, {"seed": [0, 1]}, by="metrics.macro_f2", jobs=1)


@pytest.mark.parametrize(
    ("name", "sign"),
    [("test_accuracy", 1), ("metrics.r2", 1), ("metrics.mae", -1), ("validation_loss", -1), ("bytes_up", -1)],
)
def test_the_direction_of_a_number_is_known(name, sign):
    assert metric_called(name).sign == sign
    assert metric_called(f"-{name}").sign == -1
