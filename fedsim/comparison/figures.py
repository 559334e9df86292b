"""Data of the figures of a comparison: lines and heat maps.

`fedsim.comparison.on_paper` draws these figures with matplotlib, and `fedsim.report.on_page` with plotly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedsim.comparison.axes import label
from fedsim.comparison.compared_runs import ComparedRuns
from fedsim.comparison.rows import SEED, Group, MeanCurve, Row, mean_curve, mean_over_values, value_curves
from fedsim.comparison.tables import listed, mean_cells
from fedsim.core.confidence import FEWEST_FOR_BAND, decimals_of, estimate, fixed
from fedsim.records.formatting import comparison_title, key_name
from fedsim.records.numbers import SCALES
from fedsim.records.record import Metric
from fedsim.system.files import to_csv

MOST_NAMES = 2  # maximum number of names in a cell of a heat map


@dataclass(frozen=True)
class Line:
    """One line of a chart: a metric, averaged over the seeds.

    Attributes:
        position: for each compared setting, the index of the value that the line shows.
        metric: the metric.
        mean: the mean curve, or None if no run recorded the metric.
        failed: number of failed runs as text, such as "1 of 2", or "".
    """

    position: dict[str, int]
    metric: Metric
    mean: MeanCurve | None
    failed: str = ""

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the 95 percent intervals. For a metric such as accuracy, they lie between 0 and 1."""
        assert self.mean is not None
        low, high = self.mean.means - self.mean.half_widths, self.mean.means + self.mean.half_widths
        return (np.clip(low, 0, 1), np.clip(high, 0, 1)) if self.metric.share else (low, high)


@dataclass(frozen=True)
class LineChart:
    """A chart of a comparison: lines over rounds, over time, or over the values of a compared setting.

    Attributes:
        comparison: the comparison.
        keys: the compared settings by which the lines differ.
        scale: what the x axis shows, such as "round", or the key of a compared setting.
        lines: the lines.
        title: title of the figure.
        remarks: lines of text below the title.
    """

    comparison: ComparedRuns
    keys: list[str]
    scale: str
    lines: list[Line]
    title: str
    remarks: list[str]

    @property
    def values(self) -> list[float]:
        """The values on the x axis if it shows a compared setting. Empty if it shows rounds, time or bytes."""
        return self.comparison.axes[self.scale] if self.scale in self.comparison.compared else []

    def value(self, line: Line, key: str) -> Any:
        """Return the value that the setting `key` has for a line."""
        return self.comparison.axes[key][line.position[key]]

    @property
    def x_text(self) -> str:
        """Title of the x axis."""
        return key_name(self.scale) if self.values else SCALES[self.scale]


def curves(
    comparison: ComparedRuns, scale: str = "round", metrics: Sequence[Metric] = (), *, begun: bool = False
) -> LineChart:
    """Return a chart with one line for each combination of compared values and each metric.

    Args:
        comparison: the comparison.
        scale: what the x axis shows, such as "round" or "seconds".
        metrics: metrics to draw. Default: the metric by which the runs are compared.
        begun: include unfinished runs.
    """
    lines = []
    for row in comparison.rows:
        failed = row.failed
        for metric in metrics or [comparison.metric]:
            mean = mean_curve(row.runs if begun else row.finished, metric, scale)
            lines.append(Line(_position(row), metric, mean, f"{failed} of {len(row.runs)}" if failed else ""))
    remarks = _remarks_on_seeds(comparison)
    if scale != "round" and SEED in comparison.axes:
        remarks.append(f"between two tests, the {comparison.metric.key.removeprefix('test_')} of a run is interpolated")
    return LineChart(
        comparison,
        comparison.compared,
        scale,
        lines,
        comparison_title(comparison.compared, comparison.metric.label),
        remarks,
    )


def curves_along(comparison: ComparedRuns, axis: str) -> LineChart:
    """Return a chart of the final results over the values of the compared setting `axis`, such as the learning rate."""
    keys = [key for key in comparison.compared if key != axis]
    curves_of_rows = value_curves(comparison.rows, axis)
    lines = [Line(_position(curve[0]), comparison.metric, mean_over_values(curve, axis)) for curve in curves_of_rows]
    title = comparison_title([*keys[:1], axis], comparison.metric.label)
    return LineChart(comparison, keys, axis, lines, title, _remarks_on_seeds(comparison))


def _position(row: Row) -> dict[str, int]:
    return dict(zip(row.point, row.position, strict=True))


def _remarks_on_seeds(comparison: ComparedRuns) -> list[str]:
    """Return the lines of text below the title of a chart, such as the number of seeds."""
    seeds = len(comparison.rows[0].runs)
    spread = "bands: 95 percent intervals" if seeds >= FEWEST_FOR_BAND else "thin lines: single seeds"
    name = f"{comparison.name}: mean over {seeds} seeds ({spread})" if seeds > 1 else comparison.name
    return [name, comparison.settings.remark] if comparison.settings.remark else [name]


class HeatCell(NamedTuple):
    """One cell of a heat map.

    Attributes:
        mean: mean result, which sets the colour of the cell, or NaN.
        lines: lines of text in the cell. The first line is larger.
        hover: lines of text that appear when the mouse is over the cell.
        bold: whether the text is bold.
    """

    mean: float = math.nan
    lines: tuple[str, ...] = ()
    hover: tuple[str, ...] = ()
    bold: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A heat map over two compared settings.

    Attributes:
        position: for each other compared setting, the index of the value that it has in this map.
        cells: the cells, indexed [row][column].
    """

    position: dict[str, int]
    cells: list[list[HeatCell]]

    @property
    def means(self) -> list[float]:
        """Means of all cells that have a result."""
        return [cell.mean for line in self.cells for cell in line if not math.isnan(cell.mean)]


def heat_maps(
    comparison: ComparedRuns, over: Sequence[str], beside: Sequence[str], cell: Callable[[list[Row]], HeatCell]
) -> list[HeatMap]:
    """Return heat maps over two compared settings, one for each combination of the values of the settings `beside`.

    Args:
        comparison: the comparison.
        over: the settings on the vertical and the horizontal axis.
        beside: the settings that have one value in each map.
        cell: function that makes a cell from the table rows with the cell's values.
    """
    rows_by_position: dict[tuple[int, ...], list[Row]] = {}
    for row in comparison.rows:
        position = _position(row)
        rows_by_position.setdefault(tuple(position[axis] for axis in (*beside, *over)), []).append(row)
    down, across = (range(len(comparison.axes[axis])) for axis in over)
    maps = []
    for fixed_positions in itertools.product(*(range(len(comparison.axes[axis])) for axis in beside)):
        rows = [[rows_by_position.get((*fixed_positions, i, j)) for j in across] for i in down]
        cells = [[cell(cell_rows) if cell_rows else HeatCell() for cell_rows in line] for line in rows]
        maps.append(HeatMap(dict(zip(beside, fixed_positions, strict=True)), cells))
    return maps


def score_cell(rows: Sequence[Row], best: Sequence[Row] = ()) -> HeatCell:
    """Return a heat map cell with the mean result of `rows`, in bold if one of the rows is in `best`."""
    means = [row.score.mean for row in rows if row.score]
    if not means:
        return HeatCell(lines=("no finite value" if any(row.finished for row in rows) else "failed",))
    mean, runs, counted = sum(means) / len(means), sum(len(row.runs) for row in rows), sum(row.counted for row in rows)
    decimals = rows[0].metric.decimals_for(mean)
    of = f" ({counted} of {runs})" if counted < runs else ""
    spread = rows[0].score.spread(decimals) if len(rows) == 1 and rows[0].score else ""
    return HeatCell(mean, (fixed(mean, decimals) + of, spread), bold=any(row in best for row in rows))


def number_cell(rows: Sequence[Row], read: Callable[[Any], float | None], decimals: int | None) -> HeatCell:
    """Return a heat map cell with the mean of a number over all finished runs of `rows`.

    Args:
        rows: table rows.
        read: function that returns the number of one run, or None.
        decimals: number of decimals to show. None: chosen by the size of the mean.
    """
    mean = estimate([value for row in rows for run in row.finished if (value := read(run)) is not None])
    if mean is None:
        return HeatCell()
    if not math.isfinite(mean.mean):
        return HeatCell(lines=("no finite value",))
    digits = decimals_of(mean.mean) if decimals is None else decimals
    lines = fixed(mean.mean, digits), mean.spread(digits)
    return HeatCell(mean.mean, lines, (*lines, f"seeds: {mean.n}"))


def best_cell(rows: Sequence[Row], axis: str) -> HeatCell:
    """Return a heat map cell with the best value of the setting `axis` (or all best values), and its mean result.

    Each of the table rows has a different value of this setting.
    """
    group = Group(rows)
    if group.best is None or group.best.score is None:
        return HeatCell(lines=("none is ranked",))
    score, decimals = group.best.score, group.best.metric.decimals_for(group.best.score.mean)
    names, tied = ([label(row.point[axis]) for row in rows] for rows in (group.winners, group.tied))
    hover = f"{', '.join(names)} {score.text(decimals)}", f"tied with {', '.join(tied)}" if tied else ""
    lines = listed(names, MOST_NAMES), fixed(score.mean, decimals), f"~ +{len(tied)} tied" if tied else ""
    return HeatCell(score.mean, lines, hover, bold=True)


def best_maps(comparison: ComparedRuns, over: tuple[str, str]) -> list[tuple[str, HeatMap]]:
    """Return heat maps over two compared settings, each with its title.

    For each combination of the remaining settings, the first map shows which value of the first compared setting is
    best, and further maps show the results of each of its values.
    """
    first, *others = comparison.compared
    beside = [axis for axis in others if axis not in over]
    bests = heat_maps(comparison, over, beside, lambda rows: best_cell(rows, first))
    scores = iter(heat_maps(comparison, over, [*beside, first], score_cell))
    maps = []
    for best in bests:
        names = [
            f"{key_name(axis)}: {label(comparison.axes[axis][position])}" for axis, position in best.position.items()
        ]
        maps.append((", ".join([f"best {key_name(first)}", *names]), best))
        for value, score in zip(comparison.axes[first], scores, strict=False):
            maps.append((", ".join([f"{key_name(first)}: {label(value)}", *names]), score))
    return [(title, shown) for title, shown in maps if any(cell.lines for line in shown.cells for cell in line)]


def heatmap_csv(comparison: ComparedRuns, over: tuple[str, str]) -> str:
    """Return a heat map over the two settings `over` (vertical, horizontal) as a CSV table with one line per cell.

    Each line names the best value of the first compared setting (or all best values, if several are equal), the mean of
    its results with the confidence interval, and the values that are not significantly different from the best.
    """
    first, score = comparison.compared[0], comparison.metric.path[-1].removeprefix("test_")
    keys = [*(axis for axis in comparison.compared[1:] if axis not in over), *over]
    rows: list[list[Any]] = [[*keys, f"best {first}", score, f"{score}_ci95", "tied"]]
    for group in comparison.groups:
        cells: list[Any] = [label(group[0].point[key]) for key in keys]
        if (best := group.best) is None:
            rows.append([*cells, None, None, None, None])
        else:
            winners, tied = ("; ".join(label(row.point[first]) for row in rows) for rows in (group.winners, group.tied))
            rows.append([*cells, winners, *mean_cells(best.score), tied])
    return to_csv(rows)
