"""Grids whose runs were never run, with results as a test wants them."""

from __future__ import annotations

from collections.abc import Callable

import fedsim
from fedsim.comparison.grid import Grid, PlannedRun, points_of
from fedsim.comparison.results import RunResult


def grid_of(axes: dict, target: float | None = None) -> Grid:
    """A grid with these axes; what its experiments are does not matter."""
    runs = [PlannedRun(f"run{index}", point, fedsim.Experiment()) for index, point in enumerate(points_of(axes))]
    return Grid("made_up", axes, runs, False, target)


def results_of(grid: Grid, accuracies: Callable[[dict], list[float] | None]) -> list[RunResult]:
    """Results with the accuracies of each round that `accuracies(point)` gives; None: the run failed."""
    results = []
    for run in grid.runs:
        values = accuracies(run.point)
        history = [record(round, value) for round, value in enumerate(values or [], start=1)]
        error = "worker 1 in round 2 failed: no" if values is None else None
        results.append(RunResult(run.id, run.point, run.experiment, history, error, None))
    return results


def on_the_clock(results: list[RunResult], seconds: Callable[[dict], float]) -> list[RunResult]:
    """The same results of runs on a virtual clock, on which each round took `seconds(point)`.

    Every round has two updates of staleness 1 and four trips.
    """
    for run in results:
        for record in run.history:
            round = record["round"]
            record["virtual_seconds"] = round * seconds(run.point)
            told = {"updates": 2 * round, "trips": 4 * round, "staleness": {"1": 2}, "held": 0, "wasted": 0}
            record["asynchronous"] = told
    return results


def record(round: int, accuracy: float) -> dict:
    return {
        "round": round,
        "test_accuracy": accuracy,
        "test_loss": 1 - accuracy,
        "train_loss": 0.5,
        "seconds": {"train": 1.0, "test": 0.5},
        "cohort": [0],
        "bytes_up": 0,
        "bytes_down": 0,
    }
