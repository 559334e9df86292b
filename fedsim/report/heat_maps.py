"""Heat maps: the weights of workers, the partition of the data, and final values over two axes of a grid."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fedsim.core.confidence import Estimate, decimals_of, estimate, fixed
from fedsim.records.numbers import LAST_ROUND, best_score, mean_or_none
from fedsim.records.reader import Run, StoredPartition
from fedsim.records.record import Metric, RoundRecord, metrics_in
from fedsim.records.rows import Group, Row, groups_of, score_of
from fedsim.report.figure import FEW_ROUNDS, PALETTE, axis, figure, label_axis, plain, round_axis, tick_text

BYZANTINE, EXCLUDED = "#d43c2f", "#e58b80"
MOST_CELLS = 1_000_000  # of all heat maps of weights together; about 10 MB of page
MOST_COLUMNS = 250  # of a heat map over rounds
FEWEST_COLUMNS = 25
FEW_WORKERS = 60  # up to this number, each worker has a label and cells have gaps
LabelledAxis = tuple[str, Sequence[str]]  # the name of an axis, and the labels of its values
CellTexts = tuple[float | None, str, str]  # the mean in a cell, the text in it, and that beside it if one points at it
LAST_ROUND_ONLY = ("total_seconds", "total_bytes")  # metrics whose final value says nothing of the run


def columns_for(runs: Sequence[Run]) -> int:
    """The number of columns with which the heat maps of all runs stay within `MOST_CELLS`."""
    rows = sum(len({worker for record in run.history for worker in record.cohort}) for run in runs)
    return max(FEWEST_COLUMNS, min(MOST_COLUMNS, MOST_CELLS // max(rows, 1)))


def has_weights(run: Run) -> bool:
    """Whether a round records the weight of a worker, or that a worker was excluded."""
    known = (weight is not None for record in run.history for _, weight in record.weights)
    return any(known) or any(record.excluded for record in run.history)


def weights_heat_map(run: Run, columns: int = MOST_COLUMNS, /, **when: Any) -> dict[str, Any] | None:
    """The weight of every worker in every round, in at most `columns` columns; None if no round records weights.

    A cell is the mean over those rounds of its column in which the worker took part. It counts as excluded if the
    worker was excluded in at least half of these rounds.
    """
    if not has_weights(run):
        return None
    workers = sorted({worker for record in run.history for worker in [*record.cohort, *record.excluded]})
    columns = max(1, min(columns, MOST_CELLS // len(workers)))
    per_column = math.ceil(len(run.history) / columns)
    parts = [run.history[start : start + per_column] for start in range(0, len(run.history), per_column)]
    weights, excluded = [_mean_weights(part) for part in parts], [_mostly_excluded(part) for part in parts]
    x = [part[0].round for part in parts]
    few = len(workers) <= FEW_WORKERS
    gap = 1 if few and len(parts) <= FEW_ROUNDS else 0
    hover = f"worker %{{y}}, {'rounds from' if per_column > 1 else 'round'} %{{x}}<br>"
    places = {"x": x, "y": _worker_names(workers, run.byzantine)}
    z = [[column.get(worker) for column in weights] for worker in workers]
    traces = [_cells(z, f"{hover}weight %{{z:.4~g}}", gap, coloraxis="coloraxis", **places)]
    if any(excluded):
        z = [[1 if worker in column else None for column in excluded] for worker in workers]
        color = {"colorscale": [[0, EXCLUDED], [1, EXCLUDED]], "showscale": False}
        traces.append(_cells(z, f"{hover}excluded", gap, **color, **places))
    known = [weight for column in weights for weight in column.values() if weight is not None]
    title = "round" if per_column == 1 else f"round (each column is the mean of {per_column} rounds)"
    layout = {
        "height": (max(18 * len(workers), 120) if few else 640) + 104,
        "coloraxis": {"cmin": min(known, default=0) if min(known, default=0) < 0 else 0, "cmax": max(known, default=1)},
        "xaxis": round_axis(x[0], x[-1], title, showgrid=False, zeroline=False),
        "yaxis": _worker_axis(few, autorange="reversed"),
    }
    return figure(traces, _with_color_bar(layout, "weight"), **when)


def _mean_weights(records: Sequence[RoundRecord]) -> dict[int, float | None]:
    cells: dict[int, list[float | None]] = {}
    for record in records:
        for worker, weight in record.weights:
            cells.setdefault(worker, []).append(weight)
    return {worker: mean_or_none(weights, digits=4) for worker, weights in cells.items()}


def _mostly_excluded(records: Sequence[RoundRecord]) -> set[int]:
    took_part = Counter(worker for record in records for worker in {*record.cohort, *record.excluded})
    excluded = Counter(worker for record in records for worker in set(record.excluded))
    return {worker for worker, times in excluded.items() if 2 * times >= took_part[worker]}


def partition_heat_map(partition: StoredPartition, /, **when: Any) -> dict[str, Any] | None:
    """The samples of each label that each worker holds, and above them their sum; None if there is no partition."""
    counts = partition.counts
    if not any(counts):
        return None
    workers = list(range(len(counts))) if partition.workers is None else partition.workers
    byzantine = frozenset(partition.byzantine)
    few = len(workers) <= FEW_WORKERS
    names, labels = _worker_names(workers, byzantine), list(map(str, range(len(counts[0]))))
    title = "worker"
    if partition.workers is not None:
        population = f"{partition.population:,}" if partition.population else "many"
        title += f" (a random sample of {len(workers)} of the {population} workers)"
    shown = {"x": names, "y": labels, "texttemplate": "%{z}" if few else "", "coloraxis": "coloraxis"}
    z = list(zip(*counts, strict=True))
    cells = _cells(z, "worker %{x}, label %{y}<br>%{z} samples", int(few), **shown)
    sums = {
        "type": "bar",
        "x": names,
        "y": list(map(sum, counts)),
        "yaxis": "y2",
        "marker": {"color": [BYZANTINE if worker in byzantine else PALETTE[0] for worker in workers]},
        "hovertemplate": "worker %{x}<br>%{y} samples<extra></extra>",
    }
    layout = {
        "height": min(24 * len(labels), 480) + 170,
        "bargap": 0.15,
        "showlegend": False,
        "coloraxis": {"cmin": 0, "cmax": max(map(max, counts))},
        "xaxis": _worker_axis(few, title, anchor="y"),
        "yaxis": axis("label", type="category", autorange="reversed", domain=[0, 0.78], showgrid=False, zeroline=False),
        "yaxis2": axis("samples", domain=[0.82, 1], nticks=3, automargin=True),
    }
    width = 26 * len(workers) + 140 if few else 0
    return figure([cells, sums], _with_color_bar(layout, "samples"), min_width=width, **when)


def final_heat_maps(
    combined: Sequence[Row], axes: Sequence[LabelledAxis], order: Sequence[int]
) -> list[dict[str, Any]]:
    """Return two axes against each other: one figure per final value and combination of the other axes.

    Args:
        combined: the combinations of the grid.
        axes: the name of each axis and the labels of its values; down, across, and the others.
        order: the index of each of these axes in the place of a combination.
    """
    runs = [run for combination in combined for run in combination.finished]
    metrics = [metric for metric in metrics_in(run.history[-1] for run in runs) if metric.chart]
    values: list[tuple[str, Callable[[Run], float | None], int | None]] = [
        (f"Final {metric.label.lower()}", partial(_final, metric), None if metric.unit else 4)
        for metric in metrics
        if metric.key not in LAST_ROUND_ONLY
    ]
    if any(best_score(run.history) is not None for run in runs):
        values.insert(1, (f"Best {score_of(runs).label.lower()}", lambda run: best_score(run.history), 4))
    figures = []
    for label, read, decimals in values:
        cells = {tuple(each.place[index] for index in order): _mean_of(read, each.finished) for each in combined}
        means = [cell.mean for cell in cells.values() if cell and math.isfinite(cell.mean)]
        limits = {"cmin": min(means), "cmax": max(means)} if means else {}
        for others in itertools.product(*(range(len(labels)) for _, labels in axes[2:])):
            figures.append(_final_heat_map(label, cells, others, decimals, axes, limits))
    return figures


def best_heat_maps(combined: Sequence[Row], axes: Sequence[LabelledAxis], order: Sequence[int]) -> list[dict[str, Any]]:
    """Return the best value of the first axis over two others: one figure per combination of the axes after these.

    Args:
        combined, axes, order: as of `final_heat_maps`; the first axis is the third of `axes`.
    """
    down, across, (_, values), *beside = axes
    found = {tuple(group[0].place[index] for index in order if index): group for group in groups_of(combined)}
    means = [each.score.mean for each in combined if each.score]
    limits = {"cmin": min(means), "cmax": max(means)} if means else {}
    figures = []
    for others in itertools.product(*(range(len(labels)) for _, labels in beside)):
        table = [[found.get((i, j, *others)) for j in range(len(across[1]))] for i in range(len(down[1]))]
        shown_for = {f"axis{index}": str(value) for index, value in enumerate(others, start=3)}
        cells = [[_best_cell(best, values) for best in line] for line in table]
        figures.append(_two_axes(cells, down, across, combined[0].metric.label.lower(), limits, **shown_for))
    return figures


def _best_cell(group: Group | None, labels: Sequence[str]) -> CellTexts:
    """The name of the best value, its mean, and how many are tied with it; if one points at it, which ones."""
    if group is None or group.best is None or group.best.score is None:
        return None, "", ""
    best, score = group.best, group.best.score
    name, decimals = tick_text(labels[best.place[0]]), best.metric.decimals_for(score.mean)
    tied = ", ".join(plain(labels[each.place[0]]) for each in group.tied)
    lines = [name, fixed(score.mean, decimals), group.tied_text]
    hover = [f"{name} {score.text(decimals)}", f"tied with {tied}" if tied else ""]
    return score.mean, "<br>".join(filter(None, lines)), "<br>".join(filter(None, hover))


def _final(metric: Metric, run: Run) -> float | None:
    return run.metrics.get(metric.key) if metric.key in LAST_ROUND else metric.read(run.history[-1])


def _mean_of(read: Callable[[Run], float | None], runs: Sequence[Run]) -> Estimate | None:
    return estimate([value for run in runs if (value := read(run)) is not None])


def _final_heat_map(
    label: str,
    cells: dict[tuple[int, ...], Estimate | None],
    others: tuple[int, ...],
    decimals: int | None,
    axes: Sequence[LabelledAxis],
    limits: dict[str, float],
) -> dict[str, Any]:
    down, across = axes[:2]
    table = [[cells.get((i, j, *others)) for j in range(len(across[1]))] for i in range(len(down[1]))]
    texts = [[_final_cell(cell, decimals) for cell in line] for line in table]
    shown_for = {f"axis{index}": str(value) for index, value in enumerate(others, start=2)}
    return _two_axes(texts, down, across, label.lower(), limits, value=label, **shown_for)


def _final_cell(cell: Estimate | None, decimals: int | None) -> CellTexts:
    if cell is None or not math.isfinite(cell.mean):
        return None, "" if cell is None else "no finite value", ""
    text = _cell_text(cell, decimals)
    return cell.mean, text, f"{text}<br>seeds: {cell.n}"


def _two_axes(
    cells: Sequence[Sequence[CellTexts]],
    down: LabelledAxis,
    across: LabelledAxis,
    title: str,
    limits: dict[str, float],
    **when: Any,
) -> dict[str, Any]:
    """A heat map of cells [rows, columns] over two axes; `title` is that of its colours, `limits` are theirs."""
    (_, rows), (_, columns) = down, across
    trace = _cells(
        [[mean for mean, _, _ in line] for line in cells],
        "%{customdata}",
        gap=2,
        text=[[text for _, text, _ in line] for line in cells],
        customdata=[
            [f"{plain(row)}, {plain(column)}<br>{hover}" for column, (_, _, hover) in zip(columns, line, strict=True)]
            for row, line in zip(rows, cells, strict=True)
        ],
        texttemplate="%{text}",
        textfont={"size": 12},
        coloraxis="coloraxis",
    )
    lines = [text.split("<br>") for row in cells for _, text, _ in row]
    longest = max(len(line) for each in lines for line in each)
    layout = {
        "height": max(46, 16 * max(map(len, lines)) + 14) * len(rows) + 104,
        "coloraxis": limits,
        "xaxis": label_axis(across[0], columns),
        "yaxis": label_axis(down[0], rows, autorange="reversed"),
    }
    width = max(110, 8 * longest) * len(columns) + 140
    return figure([trace], _with_color_bar(layout, title), min_width=width, **when)


def _cell_text(cell: Estimate, decimals: int | None) -> str:
    digits = decimals_of(cell.mean) if decimals is None else decimals
    return "<br>".join(filter(None, [fixed(cell.mean, digits), cell.spread(digits)]))


def _cells(z: Sequence[Sequence[float | None]], hover: str, gap: int, **more: Any) -> dict[str, Any]:
    """Return the trace of a heat map with values z [rows, columns]."""
    hidden = {"hoverongaps": False, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "heatmap", "z": z, "xgap": gap, "ygap": gap, **hidden, **more}


def _with_color_bar(layout: dict[str, Any], title: str) -> dict[str, Any]:
    """The layout with a title on its colour bar, above the chart."""
    bar = {"title": {"text": plain(title), "side": "right"}}
    return {**layout, "coloraxis": {**layout["coloraxis"], "colorbar": bar}, "margin": {"t": 64}}


def _worker_names(workers: Sequence[int], byzantine: frozenset[int]) -> list[str]:
    return [f"{worker} (B)" if worker in byzantine else str(worker) for worker in workers]


def _worker_axis(few: bool, title: str = "worker", **more: Any) -> dict[str, Any]:
    every = {"dtick": 1} if few else {}  # a label for each worker
    return axis(title, type="category", showgrid=False, zeroline=False, **every, **more)
