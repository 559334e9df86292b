"""The figure of the compared number against the values of a setting, such as the strength of an attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsim.comparison.plots import MOST_PANELS, draw_line, draw_panels, remark_on_seeds, write_remarks
from fedsim.comparison.results import Comparison
from fedsim.core.plotting import SCREEN, FigureStyle, mark_values
from fedsim.records.axes import label
from fedsim.records.formatting import comparison_title, key_name
from fedsim.records.reader import Run
from fedsim.records.rows import SEED, canonical
from fedsim.records.value_curves import ValueCurve, value_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves_along(grid: Comparison, runs: Sequence[Run], key: str) -> list[ValueCurve]:
    """The curves of the compared number against the values of the axis `key`."""
    combined = grid.settings.combined(runs, list(grid.axes))
    return value_curves(combined, grid.compared.index(key), {run.place[key]: run.point[key] for run in runs})


def draw_values(grid: Comparison, runs: Sequence[Run], key: str, style: FigureStyle = SCREEN) -> Figure | None:
    """Draw the compared number of the last round against the values of the axis `key`; None if no run is finished.

    A line for each value of the first other axis, a panel for each combination of the rest. A value of which a run has
    no result has no mark. Thin lines show single seeds if there are two or three; a band shows the 95 percent
    intervals if there are more.
    """
    if not any(run.finished for run in runs):
        return None
    others = [other for other in grid.compared if other != key]
    lines, rest = others[0] if others else None, others[1:]
    index_of = {canonical(value): index for index, value in enumerate(grid.axes[lines])} if lines else {}
    panels: dict[str, list[ValueCurve]] = {}
    for curve in curves_along(grid, runs, key):
        point = curve.combinations[0].runs[0].point
        title = ", ".join(f"{key_name(other)}: {label(point[other])}" for other in rest)
        panels.setdefault(title, []).append(curve)
    shown = list(panels.items())[:MOST_PANELS]
    metric = shown[0][1][0].combinations[0].metric
    figure, places = draw_panels(len(shown), key_name(key), metric.label.lower(), grid, lines, style)
    for panel, (title, curves) in zip(places, shown, strict=True):
        drawn = {}
        for curve in curves:
            if mean := curve.mean:
                value = curve.combinations[0].runs[0].point[lines] if lines else grid.name
                draw_line(panel, mean, index_of.get(canonical(value), 0), limits=(0, 1) if metric.share else None)
                drawn[label(value)] = mean
        write_remarks(panel, drawn)
        panel.set_title(title, fontsize="small")
        panel.grid(alpha=0.3)
        mark_values(panel, {label(value): value for value in grid.axes[key]})
    remark = remark_on_seeds(grid, len(grid.axes.get(SEED, [0])), len(shown), len(panels))
    title = comparison_title([lines, key] if lines else [key], metric.label)
    style.describe(figure, title, remark)
    return figure
