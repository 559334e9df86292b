"""The curves and heat maps of the page as plotly figures: of one run, and of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedsim.core.confidence import FEWEST_FOR_BAND, LOG_FROM
from fedsim.core.plotting import far_apart
from fedsim.records import formatting as fmt
from fedsim.records.combinations import Combination, MeanCurve, score_of
from fedsim.records.figures import (
    ComparedRows,
    HeatCell,
    HeatMap,
    Line,
    LineChart,
    best_cell,
    curves,
    curves_along,
    heat_maps,
    number_cell,
)
from fedsim.records.metric import Metric
from fedsim.records.progress import SCALES
from fedsim.records.reader import Run
from fedsim.records.record import METRICS, RoundRecord, metrics_in
from fedsim.records.run_metrics import best_score
from fedsim.records.value_curves import numeric_axes
from fedsim.report.figure import (
    FEW_ROUNDS,
    cell_trace,
    figure,
    label_axis,
    plain,
    round_axis,
    rounded,
    tick_text,
    value_axis,
    with_color_bar,
)

ROUNDS = "round"
ON_CLOCK = ("virtual_seconds", "updates", "arrivals")  # scales beside rounds
PARTS = {"total_seconds": ("seconds",), "total_bytes": ("bytes_up", "bytes_down")}  # fields that add up to a metric
BOTH_LOSSES = ("test_loss", "train_loss")
LAST_ROUND_ONLY = ("total_seconds", "total_bytes")  # metrics whose final value says nothing of the run


@dataclass(frozen=True)
class Chart:
    """A choice of the menu "Metric": the lines of one metric, or of several."""

    label: str
    lines: tuple[Metric, ...]


def records_of(runs: Sequence[Run]) -> list[RoundRecord]:
    """Return the records of all runs."""
    return [record for run in runs for record in run.history]


def charts_of(runs: Sequence[Run], parts: bool = False) -> list[Chart]:
    """The charts of all metrics that the runs hold; `parts` adds the parts of sums, such as the phases."""
    found = metrics_in(records_of(runs))
    charts = []
    for metric in [metric for metric in found if metric.chart] or METRICS[:1]:
        summands = [part for part in found if parts and part.path[0] in PARTS.get(metric.key, ())]
        charts.append(Chart(metric.label, (metric, *summands)))
    losses = tuple(metric for metric in found if metric.key in BOTH_LOSSES)
    if len(losses) == len(BOTH_LOSSES):
        place = next(index for index, chart in enumerate(charts) if chart.lines[0] == losses[-1])
        charts.insert(place + 1, Chart("Test and train loss", losses))
    return charts


def scales_of(runs: Sequence[Run]) -> list[str]:
    """The scales beside rounds; none if all runs are synchronous and without a clock."""
    if all(record.virtual_seconds is None and record.asynchronous is None for record in records_of(runs)):
        return []
    return [scale for scale in ON_CLOCK if any(getattr(at, scale) is not None for run in runs for at in run.progress)]


def scale_choices(runs: Sequence[Run]) -> list[tuple[str, str, bool]]:
    """Return (value, text, whether selected) for the menu of scales; no choices if there are only rounds.

    Virtual seconds are selected if all runs have them, else rounds.
    """
    timed = all(run.progress[-1].virtual_seconds is not None for run in runs)
    found = [(scale, SCALES[scale], timed and scale == "virtual_seconds") for scale in scales_of(runs)]
    return [(ROUNDS, "rounds", not timed), *found] if found else []


def line_name(metric: Metric) -> str:
    """The label of a metric within a line of text; a number of a plug keeps its name."""
    return metric.label if metric.path[0] == "metrics" else metric.label.lower().replace("_", " ")


def run_curves(run: Run) -> list[dict[str, Any]]:
    """One figure per chart and scale of a run."""
    table = ComparedRows(run.name, {}, [], [Combination((), [run], score_of([run]))])
    return _all_curves(table, charts_of([run], parts=True), lambda chart, line: line_name(line.metric))


def grid_curves(table: ComparedRows) -> list[dict[str, Any]]:
    """One figure per chart and scale of a comparison: for each combination its mean and the spread over the seeds."""

    def name_of(chart: Chart, line: Line) -> str:
        of = "" if len(chart.lines) == 1 else f" · {line.metric.label.lower().removesuffix(' loss')}"
        return name_on(line.point, table.compared) + of

    return _all_curves(table, charts_of(_begun(table)), name_of)


def name_on(point: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The values of a point on some axes."""
    return " · ".join(fmt.label(point[key]) for key in keys) or "all runs"


def _begun(table: ComparedRows) -> list[Run]:
    return [run for row in table.rows for run in row.runs if run.history]


def _all_curves(
    table: ComparedRows, charts: Sequence[Chart], name_of: Callable[[Chart, Line], str]
) -> list[dict[str, Any]]:
    begun, figures = _begun(table), []
    rounds = begun[0].history[0].round, max(run.history[-1].round for run in begun)
    for scale in (ROUNDS, *scales_of(begun)):
        for chart in charts:
            shown = curves(table, scale, chart.lines, begun=True)
            if scale == ROUNDS:
                x_axis = round_axis(*rounds)
            else:
                ends = [end for line in shown.lines if line.mean and (end := line.mean.x[-1])]
                log = ends and max(ends) >= LOG_FROM * min(ends)
                kind = {"type": "log"} if log else {"type": "linear", "rangemode": "nonnegative"}
                hover = {"text": f"{shown.x_text} %{{x:.4~g}}"}
                x_axis = value_axis(shown.x_text, "", **kind, unifiedhovertitle=hover)
            y_axis = value_axis(chart.label, chart.lines[0].unit)
            names = [name_of(chart, line) for line in shown.lines]
            figures.append(_line_figure(shown, names, x_axis, y_axis, metric=chart.label, scale=scale))
    return figures


def value_charts(table: ComparedRows) -> list[dict[str, Any]]:
    """A figure for each compared axis of numbers: a line for each combination of the values on the others."""
    figures = []
    for key in numeric_axes(table.axes, table.compared):
        shown, title = curves_along(table, key), fmt.key_name(key)
        ticks = {"tickmode": "array", "tickvals": shown.values}
        ticks["ticktext"] = [plain(fmt.label(value)) for value in shown.values]
        hover = {"text": f"{plain(title)} %{{x}}"}
        kind = "log" if far_apart(shown.values) else "linear"
        x_axis = value_axis(title, "", type=kind, **ticks, unifiedhovertitle=hover)
        names = [name_on(line.point, shown.keys) for line in shown.lines]
        y_axis = value_axis(table.metric.label, table.metric.unit)
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
    """A figure of lines with a legend below.

    Args:
        chart: the lines.
        names: of the lines.
        x_axis: of the figure.
        y_axis: of the figure.
        lines: what the lines are; a hidden one is hidden in all figures of the same.
        when: the choices for which the page shows it.
    """
    traces = [trace for line, name in zip(chart.lines, names, strict=True) for trace in _traces(chart, line, name)]
    for index, trace in enumerate(traces):
        trace["uid"] = f"line{index}"  # a hidden line stays hidden when other controls change
    layout = {
        "height": 430,
        "xaxis": x_axis,
        "yaxis": y_axis,
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.2, "uirevision": lines, "traceorder": "normal"},
        "uirevision": " ".join(when.values()),  # a zoom stays while these do
    }
    return figure(traces, layout, **when)


def _traces(chart: LineChart, line: Line, name: str) -> Iterator[dict[str, Any]]:
    """The spread over the seeds, a band or a thin line for each of a few seeds, and then the mean."""
    if (mean := line.mean) is None:
        return
    table, unit = chart.table, line.metric.unit
    common = {"type": "scatter", "legendgroup": plain(name)}
    meta = {f"axis{table.compared.index(key)}": str(table.position(line.point, key)) for key in chart.keys}
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
    return {"x": [rounded(each, "s") for each in x.tolist()], "y": [rounded(each, unit) for each in y.tolist()]}


def _outline(line: Line, mean: MeanCurve) -> dict[str, Any]:
    """The outline of a band, which ends above 0 if the means are positive: a logarithmic axis has no 0."""
    low, high = line.band
    if mean.means.min() >= 0:
        low = np.maximum(low, mean.means.min() / 100)
    return _points(np.concatenate([mean.x, mean.x[::-1]]), np.concatenate([high, low[::-1]]), "s")


def _spread_texts(mean: MeanCurve) -> list[str]:
    """The spread over the seeds at each point."""
    if len(mean.values) == 1:
        return [""] * mean.values.shape[1]
    if len(mean.values) == 2:
        return [f" ({rounded(first):.4f}, {rounded(second):.4f})" for first, second in mean.values.T.tolist()]
    return [f" ± {half:.4f} ({len(mean.values)} seeds)" for half in mean.half_widths.tolist()]


def final_heat_maps(table: ComparedRows, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return two axes against each other: one figure per final value and combination of the other axes.

    Args:
        table: the comparison.
        keys: the axes: down, across, and the others.
    """
    runs = [run for row in table.rows for run in row.finished]
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
        maps = heat_maps(table, keys[:2], keys[2:], partial(number_cell, read=read, decimals=decimals))
        figures += _heat_figures(
            table, keys, maps, title.lower(), [mean for each in maps for mean in each.means], value=title
        )
    return figures


def _final(metric: Metric, run: Run) -> float | None:
    return metric.read(run.history[-1])


def best_heat_maps(table: ComparedRows, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the best value of the first axis over two others: one figure per combination of the axes after these.

    Args:
        table: the comparison.
        keys: the axes: down, across, the first axis, and the others.
    """
    down, across, first, *beside = keys
    maps = heat_maps(table, (down, across), beside, partial(best_cell, axis=first, label=fmt.label))
    means = [row.score.mean for row in table.rows if row.score]
    return _heat_figures(table, keys, maps, table.metric.label.lower(), means)


def _heat_figures(
    table: ComparedRows, keys: Sequence[str], maps: Sequence[HeatMap], title: str, means: Sequence[float], **when: Any
) -> list[dict[str, Any]]:
    """The figures of heat maps over the first two of `keys`, whose colours show the `title` and have one scale."""
    limits = {"cmin": min(means), "cmax": max(means)} if means else {}
    rows, columns = ([fmt.label(value) for value in table.axes[key]] for key in keys[:2])
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
        width = max(110, 8 * max(len(line) for each in lines for line in each)) * len(columns) + 140
        place = {f"axis{keys.index(axis)}": str(index) for axis, index in shown.place.items()}
        figures.append(figure([trace], with_color_bar(layout, title), min_width=width, **when, **place))
    return figures


def _cell_text(cell: HeatCell) -> str:
    """The text in a cell; empty without a result."""
    return "" if math.isnan(cell.mean) else "<br>".join(map(tick_text, filter(None, cell.lines)))


def _hover(cell: HeatCell) -> str:
    return "<br>".join(map(plain, filter(None, cell.hover)))
