"""The choices along the axis `tune` of a comparison: the file `tuning.csv` and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsim.comparison.grid import Grid
from fedsim.core.plotting import line_style, mark_values
from fedsim.records.axes import label
from fedsim.records.comparison_settings import Choice, validation_result
from fedsim.records.formatting import key_name
from fedsim.records.value_curves import is_numeric
from fedsim.system.files import to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tuning_csv(grid: Grid, tuned: Sequence[Choice]) -> str:
    """Return one row per combination and value: the validation result, and whether the value was chosen.

    With an axis `worst`, the validation result is that of the worst case, which is named.
    """
    settings = grid.settings
    head = [*grid.compared, *settings.headings, "validation", "validation_ci95", "failed", "chosen"]
    rows: list[list[Any]] = [head]
    for choice in tuned:
        for each in choice.candidates:
            counted = settings.validated(each)
            value, point = validation_result(counted), counted.runs[0].point
            cells: list[Any] = [label(point[key]) for key in (*grid.compared, *settings.headings)]
            cells += [value.mean, value.half_width if value.n > 1 else None] if value else [None, None]
            failed = sum(not run.finished for run in each.runs)
            rows.append([*cells, failed, "yes" if each is choice.chosen and choice.decided else ""])
    return to_csv(rows)


def draw_tuning(grid: Grid, tuned: Sequence[Choice]) -> Figure | None:
    """Draw the validation result against the tuned value, a line for each combination; None without results.

    Larger marks are the chosen values. A value of which a run failed, diverged or has no result has no mark.
    """
    from matplotlib.figure import Figure

    assert grid.settings.tune is not None
    values = grid.axes[grid.settings.tune]
    places = {label(value): value if is_numeric(values) else index for index, value in enumerate(values)}
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes, metric = figure.subplots(), None
    for index, choice in enumerate(tuned):
        style = line_style(index)
        points = []
        for each in choice.candidates:
            counted = grid.settings.validated(each)
            value = validation_result(counted)
            if value is None or not counted.is_complete(value):
                continue
            metric = each.metric
            x = places[label(counted.runs[0].point[grid.settings.tune])]
            points.append((x, value.mean))
            if each is choice.chosen:
                axes.plot(x, value.mean, "o", color=style["color"], markersize=9)
        point = choice.chosen.runs[0].point
        name = ", ".join(label(point[key]) for key in grid.compared) or grid.name
        axes.plot(*zip(*sorted(points), strict=True) if points else ([], []), label=name, **style)
    if metric is None:
        return None
    mark_values(axes, places)
    worst = f", worst {grid.settings.worst}" if grid.settings.worst else ""
    axes.set(xlabel=key_name(grid.settings.tune), ylabel=metric.label.replace("Test", "Validation").lower() + worst)
    axes.grid(alpha=0.3)
    figure.suptitle(f"Tuning of the {key_name(grid.settings.tune)}\n{grid.name}", fontsize="small")
    columns = math.ceil(len(tuned) / 20)
    figure.legend(loc="outside right center", fontsize="x-small", ncols=columns, handlelength=3)
    return figure
