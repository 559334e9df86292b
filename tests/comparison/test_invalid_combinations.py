"""Comparisons that skip invalid combinations of settings (--skip-invalid)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedsim.comparison.folder import ComparisonRecords
from fedsim.comparison.on_paper import draw_curves, draw_heatmap
from fedsim.comparison.plan import plan_comparison
from fedsim.comparison.rows import ComparisonSettings
from fedsim.errors import ExperimentError
from tests.comparison.made_up import results_of

WORDS = ["rounds=1", "workers=5", "data=tests.components:tiny", "model=logistic"]
SKIP = ComparisonSettings(skip_invalid=True)
AXES = {"aggregate.rule": ["krum", "median"], "attack.workers": [[0], [0, 1]]}  # krum needs n >= 2f + 3
NAMES = [("krum", [0]), ("median", [0]), ("median", [0, 1])]


def comparison_of(axes=AXES, settings=SKIP):
    return plan_comparison(
        {"comparison": {**axes, "attack.name": ["sign_flipping"]}}, None, WORDS, settings, allow_imports=True
    )


def made_up(accuracies):
    """Return the comparison of this file with invented results."""
    comparison = ComparisonRecords(Path("nowhere"), comparison_of()).comparison(keeps_folder=False)
    return replace(comparison, runs=results_of(comparison, accuracies))


def test_invalid_combinations_have_no_run_and_are_listed():
    plan = comparison_of()
    assert [tuple(run.point.values())[:2] for run in plan.runs] == NAMES
    [line] = plan.left_out
    assert "aggregate.rule=krum attack.workers=0+1" in line
    assert "2f + 3" in line


def test_they_are_an_error_without_the_setting():
    with pytest.raises(ExperimentError, match="2f"):
        comparison_of(settings=ComparisonSettings())


def test_a_value_without_any_valid_combination_is_removed_from_its_axis():
    plan = comparison_of({**AXES, "aggregate.rule": ["median", "krumm"]})
    assert plan.axes["aggregate.rule"] == ["median"]
    [line] = plan.left_out
    assert 'did you mean "krum"?' in line


def test_a_comparison_without_any_valid_combination_is_an_error():
    with pytest.raises(ExperimentError, match="krum"):
        comparison_of({"aggregate.rule": ["krum"], "attack.workers": [[0, 1], [1, 2]]})


def test_no_difference_is_shown_where_the_first_value_is_left_out():
    rows = made_up(lambda point: [0.5, 0.6 if point["aggregate.rule"] == "krum" else 0.7]).summary
    differences = {(row.point["aggregate.rule"], len(row.point["attack.workers"])): row.difference for row in rows}
    assert round(differences["median", 1].mean, 6) == 0.1
    assert differences["krum", 1] is None
    assert differences["median", 2] is None


def test_figures_show_each_line_as_in_the_legend_and_an_empty_cell():
    plan = made_up(lambda point: [0.5, 0.6])
    whole, part = draw_curves(plan).axes[:2]
    assert part.lines[0].get_color() == whole.lines[1].get_color() != whole.lines[0].get_color()
    texts = [text.get_text() for text in draw_heatmap(plan).axes[0].texts]
    assert texts.count("0.6000") == 3
    assert "failed" not in texts
