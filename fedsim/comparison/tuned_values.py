"""The figure of the choices along the axis `tune` of a comparison."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedsim.comparison.results import Comparison
from fedsim.core.plotting import line_style, mark_values
from fedsim.records.axes import label
from fedsim.records.formatting import key_name
from fedsim.records.rows import validation_result
from fedsim.records.value_curves import is_numeric

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_tuning(comparison: Comparison) -> Figure | None:
    """Draw the validation result against the tuned value, a line for each combination; None without results.

    Larger marks are the chosen values. A value of which a run failed, diverged or has no result has no mark.
    """
    from matplotlib.figure import Figure

    settings, tuned = comparison.settings, comparison.choices
    assert settings.tune is not None
    values = comparison.axes[settings.tune]
    places = {label(value): value if is_numeric(values) else index for index, value in enumerate(values)}
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes, metric = figure.subplots(), None
    for index, choice in enumerate(tuned):
        style = line_style(index)
        points = []
        for each in choice.candidates:
            counted = settings.validated(each)
            value = validation_result(counted)
            if value is None or not counted.is_complete(value):
                continue
            metric = each.metric
            x = places[label(counted.runs[0].point[settings.tune])]
            points.append((x, value.mean))
            if each is choice.chosen:
                axes.plot(x, value.mean, "o", color=style["color"], markersize=9)
        point = choice.chosen.runs[0].point
        name = ", ".join(label(point[key]) for key in comparison.compared) or comparison.name
        axes.plot(*zip(*sorted(points), strict=True) if points else ([], []), label=name, **style)
    if metric is None:
        return None
    mark_values(axes, places)
    worst = f", worst {settings.worst}" if settings.worst else ""
    axes.set(xlabel=key_name(settings.tune), ylabel=metric.label.replace("Test", "Validation").lower() + worst)
    axes.grid(alpha=0.3)
    figure.suptitle(f"Tuning of the {key_name(settings.tune)}\n{comparison.name}", fontsize="small")
    columns = math.ceil(len(tuned) / 20)
    figure.legend(loc="outside right center", fontsize="x-small", ncols=columns, handlelength=3)
    return figure
