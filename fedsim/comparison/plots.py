"""The curves of a comparison: scores over rounds, time or updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.comparison.results import Comparison
from fedsim.core.confidence import FEWEST_FOR_BAND, LOG_FROM
from fedsim.core.plotting import SCREEN, FigureStyle, grid_shape, line_style, prepare_axes
from fedsim.records.axes import label
from fedsim.records.formatting import comparison_title, key_name
from fedsim.records.numbers import SCALES
from fedsim.records.reader import Run
from fedsim.records.rows import SEED, MeanCurve, Row, canonical, groups_of, mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS, MOST_COLUMNS = 30, 6
COINCIDE = 0.01  # of the height of a panel: curves that are closer hide each other
NARROWEST = 1.6  # inches, of a panel in a figure of a given width
LETTER, HANDLE = 0.058, 0.55  # inches, of a letter of a legend and of the line beside it


def draw_curves(
    grid: Comparison, runs: Sequence[Run], scale: str = "round", style: FigureStyle = SCREEN
) -> Figure | None:
    """Draw the mean of the number that runs are compared by; None if no run is finished.

    One panel for each combination of the axes after the first, with one line for each value of the first. Thin lines
    show single seeds if there are two or three; a band shows the 95 percent intervals if there are more.

    Args:
        grid: the axes.
        runs: the results.
        scale: of the x axis, see `SCALES`. On all but "round" the runs of a line were tested at different times: the
            mean is taken at each of these times, with accuracies interpolated between tests. See `on_common_grid`.
        style: of the figure.
    """
    if not any(run.finished for run in runs):
        return None
    groups = groups_of(grid.settings.combined(runs, list(grid.axes)))
    score = groups[0][0].metric
    shown = groups[:MOST_PANELS]
    first = grid.compared[0] if grid.compared else None
    y = f"{score.label.lower()} ({score.unit})" if score.unit else score.label.lower()
    figure, panels = draw_panels(len(shown), SCALES[scale], y, grid, first, style)
    for panel, group in zip(panels, shown, strict=True):
        _draw_panel(panel, grid, group, scale)
    remark = remark_on_seeds(grid, len(groups[0][0].runs), len(shown), len(groups))
    if scale != "round" and SEED in grid.axes:
        remark += f"\nbetween two tests, the {score.key.removeprefix('test_')} of a run is interpolated"
    style.describe(figure, comparison_title(grid.compared, score.label), remark)
    return figure


def remark_on_seeds(grid: Comparison, seeds: int, shown: int, panels: int) -> str:
    """The second line of a title: the name, the number of seeds and how they are shown, and what is left out."""
    spread = "bands: 95 percent intervals" if seeds >= FEWEST_FOR_BAND else "thin lines: single seeds"
    remark = f"{grid.name}: mean over {seeds} seeds ({spread})" if seeds > 1 else grid.name
    remark += f"; the first {shown} of {panels} panels" if shown < panels else ""
    return remark + (f"\n{grid.settings.remark}" if grid.settings.remark else "")


def draw_panels(
    count: int, x: str, y: str, grid: Comparison, lines: str | None, style: FigureStyle = SCREEN
) -> tuple[Figure, list[Axes]]:
    """A figure of empty panels with the names of their axes, and a legend for the values of the axis `lines`."""
    from matplotlib.figure import Figure  # slow to import; and pyplot is not needed
    from matplotlib.lines import Line2D

    names = [label(value) for value in grid.axes[lines]] if lines else []
    if style.widths:
        width = style.widths[count > 1]
        rows = math.ceil(count / max(1, int(width / NARROWEST)))
        columns, free = math.ceil(count / rows), False
        in_legend = max(1, int(width / (HANDLE + LETTER * max(map(len, names), default=0))))
        above = 0.16 * (1 + math.ceil(len(names) / in_legend)) if names else 0.0
        height = rows * (0.68 if count == 1 else 0.9) * width / columns + above
    else:
        rows, columns = grid_shape(count, MOST_COLUMNS)
        width, height = (6.4, 4.2) if count == 1 else (3.5 * columns, 2.7 * rows + 0.5)
        free, in_legend = rows * columns > count, 1  # `free`: a place for the legend
        width = width if free else width + 1.6
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for index, panel in enumerate(panels):
        if index >= count:
            panel.set_axis_off()
        elif index % columns == 0:
            panel.set_ylabel(y)
        if count - columns <= index < count:
            panel.set_xlabel(x)
    if lines is not None:
        place = "outside upper center" if style.widths else "center" if free else "outside right center"
        handles = [Line2D([], [], label=name, **line_style(index)) for index, name in enumerate(names)]
        sizes: dict[str, Any] = {"fontsize": "small", "title_fontsize": "small", "handlelength": 3}
        where: Any = panels[-1] if free else figure
        where.legend(handles=handles, title=key_name(lines), loc=place, ncols=min(in_legend, len(names)), **sizes)
    return figure, list(panels[:count])


def _draw_panel(panel: Axes, grid: Comparison, group: list[Row], scale: str) -> None:
    from matplotlib.ticker import EngFormatter

    failures, ends, curves = [], [], {}
    point = group[0].runs[0].point
    values = [canonical(value) for value in grid.axes[grid.compared[0]]] if grid.compared else []
    for each in group:
        index = values.index(canonical(each.runs[0].point[grid.compared[0]])) if values else 0
        runs, failed = len(each.runs), len(each.runs) - len(each.finished)
        name = label(each.runs[0].point[grid.compared[0]]) if grid.compared else grid.name
        if failed:
            failures.append(f"{name} ({failed} of {runs})")
        if mean := mean_curve(each.finished, each.metric, scale):
            draw_line(panel, mean, index, limits=(0, 1) if each.metric.share else None)
            ends.append(mean.x[-1])
            curves[name] = mean
    panel.set_title(", ".join(f"{key_name(key)}: {label(point[key])}" for key in grid.compared[1:]), fontsize="small")
    write_remarks(panel, curves, ["failed: " + ", ".join(failures)] if failures else [])
    prepare_axes(panel, whole_numbers=scale not in ("virtual_seconds", "seconds"))
    if scale == "bytes":
        panel.xaxis.set_major_formatter(EngFormatter("B"))
    if scale != "round" and ends and max(ends) >= LOG_FROM * min(ends) > 0:
        panel.set_xscale("log")


def write_remarks(panel: Axes, curves: Mapping[str, MeanCurve], remarks: Sequence[str] = ()) -> None:
    """Write into a corner of a panel which of its curves coincide, so that one hides the others, and the remarks."""
    bottom, top = panel.get_ylim()
    near = COINCIDE * (top - bottom)
    groups: list[list[str]] = []
    for name, curve in curves.items():
        for group in groups:
            first = curves[group[0]]
            if np.array_equal(first.x, curve.x) and np.abs(first.means - curve.means).max() <= near:
                group.append(name)
                break
        else:
            groups.append([name])
    lines = [f"coincide: {', '.join(group)}" for group in groups if len(group) > 1]
    text = "\n".join([*lines, *remarks])
    if text:
        box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
        panel.text(0.02, 0.02, text, transform=panel.transAxes, fontsize="xx-small", wrap=True, bbox=box)


def draw_line(panel: Axes, mean: MeanCurve, index: int, limits: tuple[float, float] | None) -> None:
    """Draw a mean as line `index` of a panel, with a band within the limits, or a thin line for each of a few seeds."""
    style = line_style(index, len(mean.x))
    panel.plot(mean.x, mean.means, **style)
    if len(mean.curves) >= FEWEST_FOR_BAND:
        band = np.array([mean.means - mean.half_widths, mean.means + mean.half_widths])
        low, high = np.clip(band, *limits) if limits else band
        panel.fill_between(mean.x, low, high, color=style["color"], alpha=0.13, linewidth=0)
    elif len(mean.curves) > 1:
        for each in mean.curves:
            panel.plot(*each, color=style["color"], alpha=0.4, linewidth=0.45 * style["linewidth"])
