from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedsim.comparison import Comparison, ComparisonSettings
from fedsim.comparison.leaderboard_files import draw_leaderboard
from fedsim.comparison.summary import summarise, summary_table
from fedsim.comparison.tuned_values import draw_tuning
from fedsim.core.confidence import on_common_grid
from fedsim.core.plotting import COLOURS, encode
from fedsim.data.picture import draw_partition
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.records.on_paper import MOST_PANELS, draw_curves, draw_heatmap, draw_values
from fedsim.records.worker_results import draw_workers
from fedsim.runs.text_table import draw_curve
from tests.comparison.made_up import grid_of, on_the_clock, results_of

RULES, ATTACKS = ["mean", "median", "krum"], ["none", "alie"]


def rising(point):
    return [0.2, 0.4 + 0.1 * len(str(point.get("aggregate.rule", ""))) / 12, 0.7 + 0.01 * point.get("seed", 0)]


def opened(figure):
    return Image.open(io.BytesIO(encode(figure, "png"))).convert("RGB")


def texts_of(figure):
    """The texts in the first axes of a figure, without its labels."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def rgb(colour):
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


@pytest.mark.parametrize(
    ("axes", "scale"),
    [
        ({"seed": [0, 1]}, "virtual_seconds"),
        ({"aggregate.rule": RULES}, "round"),
        ({"aggregate.rule": RULES, "attack.name": ATTACKS, "seed": [0, 1]}, "virtual_seconds"),
    ],
    ids=["seeds", "one axis", "two axes"],
)
def test_every_value_of_the_first_axis_has_its_line(axes, scale):
    grid = grid_of(axes)
    runs = on_the_clock(results_of(grid, rising), lambda point: 100.0 if point.get("aggregate.rule") == "krum" else 1.0)
    figure = draw_curves(grid, runs, scale)
    colours = {colour for _, colour in opened(figure).getcolors(1 << 24)}
    lines = len(axes.get("aggregate.rule", [0]))
    assert all(rgb(colour) in colours for colour in COLOURS[:lines])
    assert not any(rgb(colour) in colours for colour in COLOURS[lines:])
    assert figure.axes[0].get_xscale() == ("log" if scale != "round" and lines > 1 else "linear")


def test_panels_grow_with_the_grid_up_to_a_limit():
    sizes = []
    for count in (1, 2, 4, MOST_PANELS + 5):
        grid = grid_of({"aggregate.rule": ["mean"], "local.lr": [k / 100 for k in range(1, count + 1)]})
        figure = draw_curves(grid, results_of(grid, rising))
        assert len([panel for panel in figure.axes if panel.lines]) == min(count, MOST_PANELS)
        sizes.append(figure.get_size_inches())
    assert sizes[0][0] < sizes[1][0]
    assert sizes[1][1] < sizes[2][1]
    assert max(sizes[3]) < 30


DOLLARS = ["$x^{$", "$5 and $6", r"\alpha$"]


def test_labels_and_names_are_no_formulas():
    """Matplotlib raises an error for the first, and shows the second as one."""
    grid = grid_of({"aggregate.rule": DOLLARS, "attack.name": DOLLARS, "local.lr": [0.1, 0.2, 0.3], "seed": [0, 1]})
    settings = ComparisonSettings(by="metrics.$x^{$", tune="local.lr")
    grid = replace(grid, name="$x^{$")
    runs = results_of(grid, lambda point: [0.5])
    for run in runs:
        run.history[-1] = replace(run.history[-1], metrics={"$x^{$": 1.0}, validation_accuracy=0.5)
    tuned = replace(grid, settings=settings)
    panels = replace(grid, settings=ComparisonSettings(heatmap="attack.name,local.lr"))
    figures = [
        draw_curves(tuned, runs),
        draw_heatmap(tuned, runs),
        draw_heatmap(panels, runs, over=("attack.name", "local.lr")),
        draw_values(grid, runs, "local.lr"),
        draw_tuning(grid=tuned, tuned=tuned.settings.of(runs, list(tuned.axes))[1]),
        draw_leaderboard(Comparison(grid, runs, [], None).leaderboard, grid.name),
        draw_curve(runs[0].history, grid.name),
        draw_workers(WorkerResults(1, [0], [3], {"global": [0.5]}, {}), grid.name),
    ]
    assert all(encode(figure, "png") for figure in figures)
    shown = encode(figures[0], "svg").decode()
    assert all(f"<!-- {text} -->" in shown for text in DOLLARS)
    assert draw_partition(np.array([[5, 0], [0, 3]]), "$x^{$").startswith(b"\x89PNG")


def test_numbers_at_ticks_stay_formulas():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 1e9], [1, 1e9])
    axes.set(xscale="log", xlabel="$x$")
    shown = encode(figure, "svg").decode()
    assert "<!-- $x$ -->" in shown
    assert r"$\mathdefault{10^{4}}$" in shown


@pytest.mark.parametrize(("count", "shape"), [(3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (6, (2, 3)), (9, (3, 3))])
def test_panels_fill_a_nearly_square_grid(count, shape):
    grid = grid_of({"aggregate.rule": ["mean"], "local.lr": [k / 100 for k in range(1, count + 1)]})
    panel = draw_curves(grid, results_of(grid, rising)).axes[0]
    assert panel.get_subplotspec().get_gridspec().get_geometry() == shape


def test_curves_that_hide_each_other_are_named():
    grid = grid_of({"aggregate.rule": RULES, "attack.name": ATTACKS, "local.lr": [0.1, 0.2, 0.3]})
    accuracy = {"mean": 0.5, "median": 0.8, "krum": 0.5}
    runs = results_of(grid, lambda point: [0.1, accuracy[point["aggregate.rule"]]])
    for figure in (draw_curves(grid, runs), draw_values(grid, runs, "local.lr")):
        assert texts_of(figure) == ["coincide: mean, krum"]
    apart = results_of(grid, lambda point: [0.1, 0.1 * len(point["aggregate.rule"])])
    assert texts_of(draw_curves(grid, [run for run in apart if run.point["aggregate.rule"] != "krum"])) == []


def test_a_run_that_failed_or_has_no_clock_has_no_line():
    grid = grid_of({"aggregate.rule": RULES, "seed": [0, 1]})
    runs = results_of(grid, lambda point: None if point["aggregate.rule"] == "krum" else rising(point))
    figure = draw_curves(grid, runs)
    assert texts_of(figure) == ["failed: krum (2 of 2)"]
    assert len(figure.axes[0].lines) == 2 * 3  # of each rule the mean and two seeds
    timed = results_of(grid, rising)
    on_the_clock(timed[:2], lambda point: 2.0)
    assert len(draw_curves(grid, timed, "virtual_seconds").axes[0].lines) == 3
    for scale in ("round", "virtual_seconds"):
        assert draw_curves(grid, results_of(grid, lambda point: None), scale) is None


def test_runs_of_different_length_are_drawn_as_far_as_they_go():
    grid = grid_of({"aggregate.rule": RULES, "rounds": [2, 3], "seed": [0, 1]})
    figure = draw_curves(grid, results_of(grid, lambda point: rising(point)[: point["rounds"]]))
    assert [panel.lines[0].get_xdata().tolist() for panel in figure.axes[:2]] == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize("failed", [[], [("krum", "alie", 0)], [("krum", "alie", 0), ("krum", "alie", 1)]])
def test_a_cell_of_the_heat_map_is_grey_if_all_its_runs_failed(failed):
    grid = grid_of({"aggregate.rule": RULES, "attack.name": ATTACKS, "seed": [0, 1]})
    runs = results_of(grid, lambda point: None if tuple(point.values()) in failed else rising(point))
    picture = opened(draw_heatmap(grid, runs))
    grey = sum(count for count, colour in picture.getcolors(1 << 24) if colour == rgb("#dddddd"))
    assert (grey > 1000) == (len(failed) == 2)


def test_without_two_axes_or_any_result_there_is_no_heat_map():
    for axes, accuracies in (({"aggregate.rule": RULES}, rising), ({"a": [1, 2], "b": [3, 4]}, lambda point: None)):
        grid = grid_of({**axes, "seed": [0, 1]})
        assert draw_heatmap(grid, results_of(grid, accuracies)) is None


@pytest.mark.parametrize(("seeds", "spread"), [(1, ""), (2, "(0.8230, 0.8239)"), (3, "± 0.0011")])
def test_a_cell_of_the_heat_map_has_the_texts_of_the_table(seeds, spread):
    """The mean of 0.8230 and 0.8239 is 0.82345, and float sums of it lie on both sides of that."""
    finals = [0.8230, 0.8239, 0.82345]
    grid = grid_of({"aggregate.rule": ["mean"], "attack.name": ["none", "alie"], "seed": list(range(seeds))})
    runs = results_of(grid, lambda point: [finals[point["seed"]]])
    summary = summarise(grid, runs)
    mean, *beside = texts_of(draw_heatmap(grid, runs))[: 1 + bool(spread)]
    assert (mean, "".join(beside)) == ("0.8235" if seeds > 1 else "0.8230", spread)
    assert " ".join([mean, *beside]) in summary_table(grid, summary, runs)


@pytest.mark.parametrize(("seeds", "lines", "bands"), [(1, 1, 0), (2, 3, 0), (3, 4, 0), (4, 1, 1)])
def test_up_to_three_seeds_are_thin_lines_and_four_have_a_band(seeds, lines, bands):
    grid = grid_of({"aggregate.rule": ["mean"], "seed": list(range(seeds))})
    (axes, *_) = draw_curves(grid, results_of(grid, rising)).axes
    assert (len(axes.lines), len(axes.collections)) == (lines, bands)


def test_titles_name_the_axes():
    grid = grid_of({"aggregate.rule": RULES, "attack.name": ATTACKS, "local.lr": [0.1], "seed": [0, 1]})
    runs = results_of(grid, rising)
    accuracy, heatmap = draw_curves(grid, runs), draw_heatmap(grid, runs)
    assert accuracy.get_suptitle().startswith("Test accuracy by rule, attack and learning rate\n")
    assert accuracy.axes[0].get_title() == "attack: none, learning rate: 0.1"
    assert (heatmap.axes[0].get_xlabel(), heatmap.axes[0].get_ylabel()) == ("attack", "rule")


@pytest.mark.parametrize(("format", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_encoded_in_each_format_to_the_same_bytes_each_time(format, begins):
    grid = grid_of({"aggregate.rule": RULES})
    one, two = (encode(draw_curves(grid, results_of(grid, rising)), format) for _ in range(2))
    assert one.startswith(begins)
    assert one == two


def test_curves_are_interpolated_where_all_of_them_are_known():
    curves = [
        ([1.0, 4.0, 6.0], [0.1, 0.4, 0.3]),
        ([2.0, 3.0, 9.0], [0.5, 0.6, 0.0]),
        ([0.5, 4.0, 4.0, 8.0], [1, 2, 3, 4]),
    ]
    x, values = on_common_grid([(np.array(x), np.array(y)) for x, y in curves])
    assert x.tolist() == [2.0, 3.0, 4.0, 6.0]
    assert values[0] == pytest.approx([0.2, 0.3, 0.4, 0.3])
    assert values[1] == pytest.approx([0.5, 0.6, 0.5, 0.3])
    assert values[2] == pytest.approx([1 + 1.5 / 3.5, 1 + 2.5 / 3.5, 3, 3.5]), (
        "of two tests at one time the later counts"
    )
    nowhere, _ = on_common_grid([(np.array([1.0, 2.0]), np.zeros(2)), (np.array([3.0, 4.0]), np.zeros(2))])
    assert nowhere.size == 0
