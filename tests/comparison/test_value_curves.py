from __future__ import annotations

import pytest

from fedsim.records.on_paper import draw_values
from fedsim.records.value_curves import numeric_axes
from tests.comparison.made_up import grid_of, results_of

AXES = {"attack.scale": [10, 1, 100], "aggregate.rule": ["mean", "median"], "attack.name": ["ipm", "sign_flipping"]}


def accuracy(point):
    """Lower for a stronger attack; the run of one point fails."""
    if point["aggregate.rule"] == "median" and point["attack.scale"] == 10:
        return None
    return [0.9 / point["attack.scale"] + point.get("seed", 0) / 100]


def test_each_axis_of_three_or_more_numbers_has_a_curve():
    axes = {**AXES, "attack.fraction": [0.1, 0.2], "workers": [5, 10, 20], "seed": [0, 1, 2]}
    grid = grid_of(axes)
    assert numeric_axes(grid.axes, grid.compared) == ["attack.scale", "workers"]


def test_a_line_has_the_means_in_the_order_of_the_values():
    grid = grid_of({**AXES, "seed": [0, 2]})
    figure = draw_values(grid, results_of(grid, accuracy), "attack.scale")
    assert [panel.get_title() for panel in figure.axes] == ["attack: ipm", "attack: sign_flipping"]
    panel = figure.axes[0]
    mean, first_of_mean, _, median, *_ = panel.lines
    assert list(mean.get_xdata()) == [1, 10, 100]
    assert list(mean.get_ydata()) == pytest.approx([0.91, 0.1, 0.019])
    assert list(first_of_mean.get_ydata()) == pytest.approx([0.9, 0.09, 0.009]), "a thin line for each of two seeds"
    assert list(median.get_xdata()) == [1, 100], "a value of which a run failed has no mark"
    assert panel.get_xscale() == "log"
    assert [text.get_text() for text in panel.get_xticklabels()] == ["10", "1", "100"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mean", "median"]


def test_bands_are_intervals_over_four_seeds():
    grid = grid_of({"workers": [5, 10, 15], "seed": [0, 1, 2, 3]})
    (panel,) = draw_values(grid, results_of(grid, lambda point: [0.5 + point["seed"] / 100]), "workers").axes
    assert panel.get_xscale() == "linear"
    assert len(panel.lines) == len(panel.collections) == 1  # a line and a band
    assert list(panel.lines[0].get_ydata()) == pytest.approx([0.515] * 3)


def test_without_a_finished_run_there_is_no_figure():
    grid = grid_of({"workers": [5, 10, 15]})
    assert draw_values(grid, results_of(grid, lambda point: None), "workers") is None
