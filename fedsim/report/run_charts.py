"""The charts of single runs as plotly figures: weights and tests of workers, the partition, and the time of phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.records.combinations import Combination
from fedsim.records.reader import Run, StoredPartition
from fedsim.records.record import RoundRecord
from fedsim.records.run_metrics import mean_or_none
from fedsim.records.worker_results import LABELS
from fedsim.report.figure import (
    FEW_ROUNDS,
    PALETTE,
    axis,
    cell_trace,
    figure,
    label_axis,
    plain,
    round_axis,
    rounded,
    value_axis,
    with_color_bar,
)

BYZANTINE, EXCLUDED = "#d43c2f", "#e58b80"
MOST_CELLS = 1_000_000  # of all heat maps of weights together; about 10 MB of page
MOST_COLUMNS = 250  # of a heat map over rounds
FEWEST_COLUMNS = 25
FEW_WORKERS = 60  # up to this number, each worker has a label and cells have gaps


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
    traces = [cell_trace(z, f"{hover}weight %{{z:.4~g}}", gap, coloraxis="coloraxis", **places)]
    if any(excluded):
        z = [[1 if worker in column else None for column in excluded] for worker in workers]
        color = {"colorscale": [[0, EXCLUDED], [1, EXCLUDED]], "showscale": False}
        traces.append(cell_trace(z, f"{hover}excluded", gap, **color, **places))
    known = [weight for column in weights for weight in column.values() if weight is not None]
    title = "round" if per_column == 1 else f"round (each column is the mean of {per_column} rounds)"
    layout = {
        "height": (max(18 * len(workers), 120) if few else 640) + 104,
        "coloraxis": {"cmin": min(known, default=0) if min(known, default=0) < 0 else 0, "cmax": max(known, default=1)},
        "xaxis": round_axis(x[0], x[-1], title, showgrid=False, zeroline=False),
        "yaxis": _worker_axis(few, autorange="reversed"),
    }
    return figure(traces, with_color_bar(layout, "weight"), **when)


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
    cells = cell_trace(z, "worker %{x}, label %{y}<br>%{z} samples", int(few), **shown)
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
    return figure([cells, sums], with_color_bar(layout, "samples"), min_width=width, **when)


def _worker_names(workers: Sequence[int], byzantine: frozenset[int]) -> list[str]:
    return [f"{worker} (B)" if worker in byzantine else str(worker) for worker in workers]


def _worker_axis(few: bool, title: str = "worker", **more: Any) -> dict[str, Any]:
    every = {"dtick": 1} if few else {}  # a label for each worker
    return axis(title, type="category", showgrid=False, zeroline=False, **every, **more)


def _phases_of(records: Sequence[RoundRecord]) -> list[str]:
    return list(dict.fromkeys(phase for record in records for phase in record.seconds))


def run_time(run: Run) -> dict[str, Any]:
    """Return a chart that stacks the seconds of all phases, over rounds."""
    traces: list[dict[str, Any]] = []
    for phase in _phases_of(run.history):
        seconds = [rounded(record.seconds.get(phase), "s") for record in run.history]
        bars = len(run.history) <= FEW_ROUNDS
        kind = {"type": "bar"} if bars else {"type": "scatter", "mode": "none", "stackgroup": "phases"}
        x = [record.round for record in run.history]
        traces.append({**kind, "name": plain(phase.replace("_", " ")), "x": x, "y": seconds})
    rounds = round_axis(run.history[0].round, run.history[-1].round)
    return _time_figure(traces, 320, "x", xaxis=rounds, yaxis=value_axis("seconds of a round", "s", rangemode="tozero"))


def grid_time(combined: Sequence[Combination], names: Sequence[str]) -> dict[str, Any]:
    """The mean seconds of each phase: one bar per combination, the first on top."""
    traces = []
    records = [[record for run in combination.runs for record in run.history] for combination in combined]
    for phase in _phases_of([record for each in records for record in each]):
        means = [rounded(mean_or_none(record.seconds.get(phase) for record in each), "s") for each in records]
        bar = {"type": "bar", "orientation": "h", "name": plain(phase.replace("_", " ")), "hovertemplate": "%{x}"}
        traces.append({**bar, "x": means, "y": list(range(len(names)))})
    seconds = value_axis("seconds of a round", "s", rangemode="tozero")
    bars = label_axis("", names, autorange="reversed", tickfont={"size": 11})
    return _time_figure(traces, 17 * len(names) + 130, "y", xaxis=seconds, yaxis=bars)


def _time_figure(traces: list[dict[str, Any]], height: int, along: str, **axes: Any) -> dict[str, Any]:
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"}
    layout = {"height": height, "barmode": "stack", "hovermode": f"{along} unified", "showlegend": True, **axes}
    return figure(traces, {**layout, "legend": legend, "margin": {"t": 36}}, min_width=544 if along == "y" else 0)


def workers_chart(results: WorkerResults) -> dict[str, Any]:
    """The scores of the workers in ascending order, with a line for each model."""
    n, traces = len(results.workers), []
    for index, (model, values) in enumerate(results.scores.items()):
        order = sorted(range(n), key=values.__getitem__)
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if n <= 100 else "lines",
            "name": LABELS[model],
            "x": [100 * (place + 0.5) / n for place in range(n)],
            "y": [round(values[i], 4) for i in order],
            "customdata": [[results.workers[i], results.samples[i]] for i in order],
            "hovertemplate": "worker %{customdata[0]}, %{customdata[1]} samples<br>%{y}",
            "line": {"color": PALETTE[index]},
        }
        traces.append(trace)
    layout = {
        "height": 340,
        "xaxis": axis("percent of workers", range=[0, 100]),
        "yaxis": axis(f"{results.score_name} after round {results.round}", rangemode="tozero"),
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return figure(traces, layout)
