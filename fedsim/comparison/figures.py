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
from fedsim.comparison.tables import listed, mean_cells
from fedsim.core.confidence import FEWEST_FOR_BAND, decimals_of, estimate, fixed
from fedsim.errors import called
from fedsim.records.figures import MOST_ROWS
from fedsim.records.formatting import amount, comparison_title, key_name, percent
from fedsim.records.numbers import SCALES
from fedsim.records.reader import Run
from fedsim.records.record import Metric, TimelineRecord
from fedsim.system.files import to_csv

MOST_NAMES = 2  # maximum number of names in a cell of a heat map
MOST_CELLS = 48  # maximum number of cells per row of a timeline
TRAINS, WAITS, DROPPED, UNFINISHED = "trains", "waits", "trains for a dropped result", "no result before the end"


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


class Spell(NamedTuple):
    """A part of a round in a timeline, in which the workers of a row do the same.

    Attributes:
        row: index of the row.
        does: what the workers do: TRAINS, WAITS, DROPPED or UNFINISHED.
        start: virtual time at which the part begins. Only its length is exact, because rounds do not record the order.
        seconds: length in virtual seconds.
        staleness: mean staleness of the results, if the workers train for results that were used.
        cell: rounds of the cell as text, such as "round 3", and the part's share of the time, such as "25 %".
    """

    row: int
    does: str
    start: float
    seconds: float
    staleness: float
    cell: str


@dataclass(frozen=True)
class Timeline:
    """Table and figure of a run: what its workers do over time.

    Attributes:
        title, remark: title of the figure, and the text below.
        what: what a row of the figure shows.
        head, table: headings and texts of the table. The first column contains the labels of the rows.
        spells: parts of the rows. Empty for a race, which has no virtual time.
        ends: virtual time at the end of each cell.
        bars: for a race, the number of updates in each row of the table, and the number of lost updates.
    """

    title: str
    remark: str
    what: str
    head: list[str]
    table: list[list[str]]
    spells: list[Spell]
    ends: list[float]
    bars: list[tuple[float, ...]]


def timeline(run: Run) -> Timeline | None:
    """Return what the workers of a run do over virtual time, or the lost updates of a race. None for other runs.

    If there are more than `MOST_ROWS` workers, each row shows several workers of about the same speed.
    """
    if any(record.race for record in run.history):
        return _lost_updates(run)
    rounds = [(each.round, each.virtual_seconds, each.timeline) for each in run.history]
    known = [(round, end, spent) for round, end, spent in rounds if end and end > 0 and spent is not None]
    if not known:
        return None
    rows, labels = _rows_of_workers(run, [spent for *_, spent in known])
    row_of = {worker: row for row, workers in enumerate(rows) for worker in workers}
    per_cell = math.ceil(len(known) / MOST_CELLS)
    cells = [known[start : start + per_cell] for start in range(0, len(known), per_cell)]
    numbers = np.zeros((5, len(rows), len(cells)))  # seconds of training and waiting, used, dropped, sum of staleness
    for index, of_cell in enumerate(cells):
        for _, _, spent in of_cell:
            stale = np.array(spent.used, float) * spent.staleness
            of_workers = np.array([spent.training, spent.waiting, spent.used, spent.dropped, stale])
            np.add.at(numbers[:, :, index].T, [row_of[worker] for worker in spent.workers], of_workers.T)
    ends = np.maximum.accumulate([0.0, *(of_cell[-1][1] for of_cell in cells)])
    names = [f"round {a}" if a == b else f"rounds {a} to {b}" for a, b in ((one[0][0], one[-1][0]) for one in cells)]
    training, waiting, used, dropped, stale = (part.sum(1) for part in numbers)
    sizes = np.array(list(map(len, rows)))
    table = [
        [label, *map(percent, (trained / size / ends[-1], waited / size / ends[-1])), *map(amount, counts)]
        for label, size, trained, waited, *counts in zip(
            labels, sizes, training, waiting, used, dropped, stale / np.maximum(1, used), strict=True
        )
    ]
    cell = "one round" if per_cell == 1 else f"{per_cell} rounds"
    marks = "; (B): Byzantine" if run.byzantine else ""
    return Timeline(
        title="Workers over virtual time",
        remark=f"{run.name}: each cell is {cell}, divided by the time that was spent, waiting last{marks}",
        what="worker" if len(rows) == sizes.sum() else f"training seconds per result ({sizes.max()} workers per row)",
        head=["workers", "trains", "waits", "used", "dropped", "staleness"],
        table=table,
        spells=_spells(numbers, ends, sizes, names),
        ends=ends[1:].tolist(),
        bars=[],
    )


def _rows_of_workers(run: Run, records: Sequence[TimelineRecord]) -> tuple[list[list[int]], list[str]]:
    """Return the IDs of the workers in each row, and the labels of the rows.

    Several workers in a row are about equally fast, and either all or none of them are Byzantine.
    """
    spent: dict[int, list[float]] = {}  # seconds of training and number of results, by worker
    for record in records:
        columns = zip(record.workers, record.training, record.used, record.dropped, strict=True)
        for worker, training, used, dropped in columns:
            total = spent.setdefault(worker, [0.0, 0])
            total[0] += training
            total[1] += used + dropped
    if len(spent) <= MOST_ROWS:
        rows = [[worker] for worker in sorted(spent)]
        names = [called(worker, run.partition.names) for worker in sorted(spent)]
    else:
        pace = {worker: seconds / results if results else math.inf for worker, (seconds, results) in spent.items()}
        ordered = sorted(pace, key=lambda worker: (pace[worker], worker))
        groups = [[worker for worker in ordered if (worker in run.byzantine) == evil] for evil in (False, True)]
        size = math.ceil(len(ordered) / (MOST_ROWS - 1))  # each group may have a last row with fewer workers
        rows = [group[start : start + size] for group in groups for start in range(0, len(group), size)]
        rows.sort(key=lambda workers: pace[workers[len(workers) // 2]])
        medians = [pace[workers[len(workers) // 2]] for workers in rows]
        names = ["no result" if seconds == math.inf else f"{seconds:.3g} s" for seconds in medians]
    marks = [" (B)" if workers[0] in run.byzantine else "" for workers in rows]
    return rows, [name + mark for name, mark in zip(names, marks, strict=True)]


def _spells(numbers: np.ndarray, ends: np.ndarray, sizes: np.ndarray, names: Sequence[str]) -> list[Spell]:
    """Return the parts of all rows. `numbers` [5, rows, cells] are those of `timeline`, and `ends` [1 + cells]."""
    lengths = np.diff(ends)
    busy = numbers[:2].sum((0, 1)) / np.where(lengths > 0, lengths, math.inf)
    places = np.maximum(1, sizes * min(1.0, busy.max() / sizes.sum()))  # workers of each row at the same time
    spells = []
    for row, of_row in enumerate(numbers.transpose(1, 2, 0)):
        results = (0.0, 0.0, 0.0)  # of this cell, or of the next one with results: what the training leads to
        for cell in reversed(range(len(lengths))):
            training, waiting, *of_cell = of_row[cell].tolist()
            results = tuple(of_cell) if of_cell[0] + of_cell[1] else results
            used, dropped, stale = results
            total, room = used + dropped, places[row] * lengths[cell]
            scale, start = float(lengths[cell] / max(room, training + waiting, 1e-300)), float(ends[cell])
            parts = {TRAINS: used, DROPPED: dropped, UNFINISHED: 0.0 if total else 1.0}
            shares = {does: part * training / (total or 1.0) for does, part in parts.items()}
            for does, seconds in (shares | {WAITS: waiting}).items():
                if seconds * scale > 0:
                    share = percent(seconds * scale / lengths[cell])
                    staleness = stale / used if does == TRAINS else 0.0
                    spells.append(Spell(row, does, start, seconds * scale, staleness, f"{names[cell]}, {share}"))
                    start += seconds * scale
    return spells


def _lost_updates(run: Run) -> Timeline:
    rounds = [(record.round, record.race) for record in run.history if record.race]
    per_row = math.ceil(len(rounds) / MOST_ROWS)
    parts = [rounds[start : start + per_row] for start in range(0, len(rounds), per_row)]
    labels = [f"{part[0][0]}" + f" to {part[-1][0]}" * (len(part) > 1) for part in parts]
    bars = [
        tuple(float(sum(race[key] or 0 for _, race in part)) for key in ("updates", "updates_lost")) for part in parts
    ]
    updates, lost = (sum(counts) for counts in zip(*bars, strict=True))
    return Timeline(
        title="Lost updates of a race",
        remark=f"{run.name}: {percent(lost / max(1.0, updates))} of the updates were overwritten (estimated)",
        what="round",
        head=["round", "updates", "lost", "share"],
        table=[
            [label, amount(updates), amount(lost), percent(lost / max(1.0, updates))]
            for label, (updates, lost) in zip(labels, bars, strict=True)
        ],
        spells=[],
        ends=[],
        bars=bars,
    )
