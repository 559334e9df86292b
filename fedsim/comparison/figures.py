"""The figures of a comparison as data: lines and heat maps.

`fedsim.comparison.on_paper` draws them with matplotlib, and `fedsim.report.on_page` with plotly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedsim.comparison.tables import mean_cells
from fedsim.core.confidence import FEWEST_FOR_BAND, decimals_of, estimate, fixed
from fedsim.records.axes import label
from fedsim.records.formatting import comparison_title, key_name
from fedsim.records.numbers import SCALES
from fedsim.records.record import Metric
from fedsim.records.rows import SEED, Group, MeanCurve, Row, mean_curve, mean_over_values, value_curves
from fedsim.system.files import to_csv

if TYPE_CHECKING:
    from fedsim.comparison.results import Comparison


@dataclass(frozen=True)
class Line:
    """The mean of a metric over seeds.

    Attributes:
        place: the index of its value on each axis that distinguishes the lines.
        metric: the metric.
        mean: None without any value.
        failed: how many runs failed, `1 of 2`; empty if none did.
    """

    place: dict[str, int]
    metric: Metric
    mean: MeanCurve | None
    failed: str = ""

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the 95 percent intervals; those of a share lie between 0 and 1."""
        assert self.mean is not None
        low, high = self.mean.means - self.mean.half_widths, self.mean.means + self.mean.half_widths
        return (np.clip(low, 0, 1), np.clip(high, 0, 1)) if self.metric.share else (low, high)


@dataclass(frozen=True)
class LineChart:
    """Lines over rounds, time or the values of an axis.

    Attributes:
        comparison: the comparison.
        keys: the compared axes that distinguish the lines.
        scale: of the x axis, a key of `SCALES`; or the axis whose values are on the x axis.
        lines: the lines.
        title: of the figure.
        remarks: the lines below the title.
    """

    comparison: Comparison
    keys: list[str]
    scale: str
    lines: list[Line]
    title: str
    remarks: list[str]

    @property
    def values(self) -> list[float]:
        """The values of the axis on the x axis; empty for a key of `SCALES`."""
        return self.comparison.axes[self.scale] if self.scale in self.comparison.compared else []

    def value(self, line: Line, key: str) -> Any:
        """Return the value of a line on an axis."""
        return self.comparison.axes[key][line.place[key]]

    @property
    def x_text(self) -> str:
        """The title of the x axis."""
        return key_name(self.scale) if self.values else SCALES[self.scale]


def curves(
    comparison: Comparison, scale: str = "round", metrics: Sequence[Metric] = (), *, begun: bool = False
) -> LineChart:
    """Return a line for each combination and metric.

    Args:
        comparison: the comparison.
        scale: of the x axis, a key of `SCALES`. On every scale but "round" the runs of a line are tested at different
            places, and interpolated between their tests; see `on_common_grid`.
        metrics: the metrics; by default the one that runs are compared by.
        begun: include runs that are not finished.
    """
    lines = []
    for row in comparison.rows:
        failed = row.failed
        for metric in metrics or [comparison.metric]:
            mean = mean_curve(row.runs if begun else row.finished, metric, scale)
            lines.append(Line(_place(row), metric, mean, f"{failed} of {len(row.runs)}" if failed else ""))
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


def curves_along(comparison: Comparison, axis: str) -> LineChart:
    """Return lines of the compared number in the last round over the values of an axis."""
    keys = [key for key in comparison.compared if key != axis]
    curves_of_rows = value_curves(comparison.rows, axis)
    lines = [Line(_place(curve[0]), comparison.metric, mean_over_values(curve, axis)) for curve in curves_of_rows]
    title = comparison_title([*keys[:1], axis], comparison.metric.label)
    return LineChart(comparison, keys, axis, lines, title, _remarks_on_seeds(comparison))


def _place(row: Row) -> dict[str, int]:
    return dict(zip(row.point, row.place, strict=True))


def _remarks_on_seeds(comparison: Comparison) -> list[str]:
    """Return the name with the number of seeds and how they are shown, and how values were chosen."""
    seeds = len(comparison.rows[0].runs)
    spread = "bands: 95 percent intervals" if seeds >= FEWEST_FOR_BAND else "thin lines: single seeds"
    name = f"{comparison.name}: mean over {seeds} seeds ({spread})" if seeds > 1 else comparison.name
    return [name, comparison.settings.remark] if comparison.settings.remark else [name]


class HeatCell(NamedTuple):
    """A cell of a heat map.

    Attributes:
        mean: that its colour shows; NaN without a result.
        lines: its texts, the first one in larger letters.
        hover: further texts, which a page shows if one points at the cell.
        bold: whether its texts are bold.
    """

    mean: float = math.nan
    lines: tuple[str, ...] = ()
    hover: tuple[str, ...] = ()
    bold: bool = False


@dataclass(frozen=True)
class HeatMap:
    """Cells [rows, columns] over two axes; `place` has the position of the map on each axis that it does not show."""

    place: dict[str, int]
    cells: list[list[HeatCell]]

    @property
    def means(self) -> list[float]:
        """The means of the cells with a result."""
        return [cell.mean for line in self.cells for cell in line if not math.isnan(cell.mean)]


def heat_maps(
    comparison: Comparison, over: Sequence[str], beside: Sequence[str], cell: Callable[[list[Row]], HeatCell]
) -> list[HeatMap]:
    """Return a heat map for each combination of the values on some axes.

    Args:
        comparison: the comparison.
        over: the axes down and across.
        beside: the axes of which each map has one value.
        cell: a function that makes a cell of its combinations, of which there is at least one.
    """
    rows_by_place: dict[tuple[int, ...], list[Row]] = {}
    for row in comparison.rows:
        place = _place(row)
        rows_by_place.setdefault(tuple(place[axis] for axis in (*beside, *over)), []).append(row)
    down, across = (range(len(comparison.axes[axis])) for axis in over)
    maps = []
    for others in itertools.product(*(range(len(comparison.axes[axis])) for axis in beside)):
        rows = [[rows_by_place.get((*others, i, j)) for j in across] for i in down]
        cells = [[cell(some) if some else HeatCell() for some in line] for line in rows]
        maps.append(HeatMap(dict(zip(beside, others, strict=True)), cells))
    return maps


def score_cell(rows: Sequence[Row], best: Sequence[Row] = ()) -> HeatCell:
    """Return the mean of combinations, how many runs count if not all do, and the spread of a single combination."""
    means = [row.score.mean for row in rows if row.score]
    if not means:
        return HeatCell(lines=("no finite value" if any(row.finished for row in rows) else "failed",))
    mean, runs, counted = sum(means) / len(means), sum(len(row.runs) for row in rows), sum(row.counted for row in rows)
    decimals = rows[0].metric.decimals_for(mean)
    of = f" ({counted} of {runs})" if counted < runs else ""
    spread = rows[0].score.spread(decimals) if len(rows) == 1 and rows[0].score else ""
    return HeatCell(mean, (fixed(mean, decimals) + of, spread), bold=any(row in best for row in rows))


def number_cell(rows: Sequence[Row], read: Callable[[Any], float | None], decimals: int | None) -> HeatCell:
    """Return the mean of a number of the finished runs; without `decimals`, their count follows its size."""
    mean = estimate([value for row in rows for run in row.finished if (value := read(run)) is not None])
    if mean is None:
        return HeatCell()
    if not math.isfinite(mean.mean):
        return HeatCell(lines=("no finite value",))
    digits = decimals_of(mean.mean) if decimals is None else decimals
    lines = fixed(mean.mean, digits), mean.spread(digits)
    return HeatCell(mean.mean, lines, (*lines, f"seeds: {mean.n}"))


def best_cell(rows: Sequence[Row], axis: str) -> HeatCell:
    """Return the best value of an axis, its mean, and how many values are tied with it."""
    group = Group(rows)
    if group.best is None or group.best.score is None:
        return HeatCell(lines=("none is ranked",))
    score, decimals = group.best.score, group.best.metric.decimals_for(group.best.score.mean)
    name, *tied = [label(row.point[axis]) for row in (group.best, *group.tied)]
    hover = f"{name} {score.text(decimals)}", f"tied with {', '.join(tied)}" if tied else ""
    return HeatCell(
        score.mean, (name, fixed(score.mean, decimals), f"~ +{len(tied)} tied" if tied else ""), hover, bold=True
    )


def best_maps(comparison: Comparison, over: tuple[str, str]) -> list[tuple[str, HeatMap]]:
    """Return titles and heat maps over two axes other than the first.

    For each combination of the values on the axes beside them: the best value of the first axis, then the score of each
    of its values.
    """
    first, *others = comparison.compared
    beside = [axis for axis in others if axis not in over]
    bests = heat_maps(comparison, over, beside, lambda rows: best_cell(rows, first))
    scores = iter(heat_maps(comparison, over, [*beside, first], score_cell))
    maps = []
    for best in bests:
        names = [f"{key_name(axis)}: {label(comparison.axes[axis][place])}" for axis, place in best.place.items()]
        maps.append((", ".join([f"best {key_name(first)}", *names]), best))
        for value, score in zip(comparison.axes[first], scores, strict=False):
            maps.append((", ".join([f"{key_name(first)}: {label(value)}", *names]), score))
    return [(title, each) for title, each in maps if any(cell.lines for line in each.cells for cell in line)]


def heatmap_csv(comparison: Comparison, over: tuple[str, str]) -> str:
    """Return a row per cell and combination of the other axes: the best value of the first axis, and those tied."""
    first, score = comparison.compared[0], comparison.metric.path[-1].removeprefix("test_")
    keys = [*(axis for axis in comparison.compared[1:] if axis not in over), *over]
    rows: list[list[Any]] = [[*keys, f"best {first}", score, f"{score}_ci95", "tied"]]
    for group in comparison.groups:
        cells: list[Any] = [label(group[0].point[key]) for key in keys]
        if (best := group.best) is None:
            rows.append([*cells, None, None, None, None])
        else:
            tied = "; ".join(label(row.point[first]) for row in group.tied)
            rows.append([*cells, label(best.point[first]), *mean_cells(best.score), tied])
    return to_csv(rows)
