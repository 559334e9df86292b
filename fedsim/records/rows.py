"""The rows of a comparison: statistics and curves over seeds, the best of each group, curves and
breaking points along an axis of numbers, and the choices along axes.

Along an axis, the value with the best validation result may be chosen, or the worst case. A choice leaves the runs of
one value for each combination of the compared axes. These runs are compared as if the axis did not exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from pydantic import StrictBool

from fedsim.core.confidence import Estimate, estimate, mean_and_half_width, on_common_grid
from fedsim.records.numbers import places_on
from fedsim.records.record import Metric, Number, metric_called, score_in

SEED = "seed"  # the axis over which results are averaged
FEWEST_VALUES = 3  # of an axis of numbers, from which there is a curve over them
TEST, VALIDATION = "test_", "validation_"  # how the names of results begin


def canonical(value: Any) -> str:
    """Return a text that identifies a value of an axis, or a point; 1, 1.0 and true are different."""
    return json.dumps(value, sort_keys=True)


@dataclass(eq=False)
class Row:
    """The runs that differ in the seed alone. Its statistics are those of the finished runs.

    What is compared is a number of the last round: the test accuracy, or the test loss of a task without accuracy,
    unless the comparison names another.

    Attributes:
        point: the value on each compared axis.
        place: the index of each of these values on its axis.
        runs: the runs of all seeds, finished or not; each is a `Run`.
        metric: the number that is compared, see `score_of`.
        chosen: the values that were chosen along the axes `tune` and `worst`.
        group: the rows that differ from this one in the first axis only.
    """

    point: dict[str, Any]
    place: tuple[int, ...]
    runs: list[Any]
    metric: Metric
    chosen: dict[str, Any] = field(default_factory=dict)
    group: Group | None = field(default=None, repr=False)

    @cached_property
    def finished(self) -> list[Any]:
        """Return the runs that ended and did not fail."""
        return [run for run in self.runs if run.finished]

    @property
    def failed(self) -> int:
        """How many runs failed or did not finish; these count in no mean."""
        return len(self.runs) - len(self.finished)

    @cached_property
    def metrics(self) -> dict[str, Estimate | None]:
        """Return the mean over the seeds of each of the runs' metrics; None if no run has a value.

        See `Run.metrics`.
        """
        names = dict.fromkeys(name for run in self.finished for name in run.metrics)
        values = {name: [run.metrics.get(name) for run in self.finished] for name in names}
        return {name: estimate([each for each in found if each is not None]) for name, found in values.items()}

    @cached_property
    def score(self) -> Estimate | None:
        """Return the mean over the seeds of the compared number in the last round; None if no run has it."""
        return estimate(list(self._scores.values()))

    @property
    def accuracy(self) -> Estimate | None:
        """Mean test accuracy. None if no run has one or if another number is compared."""
        return self.score if self.metric.key == "test_accuracy" else None

    @property
    def reached(self) -> int:
        """How many runs reached the target."""
        rounds = self.metrics.get("rounds_to_target")
        return rounds.n if rounds else 0

    @property
    def diverged(self) -> int:
        """How many of the finished runs diverged: their results are those of an earlier model."""
        return sum(run.history[-1].diverged is not None for run in self.finished)

    @property
    def counted(self) -> int:
        """How many runs count in the score."""
        return self.score.n if self.score else 0

    @property
    def difference(self) -> Estimate | None:
        """The mean paired difference to the row of the first axis' first value; None for that row itself."""
        baseline = self.group[0] if self.group else self
        return self.difference_to(baseline) if baseline is not self and baseline.place[0] == 0 else None

    @property
    def mark(self) -> str:
        """ "*" for the best of the group, "~" for a row that is not significantly different from it, else ""."""
        group = self.group
        if group is None or len(group) < 2:
            return ""
        return "*" if self is group.best else "~" if self in group.tied else ""

    def is_complete(self, mean: Estimate | None) -> bool:
        """Whether each run counts in this mean over the seeds, and none of them failed or diverged."""
        return mean is not None and math.isfinite(mean.mean) and mean.n == len(self.runs) and not self.diverged

    def quality(self, mean: Estimate | None) -> float:
        """Return how good the row is by a mean over the seeds of its metric, or of the validation's.

        The higher, the better. It is -inf, worse than any other, unless the mean is complete, and if no value of the
        metric is better than another. All that ranks, chooses or marks rows goes by this number.
        """
        if mean is None or not self.is_complete(mean) or self.metric.better is None:
            return -math.inf
        return self.metric.sign * mean.mean

    def difference_to(self, row: Row) -> Estimate | None:
        """Return the mean over seeds of the score minus that of another row, over the seeds that both have.

        Runs of one seed share their start, cohorts and batches, so the difference varies less than either score.
        """
        ours, theirs = self._scores, row._scores
        return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])

    @cached_property
    def _scores(self) -> dict[Any, float]:
        values = {run.place.get(SEED): self.metric.read(run.history[-1]) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}


class Group(list[Row]):
    """The rows that differ in the first axis only, such as all rules under one attack."""

    @cached_property
    def ranked(self) -> list[Row]:
        """Return the rows without a run that failed, diverged or has no result, the best first; of equals the first."""
        known = [row for row in self if row.quality(row.score) > -math.inf]
        return sorted(known, key=lambda row: -row.quality(row.score))

    @property
    def best(self) -> Row | None:
        """The row with the best mean score, the first of equals; None if no row is ranked."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def tied(self) -> list[Row]:
        """Return the rows that are not significantly different from the best, the best first.

        The 95 percent interval of the difference, paired by seed, includes 0.
        """
        gaps = {row: row.difference_to(self.ranked[0]) for row in self.ranked[1:]}
        return [row for row, gap in gaps.items() if gap and gap.includes(0.0)]

    @property
    def next(self) -> Row | None:
        """The best row that is significantly different from the best."""
        return next((row for row in self.ranked[1:] if row not in self.tied), None)


def rows_of(runs: Iterable[Any], axes: Sequence[str], by: str | None = None, chosen: Iterable[str] = ()) -> list[Row]:
    """Return the rows of these runs, one for each combination of the values on these axes, in the order of the runs.

    Args:
        runs: each is a `Run`.
        axes: the compared axes, without the seed.
        by: as of `score_of`.
        chosen: the axes along which values were chosen.
    """
    runs, together = list(runs), dict[tuple[int, ...], list[Any]]()
    for run in runs:
        together.setdefault(tuple(run.place[axis] for axis in axes), []).append(run)
    metric, rows = score_of(runs, by), list[Row]()
    for place, of_row in together.items():
        point = of_row[0].point
        values = {axis: point[axis] for axis in axes}
        rows.append(Row(values, place, of_row, metric, {axis: point[axis] for axis in chosen}))
    return rows


def groups_of(rows: Iterable[Row]) -> list[Group]:
    """Return the groups of rows that differ in the first axis only."""
    groups: dict[tuple[int, ...], Group] = {}
    for row in rows:
        row.group = groups.setdefault(row.place[1:], Group())
        row.group.append(row)
    return list(groups.values())


def score_of(runs: Iterable[Any], by: str | None = None) -> Metric:
    """The number that runs are compared by: `by`, see `metric_called`, or else the test result, see `score_in`."""
    return score_in(record for run in runs for record in run.history) if by is None else metric_called(by)


@dataclass(frozen=True)
class MeanCurve:
    """The mean of several runs' curves where all of them are known.

    Attributes:
        curves: of each run the places on the scale and the values there.
        x: the places of all curves, [points].
        values: of each curve, interpolated at x, [curves, points].
        means, half_widths: means over the curves, and half widths of the 95 percent intervals, [points].
    """

    curves: list[tuple[np.ndarray, np.ndarray]]
    x: np.ndarray
    values: np.ndarray
    means: np.ndarray
    half_widths: np.ndarray


def mean_curve(runs: Iterable[Any], metric: Metric, scale: str) -> MeanCurve | None:
    """Return the mean curve of a metric on a scale of `SCALES`; None if it is empty."""
    curves = [each for run in runs if (each := _curve(run, metric, scale))[0].size]
    if not curves:
        return None
    x, values = on_common_grid(curves)
    return MeanCurve(curves, x, values, *mean_and_half_width(values)) if x.size else None


def _curve(run: Any, metric: Metric, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions on the scale and the values of the rounds that have both."""
    points = list(zip(places_on(scale, run.progress, run.history), map(metric.read, run.history), strict=True))
    x, y = np.array([point for point in points if None not in point], dtype=float).reshape(-1, 2).T
    return x, y


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values of an axis are finite numbers.

    >>> is_numeric([1, 2.5]), is_numeric([True, 1]), is_numeric([1, float("inf")]), is_numeric(["mean"])
    (True, False, False, False)
    """
    return all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf for value in values
    )


def numeric_axes(axes: Mapping[str, Sequence[Any]], compared: Sequence[str]) -> list[str]:
    """Return the compared axes of three or more numbers."""
    return [key for key in compared if len(axes[key]) >= FEWEST_VALUES and is_numeric(axes[key])]


def value_curves(rows: Iterable[Row], key: str) -> list[list[Row]]:
    """Return the rows that differ in one of the compared axes only, in the order of its values.

    There is one list for each combination of the values on the other axes.
    """
    curves: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        others = tuple(place for axis, place in zip(row.point, row.place, strict=True) if axis != key)
        curves.setdefault(others, []).append(row)
    return [sorted(curve, key=lambda row: row.point[key]) for curve in curves.values()]


def mean_over_values(curve: Iterable[Row], key: str) -> MeanCurve | None:
    """Return the mean of the compared number in the last round at each value of `key` where it is complete, or None."""
    known = [(row.point[key], score.values) for row in curve if (score := row.score) and row.is_complete(score)]
    if not known:
        return None
    x, values = np.array([float(value) for value, _ in known]), np.array([scores for _, scores in known]).T
    return MeanCurve([(x, of_seed) for of_seed in values], x, values, *mean_and_half_width(values))


class BreakingPoint(NamedTuple):
    """Where the mean test result of the last round misses a target, along the values of an axis.

    With a run that diverged, or whose result is not finite, a value misses it.

    Attributes:
        breaks_at: the smallest value from which on all means miss the target; None if that of the largest reaches it.
        reached_at: the largest value whose mean reaches the target; None if none does.
        missed_below: the values below `reached_at` whose means miss it: with any, the curve is not monotone.
        no_result: the values of which a run failed; they count in none of the others.
    """

    breaks_at: float | None
    reached_at: float | None
    missed_below: list[float]
    no_result: list[float]

    @property
    def text(self) -> str:
        """`5`, `none up to 10, but missed at 1`, `0.5, the smallest value`."""
        if self.breaks_at is not None:
            text = f"{self.breaks_at}" + (", the smallest value" if self.reached_at is None else "")
        else:
            text = "unknown" if self.reached_at is None else f"none up to {self.reached_at}"
        also = " also" if self.breaks_at is not None else ""
        text += f", but{also} missed at {', '.join(map(str, self.missed_below))}" if self.missed_below else ""
        return text + (f"; no result at {', '.join(map(str, self.no_result))}" if self.no_result else "")


def breaking_point(curve: Iterable[Row], key: str, test: Metric, target: float) -> BreakingPoint:
    """Return where a curve along `key` misses a test accuracy, or a test loss of a task without accuracy."""
    reached, missed, unknown = list[float](), list[float](), list[float]()
    for row in curve:
        mean = row.metrics.get(test.key)
        reaches = mean is not None and row.is_complete(mean) and test.reaches(mean.mean, target)
        (reached if reaches else missed if len(row.finished) == len(row.runs) else unknown).append(row.point[key])
    reached_at = max(reached, default=None)
    return BreakingPoint(
        breaks_at=min((value for value in missed if reached_at is None or value > reached_at), default=None),
        reached_at=reached_at,
        missed_below=[value for value in missed if reached_at is not None and value < reached_at],
        no_result=unknown,
    )


@dataclass(frozen=True)
class Choice:
    """The values of an axis for one combination of the compared axes.

    Attributes:
        candidates: one row for each value, in the order of the runs.
        chosen: the row whose runs remain.
        decided: whether any value has a result of every seed; if not, the runs of the first value remain.
    """

    candidates: list[Row]
    chosen: Row
    decided: bool


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """The settings of a comparison: the keys of a table [comparison], and of `comparison.json`, that are not axes.

    Attributes:
        target: the test accuracy, or test loss of a task without accuracy, the time until which is reported, and from
            which value of an axis of numbers on it is missed.
        tune: the value with the best mean validation result over the seeds is chosen, among those that have a result of
            every seed; of each value the worst result along the axis `worst` counts, if there is one.
        worst: then the value with the worst mean is chosen, of the number that runs are compared by. A value with a run
            that failed, diverged or has no result is the worst.
        metric: this number, see `metric_called`, perhaps with a sign that says which value is better; None: the test
            accuracy, or the test loss of a task without accuracy.
        skip_invalid: leave out the combinations that are invalid experiments; None and false: refuse the comparison.
        heatmap: the two axes of the heat map, "down,across"; None: the first two.
    """

    target: Number = None
    tune: str | None = None
    worst: str | None = None
    metric: str | None = None
    skip_invalid: StrictBool | None = None
    heatmap: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}

    def known_on(self, axes: Container[str]) -> ComparisonSettings:
        """Return the same without the axes that a comparison does not have."""
        tune, worst = (axis if axis in axes else None for axis in (self.tune, self.worst))
        return replace(self, tune=tune, worst=worst)

    @property
    def headings(self) -> dict[str, str]:
        """The axes along which values are chosen, each with the heading of its column."""
        texts = {self.tune: f"tuned {self.tune}", self.worst: f"worst {self.worst}"}
        return {axis: text for axis, text in texts.items() if axis is not None}

    @property
    def remark(self) -> str:
        """How values were chosen, for titles; empty if none were."""
        return ", ".join(self.headings.values())

    def compared(self, axes: Sequence[str]) -> list[str]:
        """Return the axes that are compared: all but the seed and those along which values are chosen."""
        return [axis for axis in axes if axis != SEED and axis not in self.headings]

    def heat_axes(self, axes: Sequence[str]) -> tuple[str, str] | None:
        """The two axes of `heatmap`, if both are compared, and neither is the first, of which a cell has the best."""
        down, _, across = (self.heatmap or "").partition(",")
        return (down, across) if down != across and {down, across} <= set(self.compared(axes)[1:]) else None

    def combined(self, runs: Sequence[Any], axes: Sequence[str]) -> list[Row]:
        """Return the rows that are compared, of the runs that remain."""
        return rows_of(self.of(runs, axes)[0], self.compared(axes), self.metric, self.headings)

    def of(self, runs: Sequence[Any], axes: Sequence[str]) -> tuple[list[Any], list[Choice]]:
        """The runs that remain, and the choices along the axis `tune`, one for each combination of the others."""
        compared, left, tuned = self.compared(axes), list(runs), list[Choice]()
        if self.tune is not None:
            tuned = _choices(left, compared, self.tune, lambda row: validated_quality(self.validated(row)))
            left = [run for choice in tuned for run in choice.chosen.runs]
        if self.worst is not None:
            worst = _choices(left, compared, self.worst, lambda row: -row.quality(row.score), self.metric)
            left = [run for choice in worst for run in choice.chosen.runs]
        return left, tuned

    def validated(self, candidate: Row) -> Row:
        """Of the runs of one value of the axis `tune`, those whose validation result counts: all, or the worst case."""
        cases = rows_of(candidate.runs, [] if self.worst is None else [self.worst])
        return min(cases, key=validated_quality)


NO_SETTINGS = ComparisonSettings()
SETTINGS = tuple(each.name for each in fields(ComparisonSettings))


def validation_result(row: Row) -> Estimate | None:
    """Return the mean validation accuracy over the seeds after the last round, or loss of a task without accuracy."""
    return row.metrics.get(row.metric.key.replace(TEST, VALIDATION))


def validated_quality(row: Row) -> float:
    """Return the higher, the better the validation result; see `Row.quality`."""
    return row.quality(validation_result(row))


def _choices(
    runs: Sequence[Any],
    compared: Sequence[str],
    axis: str,
    value: Callable[[Row], float],
    by: str | None = None,
) -> list[Choice]:
    """For each combination of the compared axes, the value of `axis` with the highest `value`, the first of equals."""
    choices = []
    for row in rows_of(runs, compared):
        candidates = rows_of(row.runs, [axis], by)
        chosen = max(candidates, key=value)
        choices.append(Choice(candidates, chosen, value(chosen) > -math.inf))
    return choices
