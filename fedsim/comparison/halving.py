"""Successive halving: how many rounds each value of the axis `tune` gets (Jamieson and Talwalkar 2016).

Let n be the number of values and R the number of rounds. All values run for R / 2^k rounds, rounded up, where k is
log2(n), rounded up. Then the better half of the values, rounded up, runs for twice as many rounds in all, and so on,
until one value has R rounds. The mean validation result over the seeds decides, of the worst case if there is an axis
`worst`. The first of equal values is better. A value of which a run has failed within these rounds, or whose result is
not finite, loses; a later failure changes no earlier decision.

The decisions are a function of the records, so a comparison that is interrupted makes the same ones when it continues.
`rounds` of the experiment, which learning rate schedules use, does not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedsim.comparison.folder import GridRecords
from fedsim.comparison.grid import PlannedRun, groups_tuned
from fedsim.comparison.results import RunResult
from fedsim.records.combinations import canonical, combinations
from fedsim.records.comparison_settings import validated_quality
from fedsim.records.history import read_history


class Allotment(NamedTuple):
    """The rounds that a run gets, and whether it gets no more than these because other values are better."""

    rounds: int
    stopped: bool = False


def allotments(folder: GridRecords) -> dict[str, Allotment]:
    """Return what each run gets by the records so far, by id: all its rounds if the comparison halves none."""
    grid = folder.grid
    found = {run.id: Allotment(run.experiment.rounds) for run in grid.runs}
    if grid.settings.rounds_by_halving:
        for group in groups_tuned(grid):
            found.update(_of_group(group, folder))
    return found


def is_ready(run: PlannedRun, rounds: int, folder: GridRecords) -> bool:
    """Whether a run has so many rounds, or has ended before."""
    if folder.error(run) is not None or folder.is_finished(run):
        return True
    return rounds < run.experiment.rounds and len(read_history(folder.run_folder(run))) >= rounds


def rounds_saved(runs: Iterable[RunResult]) -> int:
    """Return how many rounds were not run because of halving."""
    return sum(run.experiment.rounds - run.stopped_at for run in runs if run.stopped_at is not None)


def _of_group(group: Sequence[PlannedRun], folder: GridRecords) -> dict[str, Allotment]:
    """Return what the runs of all values get that compete with each other."""
    tune = folder.grid.settings.tune
    assert tune is not None
    left: dict[str, list[PlannedRun]] = {}
    for run in group:
        left.setdefault(canonical(run.point[tune]), []).append(run)
    found: dict[str, Allotment] = {}
    for halvings in range(math.ceil(math.log2(len(left))), 0, -1):
        rounds = {run.id: math.ceil(run.experiment.rounds / 2**halvings) for runs in left.values() for run in runs}
        found |= {id: Allotment(each) for id, each in rounds.items()}
        compared = [run for runs in left.values() for run in runs]
        if not all(is_ready(run, rounds[run.id], folder) for run in compared):
            return found
        results = [_after(run, rounds[run.id], folder) for run in compared]
        ranked = sorted(
            combinations(results, [tune]),
            key=lambda value: validated_quality(folder.grid.settings.validated(value)),
            reverse=True,  # which keeps the order of equal values
        )
        kept = {value.place[0] for value in ranked[: math.ceil(len(ranked) / 2)]}
        found |= {run.id: Allotment(rounds[run.id], True) for run in compared if canonical(run.point[tune]) not in kept}
        left = {value: runs for value, runs in left.items() if value in kept}
    return found | {run.id: Allotment(run.experiment.rounds) for runs in left.values() for run in runs}


def _after(run: PlannedRun, rounds: int, folder: GridRecords) -> RunResult:
    """Return the result of a run as if it had ended after so many rounds."""
    history = read_history(folder.run_folder(run))[:rounds]
    error = folder.error(run) if len(history) < rounds else None
    return RunResult(run.id, run.point, run.experiment, history, error, None)
