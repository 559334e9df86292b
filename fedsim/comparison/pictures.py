"""The figures of a comparison: accuracy against round, time or updates, and a heat map of the first two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsim.comparison.axes import SEED, canonical, label
from fedsim.comparison.grid import Grid
from fedsim.comparison.results import RunResult
from fedsim.comparison.summary import SummaryRow, groups_of
from fedsim.intervals import FEWEST_FOR_BAND, fixed, mean_and_half_width
from fedsim.plotting import line_style, prepare_axes
from fedsim.report.words import comparison_title, key_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_INCHES = 100  # of a heat map
CELL = (1.15, 0.52)  # inches
MOST_PANELS = 30
LOG_FROM = 20  # times as far as the shortest line the longest goes, where the axis is logarithmic


@dataclass(frozen=True)
class Across:
    """What accuracy is drawn against."""

    name: Literal["round", "virtual_seconds", "updates"]
    title: str

    def curve(self, run: RunResult) -> tuple[np.ndarray, np.ndarray]:
        """Where a run was tested, and its accuracy there; empty where its records do not say."""
        pairs = zip(run.progress, run.history, strict=True)
        points = [(at, record["test_accuracy"]) for one, record in pairs if (at := getattr(one, self.name)) is not None]
        x, y = zip(*points, strict=True) if points else ((), ())
        return np.array(x, dtype=float), np.array(y, dtype=float)


ROUND = Across("round", "round")
ACROSS = {
    "virtual_seconds": Across("virtual_seconds", "virtual seconds"),
    "updates": Across("updates", "updates of the global model"),
}


def draw_accuracy(grid: Grid, runs: Sequence[RunResult]) -> Figure | None:
    """Mean test accuracy against round; None if all runs failed.

    One panel for each combination of the axes beyond the first, and in it one line for each value of the first. Thin
    lines show single seeds where there are two or three, a band the 95 percent intervals where there are more.
    """
    return _draw_panels(grid, runs, ROUND)


def draw_accuracy_against(
    grid: Grid, runs: Sequence[RunResult], scale: Literal["virtual_seconds", "updates"]
) -> Figure | None:
    """Mean test accuracy against virtual seconds, or updates of the global row; None if all runs failed.

    Panels and lines are as those of `draw_accuracy`. The runs of a line were tested at different times; the mean is
    taken at each of these times, with the accuracy of a run interpolated between its tests (see `on_common_grid`). A
    line goes from where all of its runs have been tested to where the first of them ends.
    """
    return _draw_panels(grid, runs, ACROSS[scale])


def on_common_grid(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Curves (x ascending, y), interpolated at all x that any of them has: x, values [n, x].

    From the latest first x to the earliest last one: what lies outside is not known of all of them.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    every = np.unique(np.concatenate([x for x, _ in curves]))
    common = every[(every >= first) & (every <= last)]
    return common, np.array([np.interp(common, x, y) for x, y in curves])


def _draw_panels(grid: Grid, runs: Sequence[RunResult], across: Across) -> Figure | None:
    from matplotlib.figure import Figure  # here, and no pyplot: see fedsim.report.draw_curve

    groups = groups_of(grid, runs)
    if all(run.error is not None for run in runs):
        return None
    shown = groups[:MOST_PANELS]
    columns = _columns(len(shown))
    rows = -(-len(shown) // columns)
    width, height = (6.4, 4.2) if len(shown) == 1 else (3.5 * columns, 2.7 * rows + 0.5)
    free = rows * columns > len(shown)  # a place for the legend
    figure = Figure(figsize=(width if free else width + 1.6, height), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    for place, (panel, group) in enumerate(zip(panels, shown, strict=False)):
        _draw_panel(panel, grid, group, across)
        if place % columns == 0:
            panel.set_ylabel("test accuracy")
        if place + columns >= len(shown):
            panel.set_xlabel(across.title)
    _legend(panels[-1] if free else figure, "center" if free else "outside right upper", grid)
    figure.suptitle(f"{comparison_title(grid.compared)}\n{_remark(grid, groups, len(shown))}", fontsize="medium")
    if across is not ROUND and SEED in grid.axes:
        footnote = "Between two tests, the accuracy of a run is interpolated."
        figure.supxlabel(footnote, x=0.01, ha="left", fontsize="x-small")
    return figure


def draw_heatmap(grid: Grid, summary: Sequence[SummaryRow]) -> Figure | None:
    """Mean test accuracy and its spread for the values of the first two axes; None where there are not two."""
    if len(grid.compared) < 2 or all(row.accuracy is None for row in summary):
        return None
    from matplotlib.figure import Figure

    first, second, *others = grid.compared
    down, across = grid.axes[first], grid.axes[second]
    width, height = CELL[0] * len(across), CELL[1] * len(down)
    if max(width, height) > MOST_INCHES:
        return None  # more cells than a picture can show
    cells = [[_rows_at(summary, {first: a, second: b}) for b in across] for a in down]
    means = np.array([[_mean(rows) for rows in line] for line in cells])
    figure = Figure(figsize=(2.2 + width, 1.5 + height), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.ma.masked_invalid(means), cmap="cividis", aspect="auto")
    axes.set_facecolor("#dddddd")  # where all runs failed
    axes.set_xticks(range(len(across)), [label(value) for value in across], rotation=30, ha="right")
    axes.set_yticks(range(len(down)), [label(value) for value in down])
    axes.set(xlabel=key_name(second), ylabel=key_name(first))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for (i, j), mean in np.ndenumerate(means):
        colour = "black" if math.isnan(mean) or _lightness(image.to_rgba(mean)) > 0.5 else "white"
        best = not others and cells[i][j][0].mark == "*"
        value, spread = _cell_texts(cells[i][j], mean)
        style = {"ha": "center", "color": colour, "fontweight": "bold" if best else "normal"}
        axes.text(j, i, value, va="bottom" if spread else "center", fontsize="small", **style)
        axes.text(j, i + 0.05, spread, va="top", fontsize="x-small", **style)
    figure.colorbar(image, ax=axes, label="test accuracy")
    over = "".join(f" and {key_name(key)}" for key in others)
    remark = f"{grid.name}: mean over seeds{over}" if SEED in grid.axes or others else grid.name
    best = "" if others else "; bold: best of its column"
    figure.suptitle(f"{comparison_title([first, second])}\n{remark}{best}", fontsize="small")
    return figure


def _draw_panel(panel: Axes, grid: Grid, group: list[list[RunResult]], across: Across) -> None:
    failures, ends = [], []
    for index, cell in enumerate(group):
        good = [run for run in cell if run.error is None]
        if len(good) < len(cell):
            failures.append(f"{_line_label(grid, cell)} ({len(cell) - len(good)} of {len(cell)})")
        curves = [curve for run in good if (curve := across.curve(run))[0].size]
        if curves:
            _draw_line(panel, curves, index)
            ends.append(min(x[-1] for x, _ in curves))
    others = [f"{key_name(key)}: {label(group[0][0].point[key])}" for key in grid.compared[1:]]
    if others:
        panel.set_title(", ".join(others), fontsize="small")
    if failures:
        panel.text(
            0.02, 0.02, "failed: " + ", ".join(failures), transform=panel.transAxes, fontsize="xx-small", wrap=True
        )
    prepare_axes(panel, whole_numbers=across.name != "virtual_seconds")
    if across is not ROUND and ends and max(ends) >= LOG_FROM * min(ends) > 0:
        panel.set_xscale("log")


def _draw_line(panel: Axes, curves: list[tuple[np.ndarray, np.ndarray]], index: int) -> None:
    x, values = on_common_grid(curves)
    if not x.size:
        return
    means, half_widths = mean_and_half_width(values)
    style = line_style(index, len(x))
    panel.plot(x, means, **style)
    if len(curves) >= FEWEST_FOR_BAND:
        low, high = np.clip(means - half_widths, 0, 1), np.clip(means + half_widths, 0, 1)
        panel.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)
    elif len(curves) > 1:
        for curve in curves:
            panel.plot(*curve, color=style["color"], alpha=0.4, linewidth=0.7)


def _legend(where: Axes | Figure, place: str, grid: Grid) -> None:
    from matplotlib.lines import Line2D

    if not grid.compared:
        return
    first = grid.compared[0]
    handles = [Line2D([], [], label=label(value), **line_style(index)) for index, value in enumerate(grid.axes[first])]
    where.legend(
        handles=handles,
        title=key_name(first),
        loc=place,
        fontsize="small",
        title_fontsize="small",
        handlelength=3,
    )


def _remark(grid: Grid, groups: list[list[list[RunResult]]], shown: int) -> str:
    """The line below the title: name, number of seeds, what shows their spread, and panels that are left out."""
    seeds = len(groups[0][0])
    spread = "bands: 95 percent intervals" if seeds >= FEWEST_FOR_BAND else "thin lines: single seeds"
    remark = f"{grid.name}: mean over {seeds} seeds ({spread})" if seeds > 1 else grid.name
    return remark if shown == len(groups) else f"{remark}; the first {shown} of {len(groups)} panels"


def _line_label(grid: Grid, cell: list[RunResult]) -> str:
    return label(cell[0].point[grid.compared[0]]) if grid.compared else grid.name


def _columns(panels: int) -> int:
    return min(panels, 3 if panels <= 9 else 4 if panels <= 16 else 5)


def _rows_at(summary: Sequence[SummaryRow], values: dict[str, Any]) -> list[SummaryRow]:
    return [row for row in summary if all(canonical(row.point[key]) == canonical(values[key]) for key in values)]


def _mean(rows: Sequence[SummaryRow]) -> float:
    means = [row.accuracy.mean for row in rows if row.accuracy]
    return sum(means) / len(means) if means else math.nan


def _cell_texts(rows: Sequence[SummaryRow], mean: float) -> tuple[str, str]:
    """The mean with the number of runs that succeeded, if not all did, and the spread over the seeds."""
    runs, failed = sum(row.runs for row in rows), sum(row.failed for row in rows)
    if failed == runs:
        return "failed", ""
    of = f" ({runs - failed} of {runs})" if failed else ""
    return fixed(mean) + of, rows[0].accuracy.spread() if len(rows) == 1 and rows[0].accuracy else ""


def _lightness(colour: Sequence[float]) -> float:
    """How light a colour (red, green, blue, ...) looks, from 0 to 1."""
    red, green, blue = colour[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue
