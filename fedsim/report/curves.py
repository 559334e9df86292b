"""Curves of metrics against rounds, virtual seconds, updates or arrivals, and the time of each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.core.confidence import FEWEST_FOR_BAND, LOG_FROM
from fedsim.records.numbers import mean_or_none
from fedsim.records.reader import Run
from fedsim.records.record import METRICS, Metric, RoundRecord, metrics_in
from fedsim.records.rows import MeanCurve, Row, mean_curve
from fedsim.report.figure import FEW_ROUNDS, figure, label_axis, plain, round_axis, rounded, value_axis

ROUNDS = "round"
SCALES = {"virtual_seconds": "virtual seconds", "updates": "updates", "arrivals": "arrivals"}  # fields of `Progress`
PARTS = {"total_seconds": ("seconds",), "total_bytes": ("bytes_up", "bytes_down")}  # fields that add up to a metric
BOTH_LOSSES = ("test_loss", "train_loss")


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
    """The scales beside rounds, as fields of `Progress`; none if all runs are synchronous and without a clock."""
    if all(record.virtual_seconds is None and record.asynchronous is None for record in records_of(runs)):
        return []
    return [scale for scale in SCALES if any(getattr(each, scale) is not None for run in runs for each in run.progress)]


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
    figures = []
    for scale in (ROUNDS, *scales_of([run])):
        places = [rounded(getattr(each, scale), "s") for each in run.progress]
        for chart in charts_of([run], parts=True):
            traces = []
            for metric in chart.lines:
                values = [rounded(metric.read(record), metric.unit) for record in run.history]
                traces.append(_line(line_name(metric), places, values))
            figures.append(_curve_figure(chart, scale, traces, (run.history[0].round, run.history[-1].round)))
    return figures


def grid_curves(combined: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
    """One figure per chart and scale of a grid: for each combination its mean and the spread over the seeds.

    Args:
        combined: the combinations; the page filters them by their `place`.
        names: of the combinations.
    """
    begun = [run for combination in combined for run in combination.runs if run.history]
    figures = []
    for scale in (ROUNDS, *scales_of(begun)):
        for chart in charts_of(begun):
            traces = []
            for combination, name in zip(combined, names, strict=True):
                for metric in chart.lines:
                    line = name if len(chart.lines) == 1 else f"{name} · {metric.label.lower().removesuffix(' loss')}"
                    mean = mean_curve(combination.runs, metric, scale)
                    traces += mean_traces(mean, metric, line, dict(enumerate(combination.place)))
            last = max(run.history[-1].round for run in begun)
            figures.append(_curve_figure(chart, scale, traces, (begun[0].history[0].round, last)))
    return figures


def mean_traces(mean: MeanCurve | None, metric: Metric, name: str, place: Mapping[int, int]) -> list[dict[str, Any]]:
    """The line of a mean over the seeds, and before it its spread: a band, or a thin line for each of a few seeds.

    Args:
        mean: None of a line without points.
        metric: whose mean it is.
        name: of the line.
        place: the place of its values on the axes, by number of the axis, for which the page shows it.
    """
    if mean is None:
        return []
    meta = {f"axis{index}": str(value) for index, value in place.items()}
    x = [rounded(each, "s") for each in mean.x.tolist()]
    line = _line(name, x, [rounded(each, metric.unit) for each in mean.means.tolist()])
    line |= {"meta": meta, "customdata": _spread_texts(mean), "hovertemplate": "%{y}%{customdata}"}
    if len(mean.curves) == 1:
        return [line]
    spread = {
        "type": "scatter",
        "mode": "lines",
        "legendgroup": line["legendgroup"],
        "showlegend": False,
        "hoverinfo": "skip",
        "meta": {**meta, "spread": "shown"},
    }
    if len(mean.curves) >= FEWEST_FOR_BAND:
        return [{**spread, **_band(mean, metric.share), "opacity": 0.15, "line": {"width": 0}}, line]
    seeds = [{"x": x.tolist(), "y": [rounded(value, metric.unit) for value in y.tolist()]} for x, y in mean.curves]
    return [*({**spread, **seed, "opacity": 0.45, "line": {"width": 1}} for seed in seeds), line]


def _spread_texts(mean: MeanCurve) -> list[str]:
    """The spread over the seeds at each point."""
    if len(mean.values) == 1:
        return [""] * mean.values.shape[1]
    if len(mean.values) == 2:
        return [f" ({rounded(first):.4f}, {rounded(second):.4f})" for first, second in mean.values.T.tolist()]
    return [f" ± {half:.4f} ({len(mean.values)} seeds)" for half in mean.half_widths.tolist()]


def _band(mean: MeanCurve, share: bool) -> dict[str, Any]:
    """The outline of mean ± half width. A share does not exceed 1; the band of positive means ends above 0."""
    x, low, high = mean.x, mean.means - mean.half_widths, mean.means + mean.half_widths
    if share:
        high = np.minimum(high, 1)
    if mean.means.min() >= 0:
        low = np.maximum(low, mean.means.min() / 100)  # a logarithmic axis has no 0
    outline = zip(np.concatenate([x, x[::-1]]).tolist(), np.concatenate([high, low[::-1]]).tolist(), strict=True)
    xs, ys = zip(*((rounded(a, "s"), rounded(b, "s")) for a, b in outline), strict=True)
    return {"x": xs, "y": ys, "fill": "toself"}


def _line(name: str, places: Sequence[float | None], values: list[float | None]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(values) <= FEW_ROUNDS else "lines",
        "name": plain(name),
        "legendgroup": plain(name),
        "x": places,
        "y": values,
        "line": {"width": 2},
        "marker": {"size": 5},
        "hovertemplate": "%{y}",
    }


def _curve_figure(chart: Chart, scale: str, traces: list[dict[str, Any]], rounds: tuple[int, int]) -> dict[str, Any]:
    if scale == ROUNDS:
        x_axis = round_axis(*rounds)
    else:
        ends = [end for trace in traces if trace.get("name") and (end := trace["x"][-1])]
        log = ends and max(ends) >= LOG_FROM * min(ends)
        kind = {"type": "log"} if log else {"type": "linear", "rangemode": "nonnegative"}
        title = SCALES[scale]
        x_axis = value_axis(title, "", **kind, unifiedhovertitle={"text": f"{title} %{{x:.4~g}}"})
    y_axis = value_axis(chart.label, chart.lines[0].unit)
    return line_figure(traces, x_axis, y_axis, {"metric": chart.label, "scale": scale})


def line_figure(
    traces: list[dict[str, Any]],
    x_axis: dict[str, Any],
    y_axis: dict[str, Any],
    when: dict[str, Any],
    lines: str = "all",
) -> dict[str, Any]:
    """A figure of lines with a legend below.

    Args:
        traces: of the lines.
        x_axis: of the figure.
        y_axis: of the figure.
        when: the choices for which the page shows it.
        lines: what the lines are; a hidden one is hidden in all figures of the same.
    """
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


def grid_time(combined: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The mean seconds of each phase: one bar per combination, the first on top."""
    traces = []
    records = [records_of(combination.runs) for combination in combined]
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
