"""Grids with invented results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import fedsim
from fedsim.comparison import ComparisonSettings
from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.comparison.results import RunResult
from fedsim.records.record import AsyncRecord, RoundRecord


def grid_of(axes: dict, target: float | None = None) -> Grid:
    """Return a grid with these axes and default experiments."""
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    runs = [PlannedRun(f"run{index}", point, fedsim.Experiment()) for index, point in enumerate(points)]
    return Grid("made_up", axes, runs, False, ComparisonSettings(target=target))


def results_of(grid: Grid, accuracies: Callable[[dict], list[float] | None]) -> list[RunResult]:
    """Return results with the accuracies of each round that `accuracies(point)` gives; None: the run failed."""
    results = []
    for run in grid.runs:
        values = accuracies(run.point)
        history = [record(round, value) for round, value in enumerate(values or [], start=1)]
        error = "worker 1 in round 2 failed: no" if values is None else None
        results.append(RunResult(run.id, run.point, run.experiment, history, error, None, grid.settings.target))
    return results


def on_the_clock(results: list[RunResult], seconds: Callable[[dict], float]) -> list[RunResult]:
    """Return the results of runs on a virtual clock, on which each round took `seconds(point)`.

    Every round has two updates of staleness 1 and four arrivals.
    """
    for run in results:
        for index, record in enumerate(run.history):
            work = AsyncRecord(updates=2 * record.round, arrivals=4 * record.round, staleness={"1": 2})
            virtual_seconds = record.round * seconds(run.point)
            run.history[index] = replace(record, virtual_seconds=virtual_seconds, asynchronous=work)
    return results


def record(round: int, accuracy: float) -> RoundRecord:
    numbers = {"test_accuracy": accuracy, "test_loss": 1 - accuracy, "train_loss": 0.5}
    return RoundRecord(round=round, **numbers, seconds={"train": 1.0, "test": 0.5}, cohort=[0])
