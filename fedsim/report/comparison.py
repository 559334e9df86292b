"""A grid's runs, put side by side: one line per combination of its axes, over the seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsim.intervals import Estimate, estimate
from fedsim.report.figures import byzantine_weight, mean_or_none, total_seconds
from fedsim.report.reading import SEED, Grid, GridRun, Run
from fedsim.runs.progress import Progress, ToTarget, reached


@dataclass(frozen=True)
class Combination:
    """The runs that differ in nothing but the seed; `place` is the number of the value on each other axis."""

    place: tuple[int, ...]
    runs: list[GridRun]

    @property
    def group(self) -> tuple[int, ...]:
        """The place on all axes but the first: what combinations that compete with each other have in common."""
        return self.place[1:]

    @property
    def finished(self) -> list[GridRun]:
        return [entry for entry in self.runs if entry.finished]

    @property
    def whole(self) -> list[Run]:
        """Runs that are finished."""
        return [entry.run for entry in self.finished if entry.run]

    @property
    def begun(self) -> list[Run]:
        """Runs with a round at least, finished or not."""
        return [entry.run for entry in self.runs if entry.run and entry.run.rounds]

    def interval(self, read: Callable[[Run], float | None]) -> Estimate | None:
        """A number of each finished run, as mean and interval over the seeds."""
        values = [read(run) for run in self.whole]
        return estimate([value for value in values if value is not None])


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    combination: Combination
    accuracy: Estimate | None
    attack_success: Estimate | None
    byzantine_weight: float | None
    seconds: float | None  # of a whole run
    virtual_seconds: Estimate | None  # of a whole run
    to_target: ToTarget | None  # None where the grid has no target
    best: bool  # of its group, by mean accuracy; several if they are equal
    behind: Estimate | None  # accuracy less that of the best, over the seeds that both have finished


def other_axes(grid: Grid) -> list[str]:
    """The axes that are not the seed."""
    return [axis for axis in grid.axes if axis != SEED]


def combinations(grid: Grid) -> list[Combination]:
    """In the order of the axes' values, the last axis fastest."""
    axes = other_axes(grid)
    groups: dict[tuple[int, ...], list[GridRun]] = {}
    for entry in grid.runs:
        groups.setdefault(tuple(entry.place[axis] for axis in axes), []).append(entry)
    return [Combination(place, runs) for place, runs in sorted(groups.items())]


def compare(combined: Sequence[Combination], target: float | None = None) -> list[Line]:
    """One line per combination, each measured against the best of its group, and against a target accuracy."""
    accuracies = [combination.interval(final_accuracy) for combination in combined]
    leaders = _leaders(combined, accuracies)
    lines = []
    for combination, accuracy in zip(combined, accuracies, strict=True):
        leader = leaders.get(combination.group)
        best = leader is not None and accuracy is not None and accuracy.mean == accuracies[leader].mean
        lines.append(
            Line(
                combination=combination,
                accuracy=accuracy,
                attack_success=combination.interval(final_attack_success),
                byzantine_weight=mean_or_none(byzantine_weight(run) for run in combination.begun),
                seconds=mean_or_none(_duration(entry.run) for entry in combination.finished if entry.run),
                virtual_seconds=combination.interval(final_virtual_seconds),
                to_target=None if target is None else ToTarget.of(_reached(run, target) for run in combination.whole),
                best=best,
                behind=None if best or leader is None else paired_difference(combination, combined[leader]),
            )
        )
    return lines


def _reached(run: Run, target: float) -> Progress | None:
    return reached([record.test_accuracy for record in run.rounds], run.progress, target)


def _leaders(combined: Sequence[Combination], accuracies: Sequence[Estimate | None]) -> dict[tuple[int, ...], int]:
    """The index of the best of each group, the first of equals; none where there is nothing to be better than."""
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
    """Final accuracy of `one` less that of `other`, seed by seed, as mean and interval.

    Runs of one seed meet the same start, cohorts and batches, so the difference varies less than either.
    """
    ours, theirs = _accuracy_by_seed(one), _accuracy_by_seed(other)
    return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def _accuracy_by_seed(combination: Combination) -> dict[int, float]:
    values = {entry.place.get(SEED, 0): final_accuracy(entry.run) for entry in combination.finished if entry.run}
    return {seed: value for seed, value in values.items() if value is not None}


def final_accuracy(run: Run) -> float | None:
    return run.rounds[-1].test_accuracy


def final_loss(run: Run) -> float | None:
    return run.rounds[-1].test_loss


def final_attack_success(run: Run) -> float | None:
    return run.rounds[-1].attack_success


def final_virtual_seconds(run: Run) -> float | None:
    return run.rounds[-1].virtual_seconds


def best_accuracy(run: Run) -> float | None:
    """The highest of all rounds."""
    return max((record.test_accuracy for record in run.rounds if record.test_accuracy is not None), default=None)


def _duration(run: Run) -> float:
    return sum(total_seconds(record) or 0.0 for record in run.rounds)
