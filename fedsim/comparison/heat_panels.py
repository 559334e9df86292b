"""The heat maps of a comparison over two axes that `heatmap` names, as panels of one figure, and `heatmap.csv`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsim.comparison.heat_map import NO_CELL, HeatCell, draw_cells
from fedsim.comparison.results import Comparison
from fedsim.comparison.tables import mean_cells
from fedsim.core.confidence import fixed
from fedsim.core.plotting import SCREEN, FigureStyle, grid_shape
from fedsim.records.axes import label
from fedsim.records.formatting import comparison_title, key_name
from fedsim.records.reader import Run
from fedsim.records.rows import SEED, Group, Row, canonical, groups_of
from fedsim.system.files import to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST = "best "  # how the names of some panels begin; the others begin with the name of the first axis and a colon
MOST_PANELS, MOST_VALUES = 30, 20  # panels of a figure, values on an axis of a panel
MOST_INCHES = 24, 60  # width and height of all panels
HEIGHT, CHARACTER = 0.62, 0.085  # inches, of a cell with three lines and of a letter in it

Panel = dict[tuple[str, str], HeatCell]  # by the values on both axes


def draw_panels(
    grid: Comparison, runs: Sequence[Run], over: tuple[str, str], style: FigureStyle = SCREEN
) -> Figure | None:
    """Draw a panel over two axes for each combination of the others; None if no run has a result.

    Before the panels of the values of the first axis is that of the best value: a cell has its name, its mean, and how
    many others are not significantly different from it. All panels have the same colours.
    """
    from matplotlib.figure import Figure

    combined = grid.settings.combined(runs, list(grid.axes))
    panels, metric = _panels(grid, combined, over), combined[0].metric
    cells = [cell for panel in panels.values() for cell in panel.values()]
    means = [cell.mean for cell in cells if not math.isnan(cell.mean)]
    if not means:
        return None
    down, across = (grid.axes[axis][:MOST_VALUES] for axis in over)
    longest = max(len(line) for cell in cells for line in (cell.text, *cell.below.splitlines()))
    width, height = max(1.0, CHARACTER * longest + 0.2) * len(across) + 0.3, HEIGHT * len(down) + 0.5
    fitting, of_each = max(1, int(MOST_INCHES[0] / width)), len(grid.axes[grid.compared[0]]) + 1
    in_rows = of_each < len(panels) and of_each <= fitting  # a row for each combination of the axes on no panel
    columns = of_each if in_rows else grid_shape(len(panels), fitting)[1]
    if not in_rows:  # first all panels of the best
        panels = dict(sorted(panels.items(), key=lambda item: not item[0].startswith(BEST)))
    shown = list(panels.items())[: min(MOST_PANELS, columns * max(1, int(MOST_INCHES[1] / height)))]
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(2.4 + columns * width, 1.4 + rows * height), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in places[len(shown) :]:
        axes.set_axis_off()
    for place, (axes, (name, panel)) in enumerate(zip(places, shown, strict=False)):
        table = [[panel.get((canonical(a), canonical(b)), NO_CELL) for b in across] for a in down]
        image = draw_cells(axes, table, (min(means), max(means)))
        axes.set_title(name, fontsize="small")
        axes.set_xticks(range(len(across)), [label(value) for value in across], fontsize="small")
        axes.set_yticks(range(len(down)), [label(value) for value in down], fontsize="small")
        if place % columns == 0:
            axes.set_ylabel(key_name(over[0]))
        if place + columns >= len(shown):
            axes.set_xlabel(key_name(over[1]))
    figure.colorbar(image, ax=places, label=metric.label.lower(), fraction=0.04, aspect=30)
    remarks = [f"{grid.name}: mean over seeds" if SEED in grid.axes else grid.name]
    tied = "not significantly different from" if SEED in grid.axes else "equal to"
    remarks.append(f"~ tied: {tied} the best{' (95 %, paired)' if SEED in grid.axes else ''}")
    remarks.append(f"the first {len(shown)} of {len(panels)} panels" if len(shown) < len(panels) else "")
    for axis, count in [(axis, len(grid.axes[axis])) for axis in over]:
        remarks.append(f"the first {MOST_VALUES} of {count} values of {key_name(axis)}" if count > MOST_VALUES else "")
    remarks.append(grid.settings.remark)
    title = comparison_title(over, metric.label)
    style.describe(figure, title, "; ".join(filter(None, remarks)), fontsize="small")
    return figure


def heatmap_csv(grid: Comparison, runs: Sequence[Run], over: tuple[str, str]) -> str:
    """Return a row per cell and combination of the other axes: the best value of the first axis, and those tied."""
    combined = grid.settings.combined(runs, list(grid.axes))
    first, score = grid.compared[0], combined[0].metric.path[-1].removeprefix("test_")
    keys = [*_others(grid, over), *over]
    rows: list[list[Any]] = [[*keys, f"best {first}", score, f"{score}_ci95", "tied"]]
    for group in groups_of(combined):
        point = group[0].runs[0].point
        cells: list[Any] = [label(point[key]) for key in keys]
        best = group.best
        if best and best.score:
            tied = "; ".join(_value(grid, each) for each in group.tied)
            cells += [_value(grid, best), *mean_cells(best.score), tied]
        rows.append(cells if best else [*cells, None, None, None, None])
    return to_csv(rows)


def _panels(grid: Comparison, combined: Sequence[Row], over: tuple[str, str]) -> dict[str, Panel]:
    """The panels by name: for each combination of the axes that are on no panel, the best and then each value."""
    panels: dict[str, Panel] = {}
    name = key_name(grid.compared[0])
    for group in groups_of(combined):
        point = group[0].runs[0].point
        place = canonical(point[over[0]]), canonical(point[over[1]])
        beside = "".join(f", {key_name(key)}: {label(point[key])}" for key in _others(grid, over))
        panels.setdefault(f"{BEST}{name}{beside}", {})[place] = _best_cell(grid, group)
        for each in group:
            panels.setdefault(f"{name}: {_value(grid, each)}{beside}", {})[place] = _cell(each)
    return panels


def _others(grid: Comparison, over: tuple[str, str]) -> list[str]:
    return [axis for axis in grid.compared[1:] if axis not in over]


def _value(grid: Comparison, combination: Row) -> str:
    """The value of the first axis."""
    return label(combination.runs[0].point[grid.compared[0]])


def _cell(combination: Row) -> HeatCell:
    score, runs = combination.score, len(combination.runs)
    if score is None:
        return HeatCell(math.nan, "no finite value" if combination.finished else "failed")
    decimals = combination.metric.decimals_for(score.mean)
    missing = f" ({score.n} of {runs})" if score.n < runs else ""
    return HeatCell(score.mean, fixed(score.mean, decimals) + missing, score.spread(decimals))


def _best_cell(grid: Comparison, group: Group) -> HeatCell:
    if group.best is None or group.best.score is None:
        return HeatCell(math.nan, "none is ranked")
    mean = group.best.score.mean
    lines = [fixed(mean, group.best.metric.decimals_for(mean)), group.tied_text]
    return HeatCell(mean, _value(grid, group.best), "\n".join(filter(None, lines)), bold=True)
