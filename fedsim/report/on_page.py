"""Charts of the HTML report as plotly figures: curves, heat maps, time per phase and tests of individual workers."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedsim.comparison.figures import (
    DROPPED,
    KEPT,
    LOST,
    TRAINS,
    UNFINISHED,
    WAITS,
    HeatCell,
    HeatMap,
    Line,
    LineChart,
    Timeline,
    best_cell,
    curves,
    curves_along,
    heat_maps,
    number_cell,
)
from fedsim.comparison.results import Comparison
from fedsim.comparison.rows import MeanCurve, Row, numeric_axes, score_of
from fedsim.core.confidence import FEWEST_FOR_BAND, LOG_FROM
from fedsim.core.plotting import far_apart
from fedsim.errors import called
from fedsim.records import formatting as fmt
from fedsim.records.numbers import LAST_ROUND, SCALES, best_score, mean_or_none
from fedsim.records.reader import Run, StoredPartition
from fedsim.records.record import METRICS, Metric, RoundRecord, metrics_in
from fedsim.records.worker_results import LABELS, WorkerResults

ROUNDS = "round"
ON_CLOCK = ("virtual_seconds", "updates", "arrivals")  # x axes of asynchronous runs, in addition to rounds
PARTS = {"total_seconds": ("seconds",), "total_bytes": ("bytes_up", "bytes_down", "top_bytes")}  # parts of a metric
BOTH_LOSSES = ("test_loss", "train_loss")
LAST_ROUND_ONLY = ("total_seconds", "total_bytes")  # metrics whose value in the last round does not describe the run

BYZANTINE, EXCLUDED = "#d43c2f", "#e58b80"
MOST_CELLS = 1_000_000  # maximum for all heat maps of weights together, about 10 MB of HTML
MOST_COLUMNS = 250  # maximum number of columns in a heat map over rounds
FEWEST_COLUMNS = 25
FEW_WORKERS = 60  # with at most this number of workers, each worker has a label and cells have gaps
LONGEST_TICK = 48  # maximum number of characters
FEW_ROUNDS = 50  # with at most this number of rounds, charts have markers and bars
PALETTE = (
    *("#4269d0", "#e8a013", "#e8594b", "#3aa8a0", "#3ca951"),
    *("#e070a0", "#a463f2", "#6fa3ea", "#9c6b4e", "#8b9099"),
)
STALENESS = ("#b5d3f2", "#4f8fd8", "#1c4b94")  # from low to high, on light and on dark pages
SPELLS: dict[str, dict[str, Any]] = {
    TRAINS: {"color": STALENESS[1]},
    DROPPED: {"color": EXCLUDED, "pattern": {"shape": "x", "fgcolor": BYZANTINE, "bgcolor": "rgba(0, 0, 0, 0)"}},
    WAITS: {"color": "rgba(128, 128, 128, 0.25)"},
    UNFINISHED: {"color": STALENESS[1], "pattern": {"shape": "/", "bgcolor": "rgba(0, 0, 0, 0)"}},
}
SPELLS |= {KEPT: SPELLS[TRAINS], LOST: SPELLS[DROPPED]}

CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],  # the default buttons send charts to a server
    "plotlyServerURL": "",
    "typesetMath": False,
}


@dataclass(frozen=True)
class Chart:
    """An entry of the menu "Metric": its label, and the metrics that the chart shows."""

    label: str
    lines: tuple[Metric, ...]


def records_of(runs: Sequence[Run]) -> list[RoundRecord]:
    """Return the records of all runs."""
    return [record for run in runs for record in run.history]


def charts_of(runs: Sequence[Run], parts: bool = False) -> list[Chart]:
    """Return one chart for each metric that the runs recorded.

    With `parts`, charts of sums also show their summands, such as the seconds of each phase.
    """
    available = metrics_in(records_of(runs))
    charts = []
    for metric in [metric for metric in available if metric.chart] or METRICS[:1]:
        summands = [part for part in available if parts and part.path[0] in PARTS.get(metric.key, ())]
        charts.append(Chart(metric.label, (metric, *summands)))
    losses = tuple(metric for metric in available if metric.key in BOTH_LOSSES)
    if len(losses) == len(BOTH_LOSSES):
        position = next(index for index, chart in enumerate(charts) if chart.lines[0] == losses[-1])
        charts.insert(position + 1, Chart("Test and train loss", losses))
    return charts


def scales_of(runs: Sequence[Run]) -> list[str]:
    """Return the possible x axes other than rounds, such as virtual seconds, or bytes if they differ between runs."""
    totals = {sum(record.total_bytes or 0 for record in run.history) / max(1, len(run.history)) for run in runs}
    sent = ["bytes"] if len(totals) > 1 else []
    sent += ["top_bytes"] if any(record.top_bytes for record in records_of(runs)) else []
    sent += ["epsilon"] if any("epsilon" in record.metrics for record in records_of(runs)) else []
    if all(record.virtual_seconds is None and record.asynchronous is None for record in records_of(runs)):
        return sent
    progress = [at for run in runs for at in run.progress]
    return [scale for scale in ON_CLOCK if any(getattr(at, scale) is not None for at in progress)] + sent


def scale_choices(runs: Sequence[Run]) -> list[tuple[str, str, bool]]:
    """Return the menu of x axes as triples (value, text, whether selected).

    The menu is empty if the runs can only be drawn over rounds.
    """
    timed = all(run.progress[-1].virtual_seconds is not None for run in runs)
    choices = [(scale, SCALES[scale], timed and scale == "virtual_seconds") for scale in scales_of(runs)]
    return [(ROUNDS, "rounds", not timed), *choices] if choices else []


def line_name(metric: Metric) -> str:
    """Return the name of a metric as it is written within a sentence, usually in lower case."""
    return metric.label if metric.path[0] == "metrics" else metric.label.lower().replace("_", " ")


def run_curves(run: Run) -> list[dict[str, Any]]:
    """Return the figures of a run's curves: one for each metric and each x axis that readers can choose."""
    comparison = Comparison(run.name, {}, [run])
    return _all_curves(comparison, charts_of([run], parts=True), lambda chart, line: line_name(line.metric))


def curves_by_run(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the figures of a comparison's curves: one for each metric and each x axis that readers can choose."""

    def name_of(chart: Chart, line: Line) -> str:
        suffix = "" if len(chart.lines) == 1 else f" · {line.metric.label.lower().removesuffix(' loss')}"
        return name_of_values(comparison.axes[key][line.position[key]] for key in comparison.compared) + suffix

    return _all_curves(comparison, charts_of(_begun(comparison)), name_of)


def name_of_values(values: Iterable[Any]) -> str:
    """Return the name of a line from its compared values, such as "krum · 0.1"."""
    return " · ".join(map(fmt.label, values)) or "all runs"


def _begun(comparison: Comparison) -> list[Run]:
    return [run for row in comparison.rows for run in row.runs if run.history]


def _all_curves(
    comparison: Comparison, charts: Sequence[Chart], name_of: Callable[[Chart, Line], str]
) -> list[dict[str, Any]]:
    begun, figures = _begun(comparison), []
    rounds = begun[0].history[0].round, max(run.history[-1].round for run in begun)
    for scale in (ROUNDS, *scales_of(begun)):
        for chart in charts:
            shown = curves(comparison, scale, chart.lines, begun=True)
            if scale == ROUNDS:
                x_axis = round_axis(*rounds)
            else:
                ends = [end for line in shown.lines if line.mean and (end := line.mean.x[-1])]
                log = ends and max(ends) >= LOG_FROM * min(ends)
                kind = {"type": "log"} if log else {"type": "linear", "rangemode": "nonnegative"}
                hover = {"text": f"{shown.x_text} %{{x:.4~g}}"}
                unit = "B" if scale.endswith("bytes") else ""
                x_axis = value_axis(shown.x_text, unit, **kind, unifiedhovertitle=hover)
            y_axis = value_axis(chart.label, chart.lines[0].unit)
            names = [name_of(chart, line) for line in shown.lines]
            figures.append(_line_figure(shown, names, x_axis, y_axis, metric=chart.label, scale=scale))
    return figures


def value_charts(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one figure for each numeric setting: the final results over its values."""
    figures = []
    for key in numeric_axes(comparison.axes, comparison.compared):
        shown, title = curves_along(comparison, key), fmt.key_name(key)
        ticks = {"tickmode": "array", "tickvals": shown.values}
        ticks["ticktext"] = [plain(fmt.label(value)) for value in shown.values]
        hover = {"text": f"{plain(title)} %{{x}}"}
        kind = "log" if far_apart(shown.values) else "linear"
        x_axis = value_axis(title, "", type=kind, **ticks, unifiedhovertitle=hover)
        names = [name_of_values(shown.value(line, key) for key in shown.keys) for line in shown.lines]
        y_axis = value_axis(comparison.metric.label, comparison.metric.unit)
        figures.append(_line_figure(shown, names, x_axis, y_axis, lines=key, against=key))
    return figures


def _line_figure(
    chart: LineChart,
    names: Sequence[str],
    x_axis: dict[str, Any],
    y_axis: dict[str, Any],
    lines: str = "all",
    **when: Any,
) -> dict[str, Any]:
    """Return a figure of lines with a legend below.

    Args:
        chart: the lines.
        names: names of the lines.
        x_axis: plotly settings of the x axis.
        y_axis: plotly settings of the y axis.
        lines: name of a group of figures. A line that a reader hides in one of them is hidden in all of them.
        when: menu choices for which the figure is shown.
    """
    traces = [trace for line, name in zip(chart.lines, names, strict=True) for trace in _traces(chart, line, name)]
    for index, trace in enumerate(traces):
        trace["uid"] = f"line{index}"  # keeps a line hidden when the user changes menus
    layout = {
        "height": 430,
        "xaxis": x_axis,
        "yaxis": y_axis,
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.2, "uirevision": lines, "traceorder": "normal"},
        "uirevision": " ".join(when.values()),  # keeps the zoom while these choices do not change
    }
    return figure(traces, layout, **when)


def _traces(chart: LineChart, line: Line, name: str) -> Iterator[dict[str, Any]]:
    """Yield the plotly traces of a line: its spread over the seeds, and its mean."""
    if (mean := line.mean) is None:
        return
    compared, unit = chart.comparison.compared, line.metric.unit
    common = {"type": "scatter", "legendgroup": plain(name)}
    meta = {f"axis{compared.index(key)}": str(line.position[key]) for key in chart.keys}
    spread = {**common, "mode": "lines", "showlegend": False, "hoverinfo": "skip", "meta": {**meta, "spread": "shown"}}
    if len(mean.curves) >= FEWEST_FOR_BAND:
        yield {**spread, **_outline(line, mean), "fill": "toself", "opacity": 0.15, "line": {"width": 0}}
    elif len(mean.curves) > 1:
        for curve in mean.curves:
            yield {**spread, **_points(*curve, unit), "opacity": 0.45, "line": {"width": 1}}
    yield {
        **common,
        **_points(mean.x, mean.means, unit),
        "mode": "lines+markers" if len(mean.x) <= FEW_ROUNDS else "lines",
        "name": plain(name),
        "line": {"width": 2},
        "marker": {"size": 5},
        "meta": meta,
        "customdata": _spread_texts(mean),
        "hovertemplate": "%{y}%{customdata}",
    }


def _points(x: np.ndarray, y: np.ndarray, unit: str) -> dict[str, Any]:
    return {"x": [rounded(value, "s") for value in x.tolist()], "y": [rounded(value, unit) for value in y.tolist()]}


def _outline(line: Line, mean: MeanCurve) -> dict[str, Any]:
    """Return the x and y values of the outline of a band, which shows the spread of a line."""
    low, high = line.band
    if mean.means.min() >= 0:
        low = np.maximum(low, mean.means.min() / 100)
    return _points(np.concatenate([mean.x, mean.x[::-1]]), np.concatenate([high, low[::-1]]), "s")


def _spread_texts(mean: MeanCurve) -> list[str]:
    """Return a text for each x value that describes the spread over the seeds, such as " ± 0.0100 (5 seeds)"."""
    if len(mean.values) == 1:
        return [""] * mean.values.shape[1]
    if len(mean.values) == 2:
        return [f" ({rounded(first):.4f}, {rounded(second):.4f})" for first, second in mean.values.T.tolist()]
    return [f" ± {half:.4f} ({len(mean.values)} seeds)" for half in mean.half_widths.tolist()]


def final_heat_maps(comparison: Comparison, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return heat maps of the final results over two compared settings.

    Args:
        comparison: the comparison.
        keys: the settings on the vertical and the horizontal axis, and the remaining compared settings.
    """
    runs = [run for row in comparison.rows for run in row.finished]
    metrics = [metric for metric in metrics_in(run.history[-1] for run in runs) if metric.chart]
    values: list[tuple[str, Callable[[Run], float | None], int | None]] = [
        (f"Final {metric.label.lower()}", partial(_final, metric), None if metric.unit else 4)
        for metric in metrics
        if metric.key not in LAST_ROUND_ONLY
    ]
    if any(best_score(run.history) is not None for run in runs):
        values.insert(1, (f"Best {score_of(runs).label.lower()}", lambda run: best_score(run.history), 4))
    figures = []
    for title, read, decimals in values:
        maps = heat_maps(comparison, keys[:2], keys[2:], partial(number_cell, read=read, decimals=decimals))
        figures += _heat_figures(
            comparison, keys, maps, title.lower(), [mean for shown in maps for mean in shown.means], value=title
        )
    return figures


def _final(metric: Metric, run: Run) -> float | None:
    return run.metrics.get(metric.key) if metric.key in LAST_ROUND else metric.read(run.history[-1])


def best_heat_maps(comparison: Comparison, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return heat maps over two compared settings, whose cells name the best value of the first compared setting.

    Args:
        comparison: the comparison.
        keys: the settings on the vertical and the horizontal axis, the first setting, and the remaining settings.
    """
    down, across, first, *beside = keys
    maps = heat_maps(comparison, (down, across), beside, partial(best_cell, axis=first))
    means = [row.score.mean for row in comparison.rows if row.score]
    return _heat_figures(comparison, keys, maps, comparison.metric.label.lower(), means)


def _heat_figures(
    comparison: Comparison,
    keys: Sequence[str],
    maps: Sequence[HeatMap],
    title: str,
    means: Sequence[float],
    **when: Any,
) -> list[dict[str, Any]]:
    """Return one plotly figure for each heat map.

    Args:
        comparison: the comparison.
        keys: the settings on the vertical and the horizontal axis, and the remaining compared settings.
        maps: the heat maps.
        title: title of the colour scale.
        means: all numbers that the colour scale must include.
        when: menu choices for which the figures are shown.
    """
    limits = {"cmin": min(means), "cmax": max(means)} if means else {}
    rows, columns = ([fmt.label(value) for value in comparison.axes[key]] for key in keys[:2])
    figures = []
    for shown in maps:
        texts = [[_cell_text(cell) for cell in line] for line in shown.cells]
        trace = cell_trace(
            [[None if math.isnan(cell.mean) else cell.mean for cell in line] for line in shown.cells],
            "%{customdata}",
            gap=2,
            text=texts,
            customdata=[
                [f"{plain(row)}, {plain(column)}<br>{_hover(cell)}" for column, cell in zip(columns, line, strict=True)]
                for row, line in zip(rows, shown.cells, strict=True)
            ],
            texttemplate="%{text}",
            textfont={"size": 12},
            coloraxis="coloraxis",
        )
        lines = [text.split("<br>") for line in texts for text in line]
        layout = {
            "height": max(46, 16 * max(map(len, lines)) + 14) * len(rows) + 104,
            "coloraxis": limits,
            "xaxis": label_axis(fmt.key_name(keys[1]), columns),
            "yaxis": label_axis(fmt.key_name(keys[0]), rows, autorange="reversed"),
        }
        width = max(110, 8 * max(len(line) for cell in lines for line in cell)) * len(columns) + 140
        position = {f"axis{keys.index(axis)}": str(index) for axis, index in shown.position.items()}
        figures.append(figure([trace], with_color_bar(layout, title), min_width=width, **when, **position))
    return figures


def _cell_text(cell: HeatCell) -> str:
    """Return the text of a cell. Empty if the cell has no result."""
    return "" if math.isnan(cell.mean) else "<br>".join(map(tick_text, filter(None, cell.lines)))


def _hover(cell: HeatCell) -> str:
    return "<br>".join(map(plain, filter(None, cell.hover)))


def columns_for(runs: Sequence[Run]) -> int:
    """Return how many columns a heat map of weights may have, so that the report does not become too large."""
    rows = sum(len({worker for record in run.history for worker in record.cohort}) for run in runs)
    return max(FEWEST_COLUMNS, min(MOST_COLUMNS, MOST_CELLS // max(rows, 1)))


def weights_heat_map(run: Run, columns: int = MOST_COLUMNS, /, **when: Any) -> dict[str, Any] | None:
    """Return a heat map of the aggregation weight of each worker in each round, or None without weights.

    If there are more than `columns` rounds, each column shows the mean over several rounds. `when`: menu choices for
    which the heat map is shown.
    """
    if not any(
        record.excluded or any(weight is not None for _, weight in record.weights_by_worker) for record in run.history
    ):
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
    positions = {"x": x, "y": _worker_labels(workers, run.partition)}
    z = [[column.get(worker) for column in weights] for worker in workers]
    traces = [cell_trace(z, f"{hover}weight %{{z:.4~g}}", gap, coloraxis="coloraxis", **positions)]
    if any(excluded):
        z = [[1 if worker in column else None for column in excluded] for worker in workers]
        color = {"colorscale": [[0, EXCLUDED], [1, EXCLUDED]], "showscale": False}
        traces.append(cell_trace(z, f"{hover}excluded", gap, **color, **positions))
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
        for worker, weight in record.weights_by_worker:
            cells.setdefault(worker, []).append(weight)
    return {worker: mean_or_none(weights, digits=4) for worker, weights in cells.items()}


def _mostly_excluded(records: Sequence[RoundRecord]) -> set[int]:
    took_part = Counter(worker for record in records for worker in {*record.cohort, *record.excluded})
    excluded = Counter(worker for record in records for worker in set(record.excluded))
    return {worker for worker, times in excluded.items() if 2 * times >= took_part[worker]}


def partition_heat_map(partition: StoredPartition, /, **when: Any) -> dict[str, Any] | None:
    """Return a heat map of the number of samples per worker and class, or None if it is unknown.

    For a task without classes, the figure has only the number of samples per worker.

    `when`: menu choices for which the heat map is shown.
    """
    counts = partition.counts
    if not any(counts):
        return None
    workers = list(range(len(counts))) if partition.workers is None else partition.workers
    byzantine = frozenset(partition.byzantine)
    few = len(workers) <= FEW_WORKERS
    names, labels = _worker_labels(workers, partition), list(map(str, range(len(counts[0]))))
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
    width, slanted = 26 * len(workers) + 140 if few else 0, {"tickangle": 45} if any(partition.names) else {}
    if len(labels) == 1:  # a task without classes
        bars = {"showlegend": False, "xaxis": _worker_axis(few, title, **slanted), "yaxis": axis("samples")}
        return figure([{**sums, "yaxis": "y"}], bars, min_width=width, **when)
    layout = {
        "height": min(24 * len(labels), 480) + 170 + 5 * max(map(len, names)) * len(slanted),
        "bargap": 0.15,
        "showlegend": False,
        "coloraxis": {"cmin": 0, "cmax": max(map(max, counts))},
        "xaxis": _worker_axis(few, title, anchor="y", **slanted),
        "yaxis": axis("label", type="category", autorange="reversed", domain=[0, 0.78], showgrid=False, zeroline=False),
        "yaxis2": axis("samples", domain=[0.82, 1], nticks=3, automargin=True),
    }
    return figure([cells, sums], with_color_bar(layout, "samples"), min_width=width, **when)


def _worker_labels(workers: Sequence[int], partition: StoredPartition) -> list[str]:
    byzantine = set(partition.byzantine)
    return [plain(called(worker, partition.names)) + " (B)" * (worker in byzantine) for worker in workers]


def _worker_axis(few: bool, title: str = "worker", **more: Any) -> dict[str, Any]:
    every = {"dtick": 1} if few else {}  # shows a label for each worker
    return axis(title, type="category", showgrid=False, zeroline=False, **every, **more)


def _phases_of(records: Sequence[RoundRecord]) -> list[str]:
    return list(dict.fromkeys(phase for record in records for phase in record.seconds))


def run_time(run: Run) -> dict[str, Any]:
    """Return a chart over the rounds that shows how many seconds each phase of a round takes."""
    traces: list[dict[str, Any]] = []
    for phase in _phases_of(run.history):
        seconds = [rounded(record.seconds.get(phase), "s") for record in run.history]
        bars = len(run.history) <= FEW_ROUNDS
        kind = {"type": "bar"} if bars else {"type": "scatter", "mode": "none", "stackgroup": "phases"}
        x = [record.round for record in run.history]
        traces.append({**kind, "name": plain(phase.replace("_", " ")), "x": x, "y": seconds})
    rounds = round_axis(run.history[0].round, run.history[-1].round)
    return _time_figure(traces, 320, "x", xaxis=rounds, yaxis=value_axis("seconds of a round", "s", rangemode="tozero"))


def time_by_run(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a bar chart of the mean seconds per phase of a round, with one bar for each table row."""
    traces, names = [], [name_of_values(row.point.values()) for row in rows]
    records = [records_of(row.runs) for row in rows]
    for phase in _phases_of([record for of_row in records for record in of_row]):
        means = [rounded(mean_or_none(record.seconds.get(phase) for record in of_row), "s") for of_row in records]
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
    """Return a chart of the workers' test results, from lowest to highest, with one line for each tested model.

    If there are few workers and they have names, each worker is one row of the chart.
    """
    n, traces, labels = len(results.workers), [], list(map(plain, results.labels))
    in_rows = bool(results.names) and n <= FEW_WORKERS
    for model, values in results.scores.items():
        order = sorted(range(n), key=values.__getitem__)
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers" if n <= 100 else "lines",
            "name": LABELS[model],
            "x": [100 * (position + 0.5) / n for position in range(n)],
            "y": [round(values[i], 4) for i in order],
            "customdata": [[labels[i], results.samples[i]] for i in order],
            "hovertemplate": "worker %{customdata[0]}, %{customdata[1]} samples<br>%{y}",
            "line": {"color": PALETTE[list(LABELS).index(model)]},
        }
        if in_rows:
            hover = "worker %{y}, %{customdata[1]} samples<br>%{x}"
            positions = {"x": trace["y"], "y": [labels[i] for i in order], "hovertemplate": hover}
            trace |= {**positions, "mode": "markers", "marker": {"size": 9}}
        traces.append(trace)
    if in_rows:
        scores = results.scores[results.used]
        rows = [labels[i] for i in sorted(range(n), key=scores.__getitem__)]
        ordered: dict[str, Any] = {"categoryorder": "array", "categoryarray": rows, "autorange": "reversed"}
        layout = {
            "height": 22 * n + 130,
            "xaxis": axis(f"{results.score_name} after round {results.round}"),
            "yaxis": _worker_axis(True, **ordered),
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        }
        return figure(traces, layout)
    layout = {
        "height": 340,
        "xaxis": axis("percent of workers", range=[0, 100]),
        "yaxis": axis(f"{results.score_name} after round {results.round}", rangemode="tozero"),
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return figure(traces, layout)


def timeline_chart(shown: Timeline) -> dict[str, Any]:
    """Return a chart of what the workers of a run do over virtual time, or of the lost updates of a race."""
    labels, traces = [row[0] for row in shown.table], list[dict[str, Any]]()
    stale = max((spell.staleness for spell in shown.spells), default=0.0)
    for does, marker in SPELLS.items():
        if not (spells := [spell for spell in shown.spells if spell.does == does]):
            continue
        texts = [f"{plain(labels[spell.row])}, {spell.text}: {does}" for spell in spells]
        if does == TRAINS and stale:  # plotly's own colour scales log a warning for each bar
            texts = [f"{text}, staleness {spell.staleness:.3g}" for text, spell in zip(texts, spells, strict=True)]
            marker = {"color": [_shade(spell.staleness / stale) for spell in spells]}
            traces.append({"type": "scatter", "x": [None], "y": [None], "mode": "markers", "showlegend": False})
            traces[-1]["marker"] = {"color": [0], "coloraxis": "coloraxis"}  # for the colour bar
        bar: dict[str, Any] = {"type": "bar", "orientation": "h", "width": 0.8, "name": does, "marker": marker}
        bar |= {"base": [rounded(spell.start, "s") for spell in spells], "y": [spell.row for spell in spells]}
        bar |= {"x": [rounded(spell.length, "s") for spell in spells], "customdata": texts}
        traces.append({**bar, "hovertemplate": "%{customdata}<extra></extra>"})
    layout = {
        "height": 20 * len(labels) + 150,
        "barmode": "overlay",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
        "coloraxis": {"colorscale": [[k / 2, color] for k, color in enumerate(STALENESS)], "cmin": 0, "cmax": stale},
        "xaxis": axis(shown.x_text, range=[0, shown.ends[-1]]),
        "yaxis": label_axis(shown.y_text, labels, autorange="reversed"),
    }
    return figure(traces, with_color_bar(layout, "staleness"), min_width=544)


def _shade(share: float) -> str:
    """Return the colour at a position from 0 to 1 of the scale of staleness."""
    channels = zip(*([int(color[place : place + 2], 16) for place in (1, 3, 5)] for color in STALENESS), strict=True)
    return "#" + "".join(f"{round(float(np.interp(share, (0, 0.5, 1), channel))):02x}" for channel in channels)


# -- Parts of plotly figures


def figure(data: list[dict[str, Any]], layout: dict[str, Any], min_width: int = 0, **when: Any) -> dict[str, Any]:
    """Return a figure for the HTML report.

    Args:
        data: plotly traces.
        layout: plotly layout without a template.
        min_width: minimum width in pixels. On narrower screens, the figure can be scrolled.
        when: menu choices for which the figure is shown.
    """
    return {"when": when, "data": data, "layout": layout, "min_width": min_width}


def template(text: str, lines: str, background: str, ramp: Sequence[str]) -> dict[str, Any]:
    """Return a plotly template with the given colours.

    Args:
        text: colour of texts, also on heat maps.
        lines: colour of axes, grid lines and borders.
        background: background colour of the text that appears under the mouse.
        ramp: colour scale of heat maps, from low to high values. `text` is readable on each colour: its contrast is at
            least 4.5 (WCAG 2.2, level AA).
    """
    axis = {"automargin": True, "gridcolor": lines, "linecolor": lines, "zerolinecolor": lines}
    clear = "rgba(0, 0, 0, 0)"
    position = {"orientation": "h", "len": 0.4, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "ypad": 4}
    bar = {**position, "thickness": 8, "outlinewidth": 0, "nticks": 4, "tickfont": {"size": 11}}
    layout = {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": text},
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "colorway": PALETTE,
        "coloraxis": {"colorscale": [[i / (len(ramp) - 1), color] for i, color in enumerate(ramp)], "colorbar": bar},
        "hoverlabel": {"bgcolor": background, "bordercolor": lines, "font": {"color": text}, "namelength": -1},
        "margin": {"l": 48, "r": 12, "t": 30, "b": 40},
        "modebar": {"bgcolor": clear, "color": text},
        "xaxis": axis,
        "yaxis": axis,
    }
    return {"layout": layout, "data": {"heatmap": [{"textfont": {"color": text}}]}}


TEMPLATES = {
    "light": template("#1c2430", "#dde2e9", "#ffffff", ["#e9f0fa", "#a3c3ee", "#6499e6"]),
    "dark": template("#e4e8ee", "#323b48", "#1a2029", ["#222b38", "#294d7d", "#2f67b1"]),
}


def plain(text: object) -> str:
    """Return the text so that plotly shows it unchanged, without interpreting HTML tags and formulas."""
    return html.escape(str(text), quote=False).replace("$", "&#36;")


def tick_text(text: str) -> str:
    """Return the label of an axis tick, shortened if it is long."""
    return plain(text if len(text) <= LONGEST_TICK else f"{text[: LONGEST_TICK - 1]}…")


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return the plotly settings of an axis with a title. `more` are additional settings."""
    return {"title": {"text": plain(title), "standoff": 8}, **more}


def round_axis(first: int, last: int, title: str = "round", **more: Any) -> dict[str, Any]:
    """Return the plotly settings of an axis that shows rounds, with ticks at whole numbers."""
    ticks = {"dtick": 1} if last - first <= 12 else {}
    return axis(title, rangemode="nonnegative", unifiedhovertitle={"text": "round %{x}"}, **ticks, **more)


def value_axis(title: str, unit: str, **more: Any) -> dict[str, Any]:
    """Return the plotly settings of an axis that shows numbers. `unit` is "s" (seconds), "B" (bytes) or ""."""
    formats = {
        "s": {"ticksuffix": " s", "hoverformat": ".3g", "tickformat": "~g"},
        "B": {"ticksuffix": "B", "hoverformat": ".4s", "tickformat": "~s"},
    }
    return axis(title, **formats.get(unit, {"hoverformat": ".6~g"}), **more)


def label_axis(title: str, labels: Iterable[str], **more: Any) -> dict[str, Any]:
    """Return the plotly settings of an axis with text labels at 0, 1, 2, ..."""
    texts = [tick_text(label) for label in labels]
    ticks = {"tickmode": "array", "tickvals": list(range(len(texts))), "ticktext": texts}
    return axis(title, showgrid=False, zeroline=False, **ticks, **more)


def cell_trace(z: Sequence[Sequence[float | None]], hover: str, gap: int, **more: Any) -> dict[str, Any]:
    """Return the plotly trace of a heat map.

    Args:
        z: values of the cells, indexed [row][column]. None leaves a cell empty.
        hover: plotly template of the text that appears when the mouse is over a cell.
        gap: pixels between two cells.
        more: additional plotly settings.
    """
    hidden = {"hoverongaps": False, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "heatmap", "z": z, "xgap": gap, "ygap": gap, **hidden, **more}


def with_color_bar(layout: dict[str, Any], title: str) -> dict[str, Any]:
    """Return the layout with a titled colour bar above the chart."""
    bar = {"title": {"text": plain(title), "side": "right"}}
    return {**layout, "coloraxis": {**layout["coloraxis"], "colorbar": bar}, "margin": {"t": 64}}


def rounded(value: float | None, unit: str = "") -> float | None:
    """Return a number rounded for plotting. Numbers with a unit keep more digits."""
    if value is None or isinstance(value, int):
        return value
    return float(fmt.number(value)) if unit == "" else float(f"{value:.8g}")
