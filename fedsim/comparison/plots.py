"""The curves of a comparison: scores over rounds, time or updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsim.comparison.axes import label
from fedsim.comparison.grid import Grid
from fedsim.comparison.results import RunResult
from fedsim.core.confidence import FEWEST_FOR_BAND, LOG_FROM
from fedsim.core.plotting import line_style, prepare_axes
from fedsim.records.combinations import SEED, Combination, MeanCurve, canonical, groups_of, mean_curve
from fedsim.records.formatting import comparison_title, key_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Scale = Literal["round", "virtual_seconds", "updates"]

MOST_PANELS = 30
X_LABELS = {"round": "round", "virtual_seconds": "virtual seconds", "updates": "updates of the global model"}


def draw_accuracy(grid: Grid, runs: Sequence[RunResult], scale: Scale = "round") -> Figure | None:
    """Draw the mean of the number that runs are compared by; None if all runs failed.

    One panel for each combination of the axes after the first, with one line for each value of the first. Thin lines
    show single seeds if there are two or three; a band shows the 95 percent intervals if there are more.

    Args:
        grid: the axes.
        runs: the results.
        scale: of the x axis: "round", "virtual_seconds" or "updates". On the latter two the runs of a line were tested
            at different times: the mean is taken at each of these times, with accuracies interpolated between tests.
            See `on_common_grid`.
    """
    if all(run.error is not None for run in runs):
        return None
    groups = groups_of(grid.settings.combined(runs, list(grid.axes)))
    score = groups[0][0].metric
    shown = groups[:MOST_PANELS]
    first = grid.compared[0] if grid.compared else None
    figure, panels = draw_panels(len(shown), X_LABELS[scale], score.label.lower(), grid, first)
    for panel, group in zip(panels, shown, strict=True):
        _draw_panel(panel, grid, group, scale)
    seeds = len(groups[0][0].runs)
    spread = "bands: 95 percent intervals" if seeds >= FEWEST_FOR_BAND else "thin lines: single seeds"
    remark = f"{grid.name}: mean over {seeds} seeds ({spread})" if seeds > 1 else grid.name
    remark += f"; the first {len(shown)} of {len(groups)} panels" if len(shown) < len(groups) else ""
    remark += f"\n{grid.settings.remark}" if grid.settings.remark else ""
    figure.suptitle(f"{comparison_title(grid.compared, score.label)}\n{remark}", fontsize="medium")
    if scale != "round" and SEED in grid.axes:
        footnote = f"Between two tests, the {score.key.removeprefix('test_')} of a run is interpolated."
        figure.supxlabel(footnote, x=0.01, ha="left", fontsize="x-small")
    return figure


def draw_panels(count: int, x: str, y: str, grid: Grid, lines: str | None) -> tuple[Figure, list[Axes]]:
    """A figure of empty panels with the names of their axes, and a legend for the values of the axis `lines`."""
    from matplotlib.figure import Figure  # slow to import; and pyplot is not needed

    columns = min(count, 3 if count <= 9 else 4 if count <= 16 else 5)
    rows = math.ceil(count / columns)
    width, height = (6.4, 4.2) if count == 1 else (3.5 * columns, 2.7 * rows + 0.5)
    free = rows * columns > count  # a place for the legend
    figure = Figure(figsize=(width if free else width + 1.6, height), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for place, panel in enumerate(panels):
        if place >= count:
            panel.set_axis_off()
        elif place % columns == 0:
            panel.set_ylabel(y)
        if count - columns <= place < count:
            panel.set_xlabel(x)
    if lines is not None:
        _draw_legend(panels[-1] if free else figure, "center" if free else "outside right upper", grid, lines)
    return figure, list(panels[:count])


def _draw_panel(panel: Axes, grid: Grid, group: list[Combination], scale: Scale) -> None:
    failures, ends = [], []
    point = group[0].runs[0].point
    values = [canonical(value) for value in grid.axes[grid.compared[0]]] if grid.compared else []
    for each in group:
        index = values.index(each.place[0]) if values else 0
        runs, failed = len(each.runs), len(each.runs) - len(each.finished)
        if failed:
            name = label(each.runs[0].point[grid.compared[0]]) if grid.compared else grid.name
            failures.append(f"{name} ({failed} of {runs})")
        if mean := mean_curve(each.finished, each.metric, scale):
            draw_line(panel, mean, index, limits=(0, 1) if each.metric.share else None)
            ends.append(mean.x[-1])
    panel.set_title(", ".join(f"{key_name(key)}: {label(point[key])}" for key in grid.compared[1:]), fontsize="small")
    if failures:
        text = "failed: " + ", ".join(failures)
        panel.text(0.02, 0.02, text, transform=panel.transAxes, fontsize="xx-small", wrap=True)
    prepare_axes(panel, whole_numbers=scale != "virtual_seconds")
    if scale != "round" and ends and max(ends) >= LOG_FROM * min(ends) > 0:
        panel.set_xscale("log")


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
            panel.plot(*each, color=style["color"], alpha=0.4, linewidth=0.7)


def _draw_legend(where: Axes | Figure, place: str, grid: Grid, key: str) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label(value), **line_style(index)) for index, value in enumerate(grid.axes[key])]
    style: dict[str, Any] = {"loc": place, "fontsize": "small", "title_fontsize": "small", "handlelength": 3}
    where.legend(handles=handles, title=key_name(key), **style)
