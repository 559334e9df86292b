"""Comparisons of a task without accuracy, by its test loss (lower is better)."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedsim
from fedsim.comparison import ComparisonSettings, plan_comparison
from fedsim.comparison.on_paper import draw_curves, draw_heatmap
from fedsim.comparison.results import read_records
from fedsim.comparison.tables import results_csv, summary_csv, summary_text
from fedsim.report import comparison_page, run_page
from tests.comparison.made_up import compared, in_last_round, lines_of
from tests.other_tasks import REGRESSION

AXES = {"aggregate.rule": ["mean", "median"], "local.lr": [0.1, 0.2], "seed": [0, 1, 2]}


def losses(point):
    """Return losses that are lowest for the median at the smaller learning rate, with larger seed differences."""
    start = 3.0 + point["seed"] + (point["aggregate.rule"] == "mean") * (0.5 - 2 * point["local.lr"])
    return [start, start / 2, start / 1000]


def made_up(axes=AXES, target=None):
    comparison = compared(axes, losses, target=target)
    for run in comparison.runs:
        for place, value in enumerate(losses(run.point)):
            run.history[place] = replace(run.history[place], test_accuracy=None, test_loss=value)
    return comparison


def test_the_table_and_the_files_name_the_loss():
    comparison = made_up(target=2.0)
    table = summary_text(comparison)
    assert "accuracy" not in table
    for words in ("test loss", "lowest", "rounds to 2", "-0.000300", "with loss of at most 2"):
        assert words in table
    rows = lines_of(summary_csv(comparison))
    assert float(rows[0]["test_loss"]) == pytest.approx(4.3e-3)
    assert [row["reached"] for row in rows] == ["3"] * 4
    assert [row["mark"] for row in rows] == ["", "best"] * 2
    assert comparison.summary[0].accuracy is None
    (first, *_) = lines_of(results_csv(comparison))
    assert (float(first["best_loss"]), first["rounds_to_target"]) == (pytest.approx(3.3e-3), "2")
    figures = [draw(comparison) for draw in (draw_curves, draw_heatmap)]
    assert ["Test loss by" in figure.get_suptitle() for figure in figures] == [True, True]
    assert figures[0].axes[0].get_ylabel() == "test loss"


@pytest.mark.parametrize(
    ("gaps", "text"),
    [
        ([1e-6, 1.2e-6, 1.4e-6], "+0.00000120 ± 0.00000050"),
        ([1e-6, -1e-4, 2e-4], "+0.00003 ± 0.00038"),
        ([1e-6, -1e-2, 2e-2], "+0.0033 ± 0.0379"),
        ([1e-6, 1.4e-6], "+0.0000012 (+0.0000010, +0.0000014)"),
        ([1.2345e-6], "+0.0000012"),
        ([0.25, 0.25, 0.25], "+0.2500 ± 0.0000"),
    ],
)
def test_a_difference_has_two_digits_of_its_uncertainty(gaps, text):
    comparison = compared({"aggregate.rule": ["mean", "median"], "seed": [*range(len(gaps))]}, lambda point: [0.5])

    def numbers(run):
        worse = run.point["aggregate.rule"] == "median"
        return {"test_accuracy": None, "test_loss": 0.5 + worse * gaps[run.point["seed"]]}

    in_last_round(comparison, numbers)
    assert f" {text} " in f"{summary_text(comparison)} "
    in_words = f"the next, median, is {text.replace('+', '')} higher"
    assert (in_words in comparison.answer) == ("not significantly different" not in comparison.answer)


def test_a_run_whose_loss_is_not_finite_has_no_mark():
    comparison = made_up()
    comparison.runs[0].history[-1] = replace(comparison.runs[0].history[-1], test_loss=float("nan"))
    assert [(row.counted, row.mark) for row in comparison.summary[:2]] == [(2, ""), (3, "*")]
    in_last_round(comparison, lambda run: {"test_loss": float("nan")})
    assert summary_text(replace(comparison)).count("no finite value") == 4


@pytest.mark.parametrize("target", [float("inf"), True])
def test_a_target_of_a_loss_is_a_number(target):
    with pytest.raises(fedsim.ExperimentError, match="must be a number .the test loss to reach."):
        plan_comparison(REGRESSION, AXES, (), ComparisonSettings(target=target))


def test_reports_show_losses(tmp_path):
    axes = {"aggregate.rule": ["mean", "median"], "local.lr": [0.1, 0.0001]}
    tables = {**REGRESSION, "workers": 3, "rounds": 2, "partition": "iid", "metrics": ["r2"]}
    comparison = fedsim.compare(tables, axes, tmp_path / "comparison", jobs=1, target=5.0)
    assert (tmp_path / "comparison" / "loss.png").is_file()
    assert [row.mark for row in comparison.summary if row.point["local.lr"] == 0.0001].count("*") == 1
    stored = read_records(tmp_path / "comparison")
    context, charts = comparison_page.comparison_page(stored)
    assert context["table"]["head"][0] == "test loss"
    assert context["values"][:2] == ["Final test loss", "Best test loss"]
    assert "test loss" in context["title"].lower()
    assert stored.metric.key == "test_loss"
    context, _ = run_page.run_page(stored.runs[0])
    assert [tile[0] for tile in context["tiles"]][:2] == ["final loss", "best loss"]
    assert "Test loss" in context["metrics"]
    assert charts["curves-chart"]
