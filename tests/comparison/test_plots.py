"""Figures of made-up comparisons: curves, values of a setting, heat maps of two axes and tests of workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedsim.comparison import ComparisonSettings
from fedsim.comparison.on_paper import (
    MOST_PANELS,
    draw_curves,
    draw_heatmap,
    draw_leaderboard,
    draw_tuning,
    draw_values,
    draw_worker_comparison,
)
from fedsim.comparison.rows import numeric_axes
from fedsim.comparison.tables import summary_text
from fedsim.core.confidence import on_common_grid
from fedsim.core.plotting import encode
from fedsim.data import plot_partition
from fedsim.records.figures import draw_curve, draw_workers
from fedsim.records.worker_results import WorkerResults, workers_csv
from tests.comparison.made_up import compared, comparison_of, in_last_round, on_the_clock
from tests.wcag import READABLE, contrast

RULES, ATTACKS = ["mean", "median", "krum"], ["none", "alie"]


def rising(point):
    return [0.2, 0.4 + 0.1 * len(str(point.get("aggregate.rule", ""))) / 12, 0.7 + 0.01 * point.get("seed", 0)]


def texts_of(figure):
    """Return the texts in the first axes of a figure, without axis labels."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


@pytest.mark.parametrize(("scale", "kind"), [("round", "linear"), ("virtual_seconds", "log")])
def test_runs_of_very_different_time_have_a_logarithmic_axis_of_time(scale, kind):
    comparison = compared({"aggregate.rule": RULES, "attack.name": ATTACKS, "seed": [0, 1]}, rising)
    on_the_clock(comparison.runs, lambda point: 100.0 if point["aggregate.rule"] == "krum" else 1.0)
    assert {panel.get_xscale() for panel in draw_curves(comparison, scale).axes} == {kind}


def test_panels_grow_with_the_comparison_up_to_a_limit():
    sizes = []
    for count in (1, 2, 4, MOST_PANELS + 5):
        axes = {"aggregate.rule": ["mean"], "local.lr": [k / 100 for k in range(1, count + 1)]}
        figure = draw_curves(compared(axes, rising))
        assert len([panel for panel in figure.axes if panel.lines]) == min(count, MOST_PANELS)
        sizes.append(figure.get_size_inches())
    assert sizes[0][0] < sizes[1][0]
    assert sizes[1][1] < sizes[2][1]
    assert max(sizes[3]) < 30
    assert f"; the first {MOST_PANELS} of {MOST_PANELS + 5} panels" in figure.get_suptitle()


DOLLARS = ["$x^{$", "$5 and $6", r"\alpha$"]


def test_labels_and_names_are_not_shown_as_formulas():
    """Matplotlib would raise an error for the first name and show the second one as a formula."""
    axes = {"aggregate.rule": DOLLARS, "attack.name": DOLLARS, "local.lr": [0.1, 0.2, 0.3], "seed": [0, 1]}
    plain = replace(compared(axes, lambda point: [0.5]), name="$x^{$")
    in_last_round(plain, lambda run: {"metrics": {"$x^{$": 1.0}, "validation_accuracy": 0.5})
    tuned = replace(plain, settings=ComparisonSettings(metric="metrics.$x^{$", tune="local.lr"))
    figures = [
        draw_curves(tuned),
        draw_heatmap(plain, over=("attack.name", "local.lr")),
        draw_values(plain, "local.lr"),
        draw_tuning(tuned),
        draw_leaderboard(plain.leaderboard, plain.name),
        draw_curve(plain.runs[0].history, plain.name),
        draw_workers(WorkerResults(1, [0], [3], {"global": [0.5]}, {}), plain.name),
    ]
    assert all(encode(figure, "png") for figure in figures)
    shown = encode(figures[0], "svg").decode()
    assert all(f"<!-- {text} -->" in shown for text in DOLLARS)
    assert plot_partition(np.array([[5, 0], [0, 3]]), "$x^{$").startswith(b"\x89PNG")


def test_long_titles_have_line_breaks():
    """Without them, matplotlib cuts titles at both ends."""
    figure = draw_workers(WorkerResults(6, [0], [3], {"global": [0.5]}, {}), "a long name " * 9)
    encode(figure, "png")
    title = figure._suptitle.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= figure.bbox.width


def test_numbers_at_ticks_stay_formulas():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 1e9], [1, 1e9])
    axes.set(xscale="log", xlabel="$x$")
    shown = encode(figure, "svg").decode()
    assert "<!-- $x$ -->" in shown
    assert r"$\mathdefault{10^{4}}$" in shown


def test_curves_that_hide_each_other_are_named():
    axes = {"aggregate.rule": RULES, "attack.name": ATTACKS, "local.lr": [0.1, 0.2, 0.3]}
    accuracy = {"mean": 0.5, "median": 0.8, "krum": 0.5}
    comparison = compared(axes, lambda point: [0.1, accuracy[point["aggregate.rule"]]])
    for figure in (draw_curves(comparison), draw_values(comparison, "local.lr")):
        assert texts_of(figure) == ["coincide: mean, krum"]
    apart = {**axes, "aggregate.rule": ["mean", "median"]}
    assert texts_of(draw_curves(compared(apart, lambda point: [0.1, 0.1 * len(point["aggregate.rule"])]))) == []


def test_a_run_that_failed_or_has_no_clock_has_no_line():
    axes = {"aggregate.rule": RULES, "seed": [0, 1]}
    figure = draw_curves(compared(axes, lambda point: None if point["aggregate.rule"] == "krum" else rising(point)))
    assert texts_of(figure) == ["failed: krum (2 of 2)"]
    assert len(figure.axes[0].lines) == 2 * 3  # for each rule, the mean and two seeds
    timed = compared(axes, rising)
    on_the_clock(timed.runs[:2], lambda point: 2.0)
    assert len(draw_curves(timed, "virtual_seconds").axes[0].lines) == 3


def test_without_a_finished_run_or_a_second_axis_there_is_no_figure():
    failed = compared({"workers": [5, 10, 15], "local.lr": [0.1, 0.2]}, lambda point: None)
    assert draw_curves(failed) is draw_values(failed, "workers") is draw_heatmap(failed) is None
    assert draw_heatmap(compared({"aggregate.rule": RULES, "seed": [0, 1]}, rising)) is None


def test_runs_of_different_length_are_drawn_as_far_as_they_go():
    axes = {"aggregate.rule": RULES, "rounds": [2, 3], "seed": [0, 1]}
    figure = draw_curves(compared(axes, lambda point: rising(point)[: point["rounds"]]))
    assert [panel.lines[0].get_xdata().tolist() for panel in figure.axes[:2]] == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("seeds", "spread"), [(1, ""), (2, "(0.8230, 0.8239)"), (3, "± 0.0011")])
def test_a_cell_of_the_heat_map_has_the_texts_of_the_table(seeds, spread):
    """The mean of 0.8230 and 0.8239 is 0.82345, and float sums fall on both sides of it."""
    finals = [0.8230, 0.8239, 0.82345]
    comparison = compared(
        {"aggregate.rule": ["mean"], "attack.name": ["none", "alie"], "seed": list(range(seeds))},
        lambda point: [finals[point["seed"]]] if point["attack.name"] == "none" else None,
    )
    mean, *beside, failed = texts_of(draw_heatmap(comparison))
    assert (mean, "".join(beside), failed) == ("0.8235" if seeds > 1 else "0.8230", spread, "failed")
    assert " ".join([mean, *beside]) in summary_text(comparison)


def test_a_cell_of_a_small_number_has_as_many_digits_as_the_table():
    comparison = compared({"aggregate.rule": ["mean"], "attack.name": ["none", "alie"], "seed": [0, 1]}, rising)
    in_last_round(comparison, lambda run: {"test_accuracy": None, "test_loss": 2e-5})
    assert texts_of(draw_heatmap(comparison))[0] == "0.00002000"
    assert "0.00002000" in summary_text(comparison)


@pytest.mark.parametrize(("seeds", "lines", "bands"), [(1, 1, 0), (2, 3, 0), (3, 4, 0), (4, 1, 1)])
def test_up_to_three_seeds_are_thin_lines_and_four_have_a_band(seeds, lines, bands):
    comparison = compared({"workers": [5, 10, 15], "seed": list(range(seeds))}, rising)
    for axes in (draw_curves(comparison).axes[0], draw_values(comparison, "workers").axes[0]):
        count = 3 if axes.get_xlabel() == "round" else 1
        assert (len(axes.lines), len(axes.collections)) == (count * lines, count * bands)


def test_titles_name_the_axes():
    comparison = compared({"aggregate.rule": RULES, "attack.name": ATTACKS, "local.lr": [0.1], "seed": [0, 1]}, rising)
    accuracy, heatmap = draw_curves(comparison), draw_heatmap(comparison)
    assert accuracy.get_suptitle().startswith("Test accuracy by rule, attack and learning rate\n")
    assert accuracy.axes[0].get_title() == "attack: none, learning rate: 0.1"
    assert (heatmap.axes[0].get_xlabel(), heatmap.axes[0].get_ylabel()) == ("attack", "rule")


def test_lines_over_the_values_of_a_setting_have_the_means_in_the_order_of_the_values():
    axes = {"attack.scale": [10, 1, 100], "aggregate.rule": ["mean", "median"], "attack.name": ATTACKS, "seed": [0, 2]}
    plan = comparison_of({**axes, "attack.fraction": [0.1, 0.2]})
    assert numeric_axes(plan.axes, plan.compared) == ["attack.scale"]  # two numbers are too few for a curve
    failed = ("median", 10)

    def accuracy(point):
        if (point["aggregate.rule"], point["attack.scale"]) == failed:
            return None
        return [0.9 / point["attack.scale"] + point["seed"] / 100]

    figure = draw_values(compared(axes, accuracy), "attack.scale")
    assert [panel.get_title() for panel in figure.axes] == ["attack: none", "attack: alie"]
    panel = figure.axes[0]
    mean, first_of_mean, _, median, *_ = panel.lines
    assert list(mean.get_xdata()) == [1, 10, 100]
    assert list(mean.get_ydata()) == pytest.approx([0.91, 0.1, 0.019])
    assert list(first_of_mean.get_ydata()) == pytest.approx([0.9, 0.09, 0.009]), "each of the two seeds has a thin line"
    assert list(median.get_xdata()) == [1, 100], "a value with a failed run has no mark"
    assert panel.get_xscale() == "log"
    assert [text.get_text() for text in panel.get_xticklabels()] == ["10", "1", "100"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mean", "median"]


def test_a_row_of_the_figure_of_workers_holds_those_of_all_seeds_from_their_newest_tables(tmp_path):
    comparison = compared({"local.algorithm": ["sgd", "ditto"], "seed": [0, 1]}, lambda point: [0.5, 0.6])
    assert draw_worker_comparison(comparison) is None
    for index, run in enumerate(comparison.runs):
        folder = tmp_path / run.id
        folder.mkdir()
        for round in (1, 2, 3):  # the run has two rounds, so round 3 is not a round of its own
            accuracy = {"global": [round / 10, round / 10 + index / 100]}
            accuracy |= {"personal": [0.9, 0.8]} if index > 1 else {}
            results = WorkerResults(round, [0, 1], [5, 5], {model: [1.0, 1.0] for model in accuracy}, accuracy)
            (folder / f"workers-{round:05}.csv").write_text(workers_csv(results))
        comparison.runs[index] = replace(run, folder=folder)
    figure = draw_worker_comparison(replace(comparison))  # a copy without cached rows
    strokes = [sorted(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "|"]
    expected = [[0.2, 0.2, 0.2, 0.21], [0.2, 0.2, 0.22, 0.23], [0.8, 0.8, 0.9, 0.9]]
    assert np.array(strokes) == pytest.approx(np.array(expected))
    assert [text.get_text() for text in figure.legends[0].texts] == ["global model", "personal model"]


def test_curves_are_interpolated_where_all_of_them_are_known():
    curves = [
        ([1.0, 4.0, 6.0], [0.1, 0.4, 0.3]),
        ([2.0, 3.0, 9.0], [0.5, 0.6, 0.0]),
        ([0.5, 4.0, 4.0, 8.0], [1, 2, 3, 4]),
    ]
    x, values = on_common_grid([(np.array(x), np.array(y)) for x, y in curves])
    assert x.tolist() == [2.0, 3.0, 4.0, 6.0]
    of_third = [1 + 1.5 / 3.5, 1 + 2.5 / 3.5, 3, 3.5]  # two tests at the same time: the later one counts
    assert values == pytest.approx(np.array([[0.2, 0.3, 0.4, 0.3], [0.5, 0.6, 0.5, 0.3], of_third]))
    nowhere, _ = on_common_grid([(np.array([1.0, 2.0]), np.zeros(2)), (np.array([3.0, 4.0]), np.zeros(2))])
    assert nowhere.size == 0


def test_the_legend_names_only_values_that_have_a_line():
    comparison = compared({"aggregate.rule": RULES}, lambda point: None if "median" in point.values() else [0.1, 0.2])
    handles = draw_curves(comparison).legends[0].legend_handles
    assert [handle.get_label() for handle in handles] == ["mean", "krum"]
    all_lines = draw_curves(compared({"aggregate.rule": RULES}, rising)).legends[0].legend_handles
    assert [handle.get_color() for handle in handles] == [all_lines[0].get_color(), all_lines[2].get_color()]


def test_texts_of_heat_maps_are_readable():
    """Each text of a heat map is compared with the colour of its cell, from the lowest to the highest value."""
    scales = [step / 39 for step in range(40)]
    comparison = compared(
        {"aggregate.rule": ["mean", "median"], "attack.scale": scales, "seed": [0, 1]},
        lambda point: None if point["attack.scale"] == 1 else [point["attack.scale"]],
    )
    figure, texts = draw_heatmap(comparison), 0
    for panel in (axes for axes in figure.axes if axes.images):
        (image,) = panel.images
        for text in panel.texts:
            column, row = (round(place) for place in text.get_position())
            value = image.get_array()[row, column]
            cell = panel.get_facecolor() if np.ma.is_masked(value) else image.to_rgba(value)
            assert contrast(text.get_color(), cell[:3]) >= READABLE
            texts += bool(text.get_text())
    assert texts >= 80
