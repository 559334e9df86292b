"""Data of the figures of a comparison (lines and heat maps) and of a run (its workers over virtual time).

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
from fedsim.comparison.tables import decimals_for, listed, mean_cells
from fedsim.core.confidence import FEWEST_FOR_BAND, decimals_of, estimate, fixed
from fedsim.errors import called, plural
from fedsim.records.figures import MOST_ROWS
from fedsim.records.formatting import amount, comparison_title, key_name, percent
from fedsim.records.numbers import SCALES
from fedsim.records.reader import Run
from fedsim.records.record import Metric, RaceRecord
from fedsim.system.files import to_csv

MOST_NAMES = 2  # maximum number of names in a cell of a heat map
MOST_CELLS = 48  # maximum number of cells per row of a timeline
TRAINS, WAITS, DROPPED, UNFINISHED = "trains", "waits", "trains for a dropped result", "no result before the end"
KEPT, LOST = "updates that were kept", "lost updates"


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
    alone = rows[0].score if len(rows) == 1 else None
    decimals = decimals_for(alone, rows[0].metric) if alone else rows[0].metric.decimals_for(mean)
    of = f" ({counted} of {runs})" if counted < runs else ""
    spread = alone.spread(decimals) if alone else ""
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
    score, decimals = group.best.score, decimals_for(group.best.score, group.best.metric)
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


class Spell(NamedTuple):
    """A horizontal bar in a row of a timeline: a part of a round in which the workers of the row do the same.

    Attributes:
        row: index of the row.
        does: what the workers do: TRAINS, WAITS, DROPPED or UNFINISHED. For a race: KEPT or LOST.
        start: virtual time at which the part begins. Only its length is exact, because rounds do not record the order.
        length: virtual seconds. For a race, the number of updates.
        staleness: mean staleness of the results, if the workers train for results that were used.
        text: rounds and share of their time, such as "round 3, 25 %".
    """

    row: int
    does: str
    start: float
    length: float
    staleness: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """Figure and table of what the workers of a run do over virtual time, or of the lost updates of a race.

    Attributes:
        title, remark: title of the figure, and the text below.
        x_text, y_text: titles of the axes.
        head, table: headings and texts of the table. The first column contains the labels of the figure's rows.
        spells: bars of the figure.
        ends: virtual time at the end of each cell. For a race, the largest number of updates.
    """

    title: str
    remark: str
    x_text: str
    y_text: str
    head: list[str]
    table: list[list[str]]
    spells: list[Spell]
    ends: list[float]


def timeline(run: Run) -> Timeline | None:
    """Return what the workers of a run do over virtual time, or the lost updates of a race. None for other runs.

    If there are more than `MOST_ROWS` workers, each row shows several workers of about the same speed.
    """
    if races := [(record.round, record.race) for record in run.history if record.race]:
        return _lost_updates(run, races)
    rounds = [(record.round, record.virtual_seconds, record.timeline) for record in run.history]
    cells = _parts([(round, end, spent) for round, end, spent in rounds if end and end > 0 and spent], MOST_CELLS)
    workers = sorted({worker for cell in cells for *_, spent in cell for worker in spent.workers})
    if not workers:
        return None
    # seconds of training and of waiting, used and dropped results, sum of their staleness
    numbers = np.zeros((5, len(workers), len(cells)))
    for index, cell in enumerate(cells):
        for *_, spent in cell:
            stale = np.array(spent.used, float) * spent.staleness
            of_workers = np.array([spent.training, spent.waiting, spent.used, spent.dropped, stale])
            numbers[:, np.searchsorted(workers, spent.workers), index] += of_workers
    rows, labels = _rows_of_workers(run, workers, numbers.sum(2))
    numbers, sizes = np.stack([numbers[:, row].sum(1) for row in rows], 1), np.array(list(map(len, rows)))
    ends = np.maximum.accumulate([0.0, *(cell[-1][1] for cell in cells)])
    training, waiting, used, dropped, stale = numbers.sum(2)
    shares, counts = (training, waiting), (used, dropped, stale / np.maximum(1, used))
    columns = *(map(percent, seconds / sizes / ends[-1]) for seconds in shares), *(map(amount, each) for each in counts)
    shared = "" if sizes.max() == 1 else f", {sizes.max()} per row, by training seconds per result"
    marks = "; (B): Byzantine" if run.byzantine else ""
    return Timeline(
        title="Workers over virtual time",
        remark=f"{run.name}: each cell is {plural(len(cells[0]), 'round')}, divided by how time was spent{marks}",
        x_text="virtual seconds",
        y_text=f"workers{shared}",
        head=["workers", "trains", "waits", "used", "dropped", "staleness"],
        table=list(map(list, zip(labels, *columns, strict=True))),
        spells=_spells(numbers, ends, sizes, list(map(_rounds, cells))),
        ends=ends[1:].tolist(),
    )


def _parts(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """Return the items in at most `most` parts of equal length, of which the last may be shorter."""
    size = math.ceil(len(items) / max(1, most)) or 1
    return [items[start : start + size] for start in range(0, len(items), size)]


def _rounds(part: Sequence[Any]) -> str:
    first, last = part[0][0], part[-1][0]
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def _rows_of_workers(run: Run, workers: list[int], totals: np.ndarray) -> tuple[list[Sequence[int]], list[str]]:
    """Return the indices of the `workers` in each row, and the labels of the rows.

    Several workers in a row are about equally fast, and either all or none of them are Byzantine. `totals` [5, n] are
    the sums over time of the numbers in `timeline`.
    """
    names = [called(worker, run.partition.names) for worker in workers]
    rows: list[Sequence[int]] = [[place] for place in range(len(workers))]
    byzantine = [worker in run.byzantine for worker in workers]
    if len(workers) > MOST_ROWS:
        pace = totals[0] / np.maximum(totals[2] + totals[3], 0.5)  # one without results is slow
        by_pace = np.argsort(pace, kind="stable").tolist()
        groups = ([place for place in by_pace if byzantine[place] == evil] for evil in (False, True))
        per_row = math.ceil(len(workers) / (MOST_ROWS - 1))  # each group may have a last row with fewer workers
        rows = [part for group in groups for part in _parts(group, math.ceil(len(group) / per_row))]
        rows.sort(key=lambda row: pace[row[len(row) // 2]])
        names = [f"{pace[row[len(row) // 2]]:.3g} s" for row in rows]
    return rows, [name + " (B)" * byzantine[row[0]] for name, row in zip(names, rows, strict=True)]


def _spells(numbers: np.ndarray, ends: np.ndarray, sizes: np.ndarray, names: Sequence[str]) -> list[Spell]:
    """Return the parts of all rows. `numbers` [5, rows, cells] are those of `timeline`, and `ends` [1 + cells]."""
    lengths = np.diff(ends)
    busy = numbers[:2].sum((0, 1)) / np.where(lengths > 0, lengths, math.inf)
    places = np.maximum(1, sizes * min(1.0, busy.max() / sizes.sum()))  # workers of each row at the same time
    spells = []
    for row, of_row in enumerate(numbers.transpose(1, 2, 0).tolist()):
        used, dropped, stale = 0.0, 0.0, 0.0  # of this cell, or of the next one with results, to which training leads
        for cell, (training, waiting, *results) in reversed(list(enumerate(of_row))):
            if results[0] + results[1]:
                used, dropped, stale = results
            total, start, length = used + dropped, float(ends[cell]), float(lengths[cell])
            scale = length / max(places[row] * length, training + waiting, 1e-300)
            seconds = {UNFINISHED: training, WAITS: waiting}
            if total:
                seconds = {TRAINS: training * used / total, DROPPED: training * dropped / total, WAITS: waiting}
            for does, shown in ((does, scale * spent) for does, spent in seconds.items() if scale * spent > 0):
                staleness = stale / used if does == TRAINS else 0.0
                spells.append(Spell(row, does, start, shown, staleness, f"{names[cell]}, {percent(shown / length)}"))
                start += shown
    return spells


def _lost_updates(run: Run, races: Sequence[tuple[int, RaceRecord]]) -> Timeline:
    table, spells, ends = [], [], [1.0]
    for row, part in enumerate(_parts(races, MOST_ROWS)):
        updates, lost = (float(sum(race[key] or 0 for _, race in part)) for key in ("updates", "updates_lost"))
        share = percent(lost / max(1.0, updates))
        table.append([_rounds(part), amount(updates), amount(lost), share])
        spells += [Spell(row, KEPT, 0.0, updates - lost, 0.0, ""), Spell(row, LOST, updates - lost, lost, 0.0, share)]
        ends.append(updates)
    runs = races[-1][1].runs or 1
    repeated = f", summed over {runs} repetitions" if runs > 1 else ""
    return Timeline(
        title="Lost updates of a race",
        remark=f"{run.name}: the numbers of lost updates are estimates{repeated}",
        x_text="updates",
        y_text="",
        head=["", "updates", "lost", "share"],
        table=table,
        spells=spells,
        ends=[max(ends)],
    )
