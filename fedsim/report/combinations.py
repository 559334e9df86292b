"""The combinations of the values on a grid's axes, with statistics over their seeds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedsim.core.confidence import Estimate, estimate
from fedsim.records.reader import SEED, GridRun, Run, StoredGrid
from fedsim.records.record import RoundRecord
from fedsim.records.run_metrics import mean_metrics, paired_difference, run_metrics

ACCURACY = "test_accuracy"


@dataclass(frozen=True)
class Combination:
    """The runs that differ in the seed alone.

    Attributes:
        place: the index of the value on each axis but the seed.
        runs: of all seeds, finished or not.
        target: the test accuracy whose time is reported, if any.
    """

    place: tuple[int, ...]
    runs: list[GridRun]
    target: float | None = None

    @property
    def group(self) -> tuple[int, ...]:
        """The place on all axes but the first: combinations of one group are compared with each other."""
        return self.place[1:]

    @property
    def begun(self) -> list[Run]:
        """Runs with at least one round, finished or not."""
        return [entry.run for entry in self.runs if entry.run and entry.run.rounds]

    @cached_property
    def finished(self) -> dict[Hashable, Run]:
        """The finished runs by seed."""
        return {entry.place.get(SEED, 0): entry.run for entry in self.runs if entry.finished and entry.run}

    @cached_property
    def metrics_by_seed(self) -> dict[Hashable, dict[str, float | None]]:
        """The metrics of each finished run, see `run_metrics`."""
        return {seed: run_metrics(run.rounds, run.progress, self.target) for seed, run in self.finished.items()}

    @cached_property
    def metrics(self) -> dict[str, Estimate | None]:
        """The mean of each metric over the seeds."""
        return mean_metrics(list(self.metrics_by_seed.values()))

    @property
    def accuracy_by_seed(self) -> dict[Hashable, float]:
        """The final accuracy of each finished run."""
        accuracies = {seed: metrics.get(ACCURACY) for seed, metrics in self.metrics_by_seed.items()}
        return {seed: accuracy for seed, accuracy in accuracies.items() if accuracy is not None}

    @cached_property
    def byzantine_weight(self) -> float | None:
        """The mean of `byzantine_weight` over the runs with at least one round."""
        return mean_or_none(byzantine_weight(run) for run in self.begun)

    def mean_of(self, read: Callable[[Run], float | None]) -> Estimate | None:
        """Return the mean over the finished runs of a number of each run."""
        return estimate([value for run in self.finished.values() if (value := read(run)) is not None])


@dataclass(frozen=True)
class ComparedCombination:
    """A combination beside the others of its group.

    Attributes:
        combination: the combination.
        best: whether it has the highest mean accuracy of its group; true for several if they are equal.
        difference: its accuracy minus that of the best, paired by seed; None for the best itself.
    """

    combination: Combination
    best: bool
    difference: Estimate | None


def other_axes(grid: StoredGrid) -> list[str]:
    """Return the axes other than the seed."""
    return [axis for axis in grid.axes if axis != SEED]


def combinations(grid: StoredGrid) -> list[Combination]:
    """Return all combinations, in the order of the axes' values, the last axis fastest."""
    axes = other_axes(grid)
    groups: dict[tuple[int, ...], list[GridRun]] = {}
    for entry in grid.runs:
        groups.setdefault(tuple(entry.place[axis] for axis in axes), []).append(entry)
    return [Combination(place, runs, grid.target) for place, runs in sorted(groups.items())]


def compare_groups(combined: Sequence[Combination]) -> list[list[ComparedCombination]]:
    """Return the combinations by group, each compared with the best of its group."""
    ordered = sorted(combined, key=lambda each: (each.group, each.place))
    return [_compare(list(group)) for _, group in itertools.groupby(ordered, key=lambda each: each.group)]


def _compare(group: list[Combination]) -> list[ComparedCombination]:
    means = [accuracy.mean if (accuracy := each.metrics.get(ACCURACY)) else None for each in group]
    known = [mean for mean in means if mean is not None]
    if len(known) < 2:
        return [ComparedCombination(each, False, None) for each in group]
    leader = group[means.index(max(known))]
    best = [mean == max(known) for mean in means]
    return [
        ComparedCombination(each, first, None if first else _difference(each, leader))
        for each, first in zip(group, best, strict=True)
    ]


def _difference(one: Combination, other: Combination) -> Estimate | None:
    return paired_difference(one.accuracy_by_seed, other.accuracy_by_seed)


def byzantine_weight(run: Run) -> float | None:
    """Return the share of Byzantine workers in the sum of absolute weights, as the mean over rounds."""
    return mean_or_none(_byzantine_share(record, run.byzantine) for record in run.rounds) if run.byzantine else None


def _byzantine_share(record: RoundRecord, byzantine: frozenset[int]) -> float | None:
    total = sum(abs(weight or 0.0) for _, weight in record.weights)
    return (
        sum(abs(weight or 0.0) for worker, weight in record.weights if worker in byzantine) / total if total else None
    )


def mean_or_none(values: Iterable[float | None], digits: int = 8) -> float | None:
    """Return the mean, to so many digits, of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.fmean(known):.{digits}g}") if known else None
