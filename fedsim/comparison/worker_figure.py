"""The figure of the tests of single workers: their distribution for each combination of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsim.comparison.results import Comparison
from fedsim.core.plotting import COLOURS
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.records.axes import label
from fedsim.records.formatting import comparison_title
from fedsim.records.reader import Run
from fedsim.records.rows import Row
from fedsim.records.worker_results import LABELS, newest_table, read_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 100  # combinations that a figure shows
ROW = 0.22  # inches, of a model


def draw_worker_comparison(grid: Comparison, runs: Sequence[Run]) -> Figure | None:
    """Draw the last tests of the workers of all seeds, a row for each combination and model; None if there are none.

    A stroke is a worker, the bar the middle half of the workers, the dot their mean. Or losses, without accuracies.
    """
    from matplotlib.figure import Figure

    combined = grid.settings.combined(runs, list(grid.axes))
    tested = [(each, found) for each in combined if (found := _results(each))][:MOST_ROWS]
    if not tested:
        return None
    models = [model for model in LABELS if any(model in each.scores for _, found in tested for each in found)]
    figure = Figure(figsize=(7.5, 1.6 + ROW * len(tested) * (len(models) + 0.5)), layout="constrained")
    axes, names = figure.subplots(), []
    for place, (combination, found) in enumerate(tested):
        point = combination.runs[0].point
        names.append(", ".join(label(point[key]) for key in grid.compared) or grid.name)
        for index, model in enumerate(models):
            values = [value for each in found for value in each.scores.get(model, ())]
            if values:
                y, color = place + (index - (len(models) - 1) / 2) / (len(models) + 0.5), COLOURS[index + 1]
                axes.plot(values, [y] * len(values), "|", color=color, alpha=0.5, markersize=8)
                axes.plot(np.quantile(values, [0.25, 0.75]), [y, y], color=color, linewidth=5, alpha=0.4)
                axes.plot(np.mean(values), y, "o", color=color, markeredgecolor="white")
    for index, model in enumerate(models):
        axes.plot([], [], "o", color=COLOURS[index + 1], label=LABELS[model])
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set(xlabel=f"{tested[0][1][0].score_name} on the worker's own test samples", ylim=(len(names) - 0.5, -0.5))
    axes.grid(axis="x", alpha=0.3)
    for place in range(1, len(names)):
        axes.axhline(place - 0.5, color="black", alpha=0.15, linewidth=0.8)
    remark = "stroke: a worker, of any seed; bar: the middle half; dot: the mean"
    remark += f"; {grid.settings.remark}" if grid.settings.remark else ""
    title = comparison_title(grid.compared, "Single workers")
    figure.suptitle(f"{title}\n{grid.name}: {remark}", fontsize="small")
    figure.legend(loc="outside lower center", ncols=len(models), fontsize="small")
    return figure


def _results(combination: Row) -> list[WorkerResults]:
    """Return the newest table of workers of each finished run that has one."""
    folders = [(run.folder, len(run.history)) for run in combination.finished if run.folder is not None]
    tables = [newest_table(folder, rounds) for folder, rounds in folders]
    return [read_csv(table) for table in tables if table]
