"""Draw the figures of one run with matplotlib: accuracy and losses over the rounds, and the workers' test results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.core.plotting import line_style, prepare_axes
from fedsim.errors import plural
from fedsim.records.formatting import score_text
from fedsim.records.record import RoundRecord, score_in
from fedsim.records.worker_results import LABELS, WorkerResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 40  # maximum number of named workers that have a row each


def draw_curve(history: Sequence[RoundRecord], title: str) -> Figure:
    """Return a figure of accuracy and losses over the rounds and, if there is a virtual clock, over virtual time."""
    from fedsim.core.figure import Figure

    def numbers(key: str) -> list[Any]:
        return [record[key] for record in history]

    rounds, times, score = numbers("round"), numbers("virtual_seconds"), score_in(history)
    timed = times[-1] is not None
    shown = [quantity for quantity in ("accuracy", "loss") if numbers(f"test_{quantity}")[-1] is not None]
    panels = len(shown) + timed
    figure = Figure(figsize=(max(6, (4.25 if panels < 3 else 4) * panels), 3.4), layout="constrained")
    figure.suptitle(f"{title}: {score_text(history[-1])} after {plural(rounds[-1], 'round')}", fontsize="medium")
    panels_of_figure = figure.subplots(1, panels, squeeze=False)[0]
    for axes, quantity in zip(panels_of_figure, shown, strict=False):
        for index, split in enumerate(("test", "train", "validation", "worker")):
            known = [(record.round, record.get(f"{split}_{quantity}")) for record in history]
            if points := [point for point in known if point[1] is not None]:  # workers are not tested in every round
                axes.plot(*zip(*points, strict=True), **line_style(index, len(points)), label=split)
        prepare_axes(axes, whole_numbers=True)
        axes.set(xlabel="round", ylabel="loss" if quantity == "loss" else "test accuracy")
        if len(axes.lines) > 1:
            axes.legend(fontsize="small")
    if timed:
        axes = panels_of_figure[-1]
        axes.plot(times, numbers(score.key), **line_style(0, len(rounds)))
        prepare_axes(axes, whole_numbers=False)
        axes.set(xlabel="virtual seconds", ylabel=score.label.lower())
    for axes in panels_of_figure:
        if axes.get_ylabel() == "test accuracy":
            axes.set(ylim=(None, 1))
    return figure


def _draw_rows(axes: Axes, results: WorkerResults) -> None:
    """Draw the test results of named workers, one row for each worker, the lowest value at the top."""
    order = sorted(range(len(results.workers)), key=results.scores[results.used].__getitem__)
    for model, values in results.scores.items():
        style = {**line_style(list(LABELS).index(model), 1), "linestyle": "none", "marker": "o"}
        label = f"{LABELS[model]}, mean {np.mean(values):.3f}"
        axes.plot([values[position] for position in order], range(len(order)), **style, label=label)
    axes.set_yticks(
        range(len(order)), [results.labels[position] for position in order], parse_math=False, fontsize="small"
    )
    axes.set(xlabel=results.score_name, ylabel="worker", ylim=(len(order) - 0.5, -0.5))
    axes.grid(axis="x", alpha=0.3)
    axes.figure.legend(loc="outside lower center", fontsize="small")


def draw_workers(results: WorkerResults, title: str) -> Figure:
    """Return a figure of the workers' test results, from lowest to highest, with one line for each tested model.

    If there are at most MOST_ROWS workers and they have names, each worker is one row of the figure.
    """
    from fedsim.core.figure import Figure

    in_rows = bool(results.names) and len(results.workers) <= MOST_ROWS
    figure = Figure(figsize=(6, 2.4 + 0.24 * len(results.workers) if in_rows else 3.6), layout="constrained")
    heading = f"{results.score_name} on the workers' own test samples"
    figure.suptitle(f"{title}\n{heading}, round {results.round}", fontsize="medium")
    axes = figure.subplots()
    n = len(results.workers)
    if in_rows:
        _draw_rows(axes, results)
        return figure
    share = 100 * (np.arange(n) + 0.5) / n
    for model, values in results.scores.items():
        label = f"{LABELS[model]}, mean {np.mean(values):.3f}"
        axes.plot(share, np.sort(values), **line_style(list(LABELS).index(model), n), label=label)
    prepare_axes(axes, whole_numbers=False)
    axes.set(xlabel="percent of workers", ylabel=results.score_name, xlim=(0, 100))
    if results.accuracy:
        axes.set(ylim=(None, 1.01))
    axes.legend(fontsize="small")
    return figure
