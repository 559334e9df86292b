from __future__ import annotations

import io

import pytest
from PIL import Image

from fedsim.comparison.pictures import COLOURS, MOST_PANELS, draw_accuracy, draw_heatmap
from fedsim.comparison.summary import summarise
from tests.comparison.made_up import grid_of, results_of

RULES, ATTACKS = ["mean", "median", "krum"], ["none", "alie"]


def rising(point):
    return [0.2, 0.4 + 0.1 * len(str(point.get("aggregate.rule", ""))) / 12, 0.7 + 0.01 * point.get("seed", 0)]


def opened(png):
    return Image.open(io.BytesIO(png)).convert("RGB")


def colours_of(png):
    return {colour for _, colour in opened(png).getcolors(1 << 24)}


def rgb(colour):
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


@pytest.mark.parametrize(
    "axes",
    [
        {"seed": [0, 1]},
        {"aggregate.rule": RULES},
        {"aggregate.rule": RULES, "seed": [0, 1, 2]},
        {"aggregate.rule": RULES, "attack.name": ATTACKS, "seed": [0, 1]},
    ],
    ids=["seeds", "one axis", "one axis and seeds", "two axes"],
)
def test_every_value_of_the_first_axis_has_its_line(axes):
    grid = grid_of(axes)
    colours = colours_of(draw_accuracy(grid, results_of(grid, rising)))
    lines = len(axes.get("aggregate.rule", [0]))
    assert all(rgb(colour) in colours for colour in COLOURS[:lines])
    assert not any(rgb(colour) in colours for colour in COLOURS[lines:])


def test_panels_grow_with_the_grid_up_to_a_limit():
    sizes = []
    for count in (1, 2, 4, MOST_PANELS + 5):
        grid = grid_of({"aggregate.rule": ["mean"], "local.lr": [k / 100 for k in range(1, count + 1)]})
        sizes.append(opened(draw_accuracy(grid, results_of(grid, rising))).size)
    assert sizes[0][0] < sizes[1][0]
    assert sizes[1][1] < sizes[2][1]
    assert max(sizes[3]) < 4000


def test_failed_runs_are_left_out_of_lines_and_said():
    grid = grid_of({"aggregate.rule": RULES, "seed": [0, 1]})
    whole = draw_accuracy(grid, results_of(grid, rising))
    part = draw_accuracy(grid, results_of(grid, lambda p: None if p["aggregate.rule"] == "krum" else rising(p)))
    assert whole != part
    assert draw_accuracy(grid, results_of(grid, lambda p: None)) is None


def test_runs_of_different_length_are_drawn_as_far_as_they_go():
    grid = grid_of({"aggregate.rule": RULES, "rounds": [2, 3], "seed": [0, 1]})
    assert draw_accuracy(grid, results_of(grid, lambda point: rising(point)[: point["rounds"]]))


@pytest.mark.parametrize("failed", [[], [("krum", "alie", 0)], [("krum", "alie", 0), ("krum", "alie", 1)]])
def test_the_heat_map_has_the_first_two_axes(failed):
    grid = grid_of({"aggregate.rule": RULES, "attack.name": ATTACKS, "seed": [0, 1]})
    runs = results_of(grid, lambda point: None if tuple(point.values()) in failed else rising(point))
    picture = opened(draw_heatmap(grid, summarise(grid, runs)))
    grey = sum(count for count, colour in picture.getcolors(1 << 24) if colour == rgb("#dddddd"))
    assert (grey > 1000) == (len(failed) == 2), "a cell is grey where all its runs failed"


def test_without_two_axes_or_any_result_there_is_no_heat_map():
    one = grid_of({"aggregate.rule": RULES, "seed": [0, 1]})
    assert draw_heatmap(one, summarise(one, results_of(one, rising))) is None
    two = grid_of({"aggregate.rule": RULES, "attack.name": ATTACKS})
    assert draw_heatmap(two, summarise(two, results_of(two, lambda point: None))) is None
