"""The figure of the compared number against the values of a setting, such as the strength of an attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsim.comparison.axes import is_numeric, label
from fedsim.comparison.grid import Grid
from fedsim.comparison.plots import MOST_PANELS, draw_panels
from fedsim.comparison.results import RunResult
from fedsim.core.confidence import FEWEST_FOR_BAND
from fedsim.core.plotting import line_style, mark_values
from fedsim.records.combinations import SEED, Combination, canonical
from fedsim.records.formatting import comparison_title, key_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEWEST_VALUES = 3  # from which there is a curve


def axes_of_curves(grid: Grid) -> list[str]:
    """The compared axes of three or more numbers."""
    return [key for key in grid.compared if len(grid.axes[key]) >= FEWEST_VALUES and is_numeric(grid.axes[key])]


def draw_values(grid: Grid, runs: Sequence[RunResult], key: str) -> Figure | None:
    """Draw the compared number of the last round against the values of the axis `key`; None if all runs failed.

    A line for each value of the first other axis, a panel for each combination of the rest. A value of which a run
    failed has no mark. Bands are 95 percent intervals over four or more seeds; of fewer, small dots are the seeds.
    """
    if all(run.error is not None for run in runs):
        return None
    others = [other for other in grid.compared if other != key]
    lines, rest = others[0] if others else None, others[1:]
    panels: dict[str, list[Combination]] = {}
    for each in grid.settings.combined(runs, list(grid.axes)):
        point = each.runs[0].point
        panels.setdefault(", ".join(f"{key_name(k)}: {label(point[k])}" for k in rest), []).append(each)
    shown = list(panels.items())[:MOST_PANELS]
    metric = shown[0][1][0].metric
    figure, places = draw_panels(len(shown), key_name(key), metric.label.lower(), grid, lines)
    for panel, (title, combined) in zip(places, shown, strict=True):
        for index, value in enumerate(grid.axes[lines] if lines else [None]):
            of_line = [e for e in combined if not lines or canonical(e.runs[0].point[lines]) == canonical(value)]
            _draw_line(panel, of_line, key, index)
        panel.set_title(title, fontsize="small")
        panel.grid(alpha=0.3)
        mark_values(panel, {label(value): value for value in grid.axes[key]})
    seeds = len(grid.axes.get(SEED, [0]))
    spread = "bands: 95 percent intervals" if seeds >= FEWEST_FOR_BAND else "dots: single seeds"
    remark = f"{grid.name}: mean over {seeds} seeds ({spread})" if seeds > 1 else grid.name
    remark += f"; the first {len(shown)} of {len(panels)} panels" if len(shown) < len(panels) else ""
    remark += f"\n{grid.settings.remark}" if grid.settings.remark else ""
    title = comparison_title([lines, key] if lines else [key], metric.label)
    figure.suptitle(f"{title}\n{remark}", fontsize="medium")
    return figure


def _draw_line(panel: Axes, combined: Sequence[Combination], key: str, index: int) -> None:
    whole = [(e.runs[0].point[key], e.score) for e in combined if e.score and len(e.finished) == len(e.runs)]
    points = sorted(whole, key=lambda point: point[0])
    if not points:
        return
    x, means = [value for value, _ in points], np.array([score.mean for _, score in points])
    style = line_style(index)
    panel.plot(x, means, **style)
    if all(score.n >= FEWEST_FOR_BAND for _, score in points):
        widths = np.array([score.half_width for _, score in points])
        panel.fill_between(x, means - widths, means + widths, color=style["color"], alpha=0.13, linewidth=0)
    elif any(score.n > 1 for _, score in points):
        for value, score in points:
            panel.plot([value] * score.n, score.values, ".", color=style["color"], alpha=0.4, markersize=3)
