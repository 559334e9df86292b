"""The statistics of a grid: one summary per combination of its axes, over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedsim.core.confidence import Estimate, estimate
from fedsim.records.progress import Progress, ToTarget, reached
from fedsim.records.reader import SEED, GridRun, Run, StoredGrid
from fedsim.records.record import Metric, RoundRecord, metrics_in

ReadRun = Callable[[Run], float | None]


@dataclass(frozen=True)
class Combination:
    """The runs that differ in the seed alone; `place` holds the index of the value on each other axis."""

    place: tuple[int, ...]
    runs: list[GridRun]

    @property
    def group(self) -> tuple[int, ...]:
        """The place on all axes but the first: combinations of one group are compared with each other."""
        return self.place[1:]

    @property
    def finished_runs(self) -> list[Run]:
        return [entry.run for entry in self.runs if entry.finished and entry.run]

    @property
    def begun(self) -> list[Run]:
        """Runs with at least one round, finished or not."""
        return [entry.run for entry in self.runs if entry.run and entry.run.rounds]

    @property
    def accuracy_by_seed(self) -> dict[int, float]:
        """The final accuracy of each finished run."""
        pairs = [(entry.place.get(SEED, 0), entry.run) for entry in self.runs if entry.finished and entry.run]
        return {seed: value for seed, run in pairs if (value := final_accuracy(run)) is not None}

    def interval(self, read: ReadRun) -> Estimate | None:
        """A number of each finished run, as mean and interval over the seeds."""
        return estimate([value for run in self.finished_runs if (value := read(run)) is not None])


@dataclass(frozen=True)
class CombinationSummary:
    """A line of the comparison's table."""

    combination: Combination
    accuracy: Estimate | None
    attack_success: Estimate | None
    byzantine_weight: float | None
    metrics: dict[str, Estimate | None]  # final values of the numbers that plugs record
    seconds: float | None  # of a whole run
    virtual_seconds: Estimate | None  # of a whole run
    to_target: ToTarget | None  # None if the grid has no target
    best: bool  # highest mean accuracy of the group; true for several if they are equal
    difference: Estimate | None  # accuracy minus that of the best, over the seeds that both have finished


def other_axes(grid: StoredGrid) -> list[str]:
    """The axes other than the seed."""
    return [axis for axis in grid.axes if axis != SEED]


def combinations(grid: StoredGrid) -> list[Combination]:
    """All combinations, in the order of the axes' values, the last axis fastest."""
    axes = other_axes(grid)
    groups: dict[tuple[int, ...], list[GridRun]] = {}
    for entry in grid.runs:
        groups.setdefault(tuple(entry.place[axis] for axis in axes), []).append(entry)
    return [Combination(place, runs) for place, runs in sorted(groups.items())]


def summarise_combinations(combined: Sequence[Combination], target: float | None = None) -> list[CombinationSummary]:
    """One summary per combination: its difference from the best of its group, and the effort to reach `target`."""
    accuracies = [combination.interval(final_accuracy) for combination in combined]
    best_of = _best_of_groups(combined, accuracies)
    last_rounds = [run.rounds[-1] for combination in combined for run in combination.finished_runs]
    of_plugs = [metric for metric in metrics_in(last_rounds) if metric.path[0] == "metrics"]
    summaries = []
    for combination, accuracy in zip(combined, accuracies, strict=True):
        leader = best_of.get(combination.group)
        best = leader is not None and accuracy is not None and accuracy.mean == accuracies[leader].mean
        finished = combination.finished_runs
        summaries.append(
            CombinationSummary(
                combination=combination,
                accuracy=accuracy,
                attack_success=combination.interval(lambda run: run.rounds[-1].attack_success),
                byzantine_weight=mean_or_none(byzantine_weight(run) for run in combination.begun),
                metrics={metric.label: combination.interval(final(metric)) for metric in of_plugs},
                seconds=mean_or_none(sum(record.total_seconds or 0.0 for record in run.rounds) for run in finished),
                virtual_seconds=combination.interval(lambda run: run.rounds[-1].virtual_seconds),
                to_target=None if target is None else ToTarget.of(_reached(run, target) for run in finished),
                best=best,
                difference=None if best or leader is None else paired_difference(combination, combined[leader]),
            )
        )
    return summaries


def _best_of_groups(
    combined: Sequence[Combination], accuracies: Sequence[Estimate | None]
) -> dict[tuple[int, ...], int]:
    """The index of the best of each group of at least two, the first of equals."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, combination in enumerate(combined):
        if accuracies[index]:
            groups.setdefault(combination.group, []).append(index)
    return {
        group: max(members, key=lambda index: accuracies[index].mean)
        for group, members in groups.items()
        if len(members) > 1
    }


def paired_difference(one: Combination, other: Combination) -> Estimate | None:
    """The final accuracy of `one` minus that of `other`, seed by seed, as mean and interval.

    Runs of one seed share their start, cohorts and batches, so the difference varies less than either accuracy.
    """
    ours, theirs = one.accuracy_by_seed, other.accuracy_by_seed
    return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def _reached(run: Run, target: float) -> Progress | None:
    return reached([record.test_accuracy for record in run.rounds], run.progress, target)


def final(metric: Metric) -> ReadRun:
    """A function that reads a metric from the last round of a run."""
    return lambda run: metric.read(run.rounds[-1])


def final_accuracy(run: Run) -> float | None:
    """The test accuracy after the last round."""
    return run.rounds[-1].test_accuracy


def best_accuracy(run: Run) -> float | None:
    """The highest test accuracy of all rounds."""
    return max((record.test_accuracy for record in run.rounds if record.test_accuracy is not None), default=None)


def byzantine_weight(run: Run) -> float | None:
    """The share of Byzantine workers in the sum of absolute weights, as the mean over rounds."""
    return mean_or_none(_byzantine_share(record, run.byzantine) for record in run.rounds) if run.byzantine else None


def _byzantine_share(record: RoundRecord, byzantine: frozenset[int]) -> float | None:
    weights = [(worker, abs(weight or 0.0)) for worker, weight in record.weights]
    total = sum(weight for _, weight in weights)
    return sum(weight for worker, weight in weights if worker in byzantine) / total if total else None


def mean_or_none(values: Iterable[float | None], digits: int = 8) -> float | None:
    """The mean, to so many digits, of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.fmean(known):.{digits}g}") if known else None
