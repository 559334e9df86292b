"""The heat map of a comparison over its first two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.comparison.results import Comparison
from fedsim.core.confidence import fixed
from fedsim.core.plotting import SCREEN, FigureStyle
from fedsim.records.axes import label
from fedsim.records.formatting import MISSING, comparison_title, key_name
from fedsim.records.reader import Run
from fedsim.records.rows import SEED, Row, canonical, groups_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_INCHES = 100
WIDTH, HEIGHT = 1.15, 0.52  # inches, of a cell
FEW_COLUMNS = 3  # fit into the narrower of the two widths of a style


@dataclass(frozen=True)
class HeatCell:
    """A cell: its mean, which is NaN without a result, a text, and one line or two below it in smaller letters."""

    mean: float
    text: str
    below: str = ""
    bold: bool = False


CHARACTER = 0.09  # inches of width, about
NO_CELL = HeatCell(math.nan, "")


def draw_heatmap(grid: Comparison, runs: Sequence[Run], style: FigureStyle = SCREEN) -> Figure | None:
    """Draw the mean score and its spread over the first two axes; None if there are not two, or no score."""
    if len(grid.compared) < 2:
        return None
    from matplotlib.figure import Figure

    first, second, *others = grid.compared
    down, across = grid.axes[first], grid.axes[second]
    width, height = WIDTH * len(across), HEIGHT * len(down)
    if max(width, height) > MOST_INCHES:
        return None  # more cells than a figure can show
    combined = grid.settings.combined(runs, list(grid.axes))
    if all(each.score is None for each in combined):
        return None
    score = combined[0].metric
    cells: dict[tuple[str, str], list[Row]] = {}
    for each in combined:
        point = each.runs[0].point
        cells.setdefault((canonical(point[first]), canonical(point[second])), []).append(each)
    best = [] if others else [group.best for group in groups_of(combined) if group.best]
    size = (2.2 + width, 1.5 + height)
    if style.widths:
        size = (style.widths[len(across) > FEW_COLUMNS], max(2.4, 0.36 * len(down) + 0.9))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    places = [[(canonical(a), canonical(b)) for b in across] for a in down]
    image = draw_cells(axes, [[_cell(cells.get(place, []), best) for place in line] for line in places])
    names = [label(value) for value in across]
    fits = max(map(len, names)) * CHARACTER < 0.7 * size[0] / len(names)
    axes.set_xticks(range(len(names)), names, rotation=0 if fits else 30, ha="center" if fits else "right")
    axes.set_yticks(range(len(down)), [label(value) for value in down])
    axes.set(xlabel=key_name(second), ylabel=key_name(first))
    figure.colorbar(image, ax=axes, label=score.label.lower())
    over = "".join(f" and {key_name(key)}" for key in others)
    remark = f"{grid.name}: mean over seeds{over}" if SEED in grid.axes or others else grid.name
    remark += "" if others or score.better is None else f"; bold: best of its column ({score.better} is better)"
    remark += f"\n{grid.settings.remark}" if grid.settings.remark else ""
    style.describe(figure, comparison_title([first, second], score.label), remark, fontsize="small")
    return figure


def draw_cells(
    axes: Axes, cells: Sequence[Sequence[HeatCell]], limits: tuple[float | None, float | None] = (None, None)
) -> AxesImage:
    """Draw cells [rows, columns]; `limits` are the lowest and the highest mean of the colours, by default of these."""
    means = np.array([[cell.mean for cell in line] for line in cells])
    low, high = limits
    image = axes.imshow(np.ma.masked_invalid(means), cmap="cividis", aspect="auto", vmin=low, vmax=high)
    axes.set_facecolor("#dddddd")  # of cells without a result
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for (i, j), mean in np.ndenumerate(means):
        cell = cells[i][j]
        colour = "black" if math.isnan(mean) or _lightness(np.asarray(image.to_rgba(mean))) > 0.5 else "white"
        style: dict[str, Any] = {"ha": "center", "color": colour, "fontweight": "bold" if cell.bold else "normal"}
        middle = i - 0.13 * cell.below.count("\n")
        axes.text(j, middle, cell.text, va="bottom" if cell.below else "center", fontsize="small", **style)
        axes.text(j, middle + 0.05, cell.below, va="top", fontsize="x-small", **style)
    return image


def _cell(combined: Sequence[Row], best: Sequence[Row]) -> HeatCell:
    """The mean of combinations, with the number of runs that count if not all do, and the spread of a single one."""
    runs, finished = sum(len(each.runs) for each in combined), sum(len(each.finished) for each in combined)
    counted = sum(each.counted for each in combined)
    means = [each.score.mean for each in combined if each.score]
    mean = sum(means) / len(means) if means else math.nan
    if not runs:
        return NO_CELL  # an invalid combination
    if not finished:
        return HeatCell(mean, "failed")
    if not means:
        return HeatCell(mean, MISSING)
    of = f" ({counted} of {runs})" if counted < runs else ""
    only = combined[0].score if len(combined) == 1 else None
    spread = only.spread() if only else ""
    return HeatCell(mean, fixed(mean) + of, spread, bold=any(each in best for each in combined))


def _lightness(colour: np.ndarray) -> float:
    """Return the perceived lightness of a colour (red, green, blue, alpha), from 0 to 1."""
    return float(np.dot(colour[:3], [0.299, 0.587, 0.114]))
