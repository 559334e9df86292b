"""Comparisons with invented results."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fedsim
from fedsim.comparison import Comparison, ComparisonSettings, Run
from fedsim.comparison.rows import canonical
from fedsim.comparison.stored import positions_in
from fedsim.records.record import AsyncRecord, RoundRecord

EXPERIMENT = {**fedsim.Experiment().resolved(), "records": {}}  # writes no files


def comparison_of(axes: dict, target: float | None = None, **settings: Any) -> Comparison:
    """Return a comparison over these axes with default experiments, before any run has begun."""
    positions, runs = positions_in(axes), []
    for index, values in enumerate(itertools.product(*axes.values())):
        point = dict(zip(axes, values, strict=True))
        position = {axis: positions[axis][canonical(value)] for axis, value in point.items()}
        runs.append(Run(None, EXPERIMENT, [], id=f"run{index}", point=point, position=position, target=target))
    return Comparison("made_up", axes, runs, ComparisonSettings(target=target, **settings))


def results_of(plan: Comparison, accuracies: Callable[[dict], list[float] | None]) -> list[Run]:
    """Return runs whose test accuracies per round are `accuracies(point)`; None makes a failed run."""
    results = []
    for run in plan.runs:
        values = accuracies(run.point)
        history = [record(round, value) for round, value in enumerate(values or [], start=1)]
        failure = "worker 1 in round 2 failed: no" if values is None else None
        experiment = {**run.experiment, "rounds": len(history)}
        results.append(replace(run, experiment=experiment, history=history, failure=failure))
    return results


def in_last_round(comparison: Comparison, numbers: Callable[[Run], dict]) -> Comparison:
    """Set the fields `numbers(run)` in the last record of each run that has records, and return the comparison."""
    for run in comparison.runs:
        if run.history:
            run.history[-1] = replace(run.history[-1], **numbers(run))
    return comparison


def lines_of(text: str) -> list[dict[str, str]]:
    """Return the lines of a CSV table as dicts."""
    return list(csv.DictReader(io.StringIO(text)))


def compared(axes: dict, accuracies: Callable[[dict], list[float] | None], **settings: Any) -> Comparison:
    """Return a comparison with these axes, settings and invented accuracies."""
    plan = comparison_of(axes, **settings)
    return replace(plan, runs=results_of(plan, accuracies))


def on_the_clock(results: list[Run], seconds: Callable[[dict], float]) -> list[Run]:
    """Return the results as runs on the virtual clock, in which each round took `seconds(point)`.

    Every round has two updates of staleness 1 and four arrivals.
    """
    for run in results:
        for index, round_record in enumerate(run.history):
            work = AsyncRecord(updates=2 * round_record.round, arrivals=4 * round_record.round, staleness={"1": 2})
            virtual_seconds = round_record.round * seconds(run.point)
            run.history[index] = replace(round_record, virtual_seconds=virtual_seconds, asynchronous=work)
    return results


def record(round: int, accuracy: float) -> RoundRecord:
    numbers = {"test_accuracy": accuracy, "test_loss": 1 - accuracy, "train_loss": 0.5}
    return RoundRecord(round=round, **numbers, seconds={"train": 1.0, "test": 0.5}, cohort=[0])
