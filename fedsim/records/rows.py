"""Statistics of a comparison: means and curves over seeds, best values, breaking points, and choices along axes.

A row is a combination of compared values, with its runs of all seeds. The settings `tune` and `worst` choose one value
of an axis for each combination of the compared axes: the value with the best validation result, or the worst case. The
runs with the chosen values are then compared as if the axis did not exist.
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
FEWEST_VALUES = 3  # minimum number of values of a numeric axis for a curve over these values
TEST, VALIDATION = "test_", "validation_"  # prefixes of the names of results


def canonical(value: Any) -> str:
    """Return JSON text that identifies an axis value, or a point (a combination of axis values).

    The values 1, 1.0 and true have different texts.
    """
    return json.dumps(value, sort_keys=True)


@dataclass(eq=False)
class Row:
    """Row of the summary table: one combination of compared values, with its runs of all seeds.

    Statistics cover the finished runs. The compared metric is the test accuracy after the last round (the test loss for
    a task without accuracy), unless the comparison names another metric.

    Attributes:
        point: value on each compared axis.
        place: index of each of these values on its axis.
        runs: the `Run` of each seed, finished or not.
        metric: the compared metric (see `score_of`).
        chosen: values that were chosen along the axes `tune` and `worst`.
        group: this row and the rows that differ from it only in the first axis.
    """

    point: dict[str, Any]
    place: tuple[int, ...]
    runs: list[Any]
    metric: Metric
    chosen: dict[str, Any] = field(default_factory=dict)
    group: Group | None = field(default=None, repr=False)

    @cached_property
    def finished(self) -> list[Any]:
        """Return the runs that ended without failing."""
        return [run for run in self.runs if run.finished]

    @property
    def failed(self) -> int:
        """Number of runs that failed or did not finish. No mean includes them."""
        return len(self.runs) - len(self.finished)

    @cached_property
    def metrics(self) -> dict[str, Estimate | None]:
        """Return the mean over the seeds of each metric in `Run.metrics`, or None for metrics without a value."""
        names = dict.fromkeys(name for run in self.finished for name in run.metrics)
        by_name = {name: [run.metrics.get(name) for run in self.finished] for name in names}
        return {name: estimate([value for value in values if value is not None]) for name, values in by_name.items()}

    @cached_property
    def score(self) -> Estimate | None:
        """Mean over the seeds of the compared metric after the last round, or None if no run has it."""
        return estimate(list(self._scores.values()))

    @property
    def accuracy(self) -> Estimate | None:
        """Mean test accuracy after the last round, or None if another metric is compared or no run has one."""
        return self.score if self.metric.key == "test_accuracy" else None

    @property
    def reached(self) -> int:
        """Number of runs that reached the target."""
        rounds = self.metrics.get("rounds_to_target")
        return rounds.n if rounds else 0

    @property
    def diverged(self) -> int:
        """Number of finished runs that diverged. Their results are those of the last finite model."""
        return sum(run.history[-1].diverged is not None for run in self.finished)

    @property
    def counted(self) -> int:
        """Number of runs that count in the score."""
        return self.score.n if self.score else 0

    @property
    def difference(self) -> Estimate | None:
        """Mean difference between this row's score and the score of the baseline row, paired by seed.

        The baseline is the row of the same group that has the first value of the first axis. The result is None for the
        baseline itself, and if the group has no baseline.
        """
        baseline = self.group[0] if self.group else self
        return self.difference_to(baseline) if baseline is not self and baseline.place[0] == 0 else None

    @property
    def mark(self) -> str:
        """Mark of the row: "*" for the best row of its group, "~" for rows tied with the best row, else ""."""
        group = self.group
        if group is None or len(group) < 2:
            return ""
        return "*" if self is group.best else "~" if self in group.tied else ""

    def is_complete(self, mean: Estimate | None) -> bool:
        """Whether `mean` is finite and includes every run of the row, and no run diverged."""
        return mean is not None and math.isfinite(mean.mean) and mean.n == len(self.runs) and not self.diverged

    def quality(self, mean: Estimate | None) -> float:
        """Return a number, higher for better rows, by which rows are ranked, chosen and marked.

        `mean` is the mean of the compared metric, or of its validation result. Returns -inf if the mean is not complete
        (see `is_complete`), or if neither higher nor lower values of the metric are better.
        """
        if mean is None or not self.is_complete(mean) or self.metric.better is None:
            return -math.inf
        return self.metric.sign * mean.mean

    def difference_to(self, row: Row) -> Estimate | None:
        """Return the mean difference between this row's score and the score of `row`, over the seeds that both have.

        Runs with the same seed share the initial model, cohorts and batches, so the difference varies less than either
        score.
        """
        ours, theirs = self._scores, row._scores
        return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])

    @cached_property
    def _scores(self) -> dict[Any, float]:
        values = {run.place.get(SEED): self.metric.read(run.history[-1]) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}


class Group(list[Row]):
    """A group of rows that differ only in the first axis, such as all rules under the same attack."""

    @cached_property
    def ranked(self) -> list[Row]:
        """Return the rows sorted by score, best first, without rows that have a failed, diverged or missing run."""
        known = [row for row in self if row.quality(row.score) > -math.inf]
        return sorted(known, key=lambda row: -row.quality(row.score))

    @property
    def best(self) -> Row | None:
        """The row with the best mean score (the first one among equal rows), or None if no row is ranked."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def tied(self) -> list[Row]:
        """Return the rows that are not significantly different from the best row, sorted by score.

        Rows are tied if the 95 percent interval of their difference, paired by seed, includes 0.
        """
        gaps = {row: row.difference_to(self.ranked[0]) for row in self.ranked[1:]}
        return [row for row, gap in gaps.items() if gap and gap.includes(0.0)]

    @property
    def next(self) -> Row | None:
        """The row with the best score among the rows that are not tied with the best row, or None."""
        return next((row for row in self.ranked[1:] if row not in self.tied), None)


def rows_of(runs: Iterable[Any], axes: Sequence[str], by: str | None = None, chosen: Iterable[str] = ()) -> list[Row]:
    """Return one row for each combination of values on the axes, in the order of the runs.

    Args:
        runs: the runs, as `Run` objects.
        axes: the compared axes, without the seed.
        by: name of the compared metric (see `score_of`).
        chosen: axes along which values were chosen.
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
    """Return the rows in groups. Rows of a group differ only in the first axis."""
    groups: dict[tuple[int, ...], Group] = {}
    for row in rows:
        row.group = groups.setdefault(row.place[1:], Group())
        row.group.append(row)
    return list(groups.values())


def score_of(runs: Iterable[Any], by: str | None = None) -> Metric:
    """Return the metric to compare runs by: the metric with the name `by`, or by default the test accuracy.

    For a task without accuracy, the default is the test loss.
    """
    return score_in(record for run in runs for record in run.history) if by is None else metric_called(by)


@dataclass(frozen=True)
class MeanCurve:
    """Mean of the curves of several runs, over the x range that all curves cover.

    Attributes:
        curves: x values and y values of each run's curve.
        x: common x values, shape [points].
        values: the curves interpolated at `x`, shape [curves, points].
        means, half_widths: means over the curves and half widths of the 95 percent intervals, shape [points].
    """

    curves: list[tuple[np.ndarray, np.ndarray]]
    x: np.ndarray
    values: np.ndarray
    means: np.ndarray
    half_widths: np.ndarray


def mean_curve(runs: Iterable[Any], metric: Metric, scale: str) -> MeanCurve | None:
    """Return the mean curve of a metric over a scale of `SCALES`, or None if no x value has results of all runs."""
    curves = [curve for run in runs if (curve := _curve(run, metric, scale))[0].size]
    if not curves:
        return None
    x, values = on_common_grid(curves)
    return MeanCurve(curves, x, values, *mean_and_half_width(values)) if x.size else None


def _curve(run: Any, metric: Metric, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the x values and the metric values of a run, for the rounds that have both."""
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
    """Return the compared axes that have three or more values, all of them numbers."""
    return [key for key in compared if len(axes[key]) >= FEWEST_VALUES and is_numeric(axes[key])]


def value_curves(rows: Iterable[Row], key: str) -> list[list[Row]]:
    """Return lists of rows that differ only in the axis `key`, sorted by the value on this axis.

    There is one list for each combination of values on the other compared axes.
    """
    curves: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        combination = tuple(place for axis, place in zip(row.point, row.place, strict=True) if axis != key)
        curves.setdefault(combination, []).append(row)
    return [sorted(curve, key=lambda row: row.point[key]) for curve in curves.values()]


def mean_over_values(curve: Iterable[Row], key: str) -> MeanCurve | None:
    """Return the mean of the compared metric after the last round as a curve over the values of the axis `key`.

    Values with a failed, diverged or missing run are left out. None if no value remains.
    """
    known = [(row.point[key], score.values) for row in curve if (score := row.score) and row.is_complete(score)]
    if not known:
        return None
    x, values = np.array([float(value) for value, _ in known]), np.array([scores for _, scores in known]).T
    return MeanCurve([(x, of_seed) for of_seed in values], x, values, *mean_and_half_width(values))


class BreakingPoint(NamedTuple):
    """Where along a numeric axis the mean test result after the last round begins to miss the target.

    A value of the axis with a diverged run or without a finite result misses the target.

    Attributes:
        breaks_at: smallest value such that the target is missed at this value and at all larger values. None if the
            largest value of the axis reaches the target.
        reached_at: largest value that reaches the target, or None if no value does.
        missed_below: values below `reached_at` that miss the target. If there are any, the curve is not monotone.
        no_result: values with a failed run. The other attributes do not consider these values.
    """

    breaks_at: float | None
    reached_at: float | None
    missed_below: list[float]
    no_result: list[float]

    @property
    def text(self) -> str:
        """The breaking point as text, such as "5", "none up to 10, but missed at 1" or "0.5, the smallest value"."""
        if self.breaks_at is not None:
            text = f"{self.breaks_at}" + (", the smallest value" if self.reached_at is None else "")
        else:
            text = "unknown" if self.reached_at is None else f"none up to {self.reached_at}"
        also = " also" if self.breaks_at is not None else ""
        text += f", but{also} missed at {', '.join(map(str, self.missed_below))}" if self.missed_below else ""
        return text + (f"; no result at {', '.join(map(str, self.no_result))}" if self.no_result else "")


def breaking_point(curve: Iterable[Row], key: str, test: Metric, target: float) -> BreakingPoint:
    """Return where along the axis `key` the test result begins to miss the target.

    Args:
        curve: one row for each value of the axis, which differ only in this value.
        key: the axis.
        test: metric to which the target applies.
        target: the target.
    """
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
    """A value that was chosen along the axis `tune` or `worst`, for one combination of compared values.

    Attributes:
        candidates: one row for each value of the axis, in the order of the runs.
        chosen: the row of the chosen value.
        decided: whether any value has results for every seed. If false, the first value is chosen.
    """

    candidates: list[Row]
    chosen: Row
    decided: bool


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """Settings of a comparison: the keys of a table [comparison] (or of `comparison.json`) that are not axes.

    Attributes:
        target: test accuracy to reach (test loss for a task without accuracy). The summary reports the time until the
            target is reached, and the breaking points along numeric axes.
        tune: axis to tune. For each combination, the value with the best mean validation result is chosen, among the
            values with results for every seed. With `worst`, the worst validation result along that axis counts.
        worst: axis of the worst case. After tuning, the value with the worst mean of the compared metric is chosen.
            Values with a failed, diverged or missing run count as worst.
        metric: name of the compared metric (see `metric_called`). None: the test accuracy, or the test loss for a task
            without accuracy.
        skip_invalid: leave out combinations that are invalid experiments. None or false: refuse the comparison.
        heatmap: vertical and horizontal axis of the heat map, separated by a comma. None: the first two axes.
    """

    target: Number = None
    tune: str | None = None
    worst: str | None = None
    metric: str | None = None
    skip_invalid: StrictBool | None = None
    heatmap: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}

    def known_on(self, axes: Container[str]) -> ComparisonSettings:
        """Return a copy in which `tune` and `worst` are None unless they are among the `axes` of the comparison."""
        tune, worst = (axis if axis in axes else None for axis in (self.tune, self.worst))
        return replace(self, tune=tune, worst=worst)

    @property
    def headings(self) -> dict[str, str]:
        """Column headings for the axes of `tune` and `worst`, such as "tuned local.lr", by axis."""
        texts = {self.tune: f"tuned {self.tune}", self.worst: f"worst {self.worst}"}
        return {axis: text for axis, text in texts.items() if axis is not None}

    @property
    def remark(self) -> str:
        """Remark for figures that says how values were chosen. Empty without `tune` and `worst`."""
        return ", ".join(self.headings.values())

    def compared(self, axes: Sequence[str]) -> list[str]:
        """Return the compared axes: all axes except the seed and the axes of `tune` and `worst`."""
        return [axis for axis in axes if axis != SEED and axis not in self.headings]

    def heat_axes(self, axes: Sequence[str]) -> tuple[str, str] | None:
        """Return the vertical and the horizontal axis that the setting `heatmap` names.

        Returns None without this setting, or if one of the two is not compared or is the first compared axis.
        """
        down, _, across = (self.heatmap or "").partition(",")
        return (down, across) if down != across and {down, across} <= set(self.compared(axes)[1:]) else None

    def combined(self, runs: Sequence[Any], axes: Sequence[str]) -> list[Row]:
        """Return one row for each combination of compared values, with the values chosen along `tune` and `worst`."""
        return rows_of(self.of(runs, axes)[0], self.compared(axes), self.metric, self.headings)

    def of(self, runs: Sequence[Any], axes: Sequence[str]) -> tuple[list[Any], list[Choice]]:
        """Choose values along the axes of `tune` and `worst`.

        Returns the runs with the chosen values, and one `Choice` along the axis `tune` for each combination of compared
        values. Without this axis, the list of choices is empty.
        """
        compared, left, tuned = self.compared(axes), list(runs), list[Choice]()
        if self.tune is not None:
            tuned = _choices(left, compared, self.tune, lambda row: validated_quality(self.validated(row)))
            left = [run for choice in tuned for run in choice.chosen.runs]
        if self.worst is not None:
            worst = _choices(left, compared, self.worst, lambda row: -row.quality(row.score), self.metric)
            left = [run for choice in worst for run in choice.chosen.runs]
        return left, tuned

    def validated(self, candidate: Row) -> Row:
        """Return those runs of a tuned value whose validation result decides whether the value is chosen.

        With an axis `worst`, these are the runs of the worst case, else all runs.
        """
        cases = rows_of(candidate.runs, [] if self.worst is None else [self.worst])
        return min(cases, key=validated_quality)


NO_SETTINGS = ComparisonSettings()
SETTINGS = tuple(item.name for item in fields(ComparisonSettings))


def validation_result(row: Row) -> Estimate | None:
    """Return the mean over seeds of the validation result after the last round, or None if no run has one."""
    return row.metrics.get(row.metric.key.replace(TEST, VALIDATION))


def validated_quality(row: Row) -> float:
    """Return the quality of the row's mean validation result, higher for better results (see `Row.quality`)."""
    return row.quality(validation_result(row))


def _choices(
    runs: Sequence[Any],
    compared: Sequence[str],
    axis: str,
    value: Callable[[Row], float],
    by: str | None = None,
) -> list[Choice]:
    """Choose a value of `axis` for each combination of compared values: the value whose row maximizes `value(row)`.

    If no row has a `value(row)` above -inf, the first value is chosen, and `decided` is false. `by` is the name of the
    compared metric (see `score_of`).
    """
    choices = []
    for row in rows_of(runs, compared):
        candidates = rows_of(row.runs, [axis], by)
        chosen = max(candidates, key=value)
        choices.append(Choice(candidates, chosen, value(chosen) > -math.inf))
    return choices
