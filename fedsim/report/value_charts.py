"""The compared number against the values of a setting, and from which value on the target is missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsim.core.plotting import far_apart
from fedsim.records import formatting as fmt
from fedsim.records.combinations import Combination
from fedsim.records.value_curves import numeric_axes, value_curves
from fedsim.report.curves import line_figure, mean_traces
from fedsim.report.figure import plain, value_axis


def value_charts(
    combined: Sequence[Combination], axes: Mapping[str, Sequence[Any]], compared: Sequence[str]
) -> list[dict[str, Any]]:
    """A figure for each compared axis of numbers: a line for each combination of the values on the others."""
    figures = []
    for key in numeric_axes(axes, compared):
        axis, traces = compared.index(key), []
        for curve in value_curves(combined, axis, dict(enumerate(axes[key]))):
            others = {index: each for index, each in enumerate(curve.combinations[0].place) if index != axis}
            name = " · ".join(fmt.label(axes[compared[index]][each]) for index, each in others.items())
            metric = curve.combinations[0].metric
            traces += mean_traces(curve.mean, metric, name or metric.label.lower(), others)
        figures.append(
            line_figure(traces, _axis(key, axes[key]), value_axis(metric.label, metric.unit), {"against": key})
        )
    return figures


def _axis(key: str, values: Sequence[float]) -> dict[str, Any]:
    """An axis with ticks at the values."""
    title, ticks = fmt.key_name(key), {"tickmode": "array", "tickvals": list(values)}
    labels = [plain(fmt.label(value)) for value in values]
    hover = {"text": f"{plain(title)} %{{x}}"}
    scale = "log" if far_apart(values) else "linear"
    return value_axis(title, "", type=scale, **ticks, ticktext=labels, unifiedhovertitle=hover)
