"""Statistics of a comparison: means and curves over seeds, best values, breaking points, and choices along axes.

A row is a combination of compared values, with its runs of all seeds. The settings `tune` and `worst` choose one value
of an axis for each combination of the compared axes: the value with the best validation result, or with the worst
result. The runs with the chosen values are then compared as if the axis did not exist.
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
from fedsim.core.equality import levels, same
from fedsim.records.numbers import places_on
from fedsim.records.record import Metric, Number, metric_called, score_in

SEED = "seed"  # the axis over which results are averaged
FEWEST_VALUES = 3  # minimum number of values of a numeric axis for a curve over these values
TEST, VALIDATION = "test_", "validation_"  # prefixes of the names of results


def canonical(value: Any) -> str:
    """Return a JSON text that is different for different values, even for 1, 1.0 and true."""
    return json.dumps(value, sort_keys=True)


@dataclass(eq=False)
class Row:
    """Row of the table of results: one combination of compared values, with the runs of all seeds.

    Attributes:
        point: the compared values, by key.
        position: the index of each of these values among the values of its setting.
        runs: the run of each seed (see `Run`), finished or not.
        metric: the metric by which the runs are compared, such as the test accuracy.
        chosen: values that were chosen by `tune` and `worst`.
        group: this table row and the table rows that it is compared with.
    """

    point: dict[str, Any]
    position: tuple[int, ...]
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
        """Number of runs that failed or did not finish."""
        return len(self.runs) - len(self.finished)

    @cached_property
    def metrics(self) -> dict[str, Estimate | None]:
        """Return the mean over the seeds of each result, such as `test_accuracy`, by name."""
        names = dict.fromkeys(name for run in self.finished for name in run.metrics)
        by_name = {name: [run.metrics.get(name) for run in self.finished] for name in names}
        return {name: estimate([value for value in values if value is not None]) for name, values in by_name.items()}

    @cached_property
    def score(self) -> Estimate | None:
        """Final value of the compared metric, averaged over the seeds, or None if no run has this metric."""
        return estimate(list(self._scores.values()))

    @property
    def accuracy(self) -> Estimate | None:
        """Mean test accuracy after the last round, or None if unknown or if the runs are compared by another metric."""
        return self.score if self.metric.key == "test_accuracy" else None

    @property
    def reached(self) -> int:
        """Number of runs that reached the target."""
        rounds = self.metrics.get("rounds_to_target")
        return rounds.n if rounds else 0

    @property
    def diverged(self) -> int:
        """Number of finished runs that diverged."""
        return sum(run.history[-1].diverged is not None for run in self.finished)

    @property
    def counted(self) -> int:
        """Number of runs whose results are included in the mean."""
        return self.score.n if self.score else 0

    @property
    def difference(self) -> Estimate | None:
        """Mean difference between the results of this table row and of the baseline, paired by seed.

        The baseline is the first value of the first compared setting. Returns None for the baseline itself.
        """
        baseline = self.group[0] if self.group else self
        return self.difference_to(baseline) if baseline is not self and baseline.position[0] == 0 else None

    @property
    def mark(self) -> str:
        """Mark: "*" for the best table rows of a group, "~" if not significantly different from the best, else ""."""
        group = self.group
        if group is None or len(group) < 2:
            return ""
        return "*" if self in group.winners else "~" if self in group.tied else ""

    def is_complete(self, mean: Estimate | None) -> bool:
        """Whether `mean` is finite and includes every run of the table row, and no run diverged."""
        return mean is not None and math.isfinite(mean.mean) and mean.n == len(self.runs) and not self.diverged

    def quality(self, mean: Estimate | None) -> float:
        """Return a number by which table rows are ranked: the higher, the better.

        `mean` is the mean result of this table row. Returns -inf if a run failed, diverged or has no result.
        """
        if mean is None or not self.is_complete(mean) or self.metric.better is None:
            return -math.inf
        return self.metric.sign * mean.mean

    def difference_to(self, row: Row) -> Estimate | None:
        """Return the mean difference between the results of this table row and of `row`, paired by seed."""
        ours, theirs = self._scores, row._scores
        pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        return estimate([0.0 if same(first, second) else first - second for first, second in pairs])

    @cached_property
    def _scores(self) -> dict[Any, float]:
        values = {run.position.get(SEED): self.metric.read(run.history[-1]) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}


class Group(list[Row]):
    """Table rows that differ only in the first compared setting, such as all rules under the same attack."""

    @cached_property
    def ranked(self) -> list[Row]:
        """Return the table rows, best first, without those that have a failed, diverged or missing run."""
        return sorted(self._levels, key=self._levels.__getitem__)

    @property
    def best(self) -> Row | None:
        """The table row with the best mean result, or None. If several means are equal, the first of them."""
        return self.ranked[0] if self.ranked else None

    @property
    def winners(self) -> list[Row]:
        """The table rows with the best mean result. There are several if their means are equal up to rounding."""
        return [row for row in self.ranked if self._levels[row] == 0]

    @cached_property
    def tied(self) -> list[Row]:
        """Return the table rows that are not significantly different from the best, in descending order.

        The 95 percent interval of their difference to a best table row includes 0. The best table rows are not
        included.
        """

        def is_tied(row: Row) -> bool:
            gaps = map(row.difference_to, self.winners)
            return any(gap is not None and gap.includes(0.0) for gap in gaps)

        return list(filter(is_tied, self.ranked[len(self.winners) :]))

    @property
    def next(self) -> Row | None:
        """The best table row that is significantly worse than `best`, or None."""
        return next((row for row in self.ranked[len(self.winners) :] if row not in self.tied), None)

    @cached_property
    def _levels(self) -> dict[Row, int]:
        known = [row for row in self if row.quality(row.score) > -math.inf]
        return dict(zip(known, levels([row.quality(row.score) for row in known]), strict=True))


class Pair(NamedTuple):
    """Two table rows of a group, such as two rules under the same attack.

    Attributes:
        first, second: the table rows.
        difference: mean result of `second` minus that of `first`, paired by seed. Its `p_value` is that of the paired t
            test, without correction for the number of pairs.
    """

    first: Row
    second: Row
    difference: Estimate


def rows_of(runs: Iterable[Any], axes: Sequence[str], by: str | None = None, chosen: Iterable[str] = ()) -> list[Row]:
    """Return one table row for each combination of compared values.

    Args:
        runs: the runs, as `Run` objects.
        axes: keys of the compared settings, without the seed.
        by: name of the metric to compare. None: the test accuracy or loss.
        chosen: keys of the settings whose values `tune` and `worst` have chosen.
    """
    runs, together = list(runs), dict[tuple[int, ...], list[Any]]()
    for run in runs:
        together.setdefault(tuple(run.position[axis] for axis in axes), []).append(run)
    metric, rows = score_of(runs, by), list[Row]()
    for position, of_row in together.items():
        point = of_row[0].point
        values = {axis: point[axis] for axis in axes}
        rows.append(Row(values, position, of_row, metric, {axis: point[axis] for axis in chosen}))
    return rows


def groups_of(rows: Iterable[Row]) -> list[Group]:
    """Return the table rows in groups, such as all rules under the same attack.

    The rows of a group differ only in the first compared setting.
    """
    groups: dict[tuple[int, ...], Group] = {}
    for row in rows:
        row.group = groups.setdefault(row.position[1:], Group())
        row.group.append(row)
    return list(groups.values())


def score_of(runs: Iterable[Any], by: str | None = None) -> Metric:
    """Return the metric by which the runs are compared: the metric named `by`, or the test accuracy by default.

    For a task without accuracy, the default is the test loss.
    """
    return score_in(record for run in runs for record in run.history) if by is None else metric_called(by)


@dataclass(frozen=True)
class MeanCurve:
    """The mean of the curves of several runs.

    Attributes:
        curves: x values and y values of each run's curve.
        x: x values at which the mean is computed, shape [points].
        values: the y values of the curves at these points, interpolated, shape [curves, points].
        means, half_widths: means over the curves and half widths of the 95 percent intervals, shape [points].
    """

    curves: list[tuple[np.ndarray, np.ndarray]]
    x: np.ndarray
    values: np.ndarray
    means: np.ndarray
    half_widths: np.ndarray


def mean_curve(runs: Iterable[Any], metric: Metric, scale: str) -> MeanCurve | None:
    """Return the curve of a metric, averaged over several runs, or None if the runs have no common x values.

    `scale` names the x axis, such as "round".
    """
    curves = [curve for run in runs if (curve := _curve(run, metric, scale))[0].size]
    if not curves:
        return None
    x, values = on_common_grid(curves)
    return MeanCurve(curves, x, values, *mean_and_half_width(values)) if x.size else None


def _curve(run: Any, metric: Metric, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the x values and the metric's values in a run."""
    points = list(zip(places_on(scale, run.progress, run.history), map(metric.read, run.history), strict=True))
    x, y = np.array([point for point in points if None not in point], dtype=float).reshape(-1, 2).T
    return x, y


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values are finite numbers, and no Booleans.

    >>> is_numeric([1, 2.5]), is_numeric([True, 1]), is_numeric([1, float("inf")]), is_numeric(["mean"])
    (True, False, False, False)
    """
    return all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf for value in values
    )


def numeric_axes(axes: Mapping[str, Sequence[Any]], compared: Sequence[str]) -> list[str]:
    """Return the keys of the compared settings that have three or more values, all of them numbers."""
    return [key for key in compared if len(axes[key]) >= FEWEST_VALUES and is_numeric(axes[key])]


def value_curves(rows: Iterable[Row], key: str) -> list[list[Row]]:
    """Return lists of table rows that differ only in the setting `key`, sorted by its value."""
    curves: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        combination = tuple(position for axis, position in zip(row.point, row.position, strict=True) if axis != key)
        curves.setdefault(combination, []).append(row)
    return [sorted(curve, key=lambda row: row.point[key]) for curve in curves.values()]


def mean_over_values(curve: Iterable[Row], key: str) -> MeanCurve | None:
    """Return the curve of the mean final result over the values of the setting `key`, or None without results."""
    known = [(row.point[key], score.values) for row in curve if (score := row.score) and row.is_complete(score)]
    if not known:
        return None
    x, values = np.array([float(value) for value, _ in known]), np.array([scores for _, scores in known]).T
    return MeanCurve([(x, of_seed) for of_seed in values], x, values, *mean_and_half_width(values))


class BreakingPoint(NamedTuple):
    """The smallest value of a numeric setting from which on all mean test results miss the target.

    Attributes:
        breaks_at: the breaking point, or None if the largest value reaches the target.
        reached_at: largest value that reaches the target, or None.
        missed_below: values below `reached_at` that nevertheless miss the target.
        no_result: values with a failed run, which are otherwise ignored.
    """

    breaks_at: float | None
    reached_at: float | None
    missed_below: list[float]
    no_result: list[float]

    @property
    def text(self) -> str:
        """The breaking point as text for a table.

        Examples: "5" if all values from 5 on miss the target; "0.5, the smallest value" if all values miss it; "none up
        to 10, but missed at 1" if the largest value, 10, reaches the target and a smaller one does not.
        """
        if self.breaks_at is not None:
            text = f"{self.breaks_at}" + (", the smallest value" if self.reached_at is None else "")
        else:
            text = "unknown" if self.reached_at is None else f"none up to {self.reached_at}"
        also = " also" if self.breaks_at is not None else ""
        text += f", but{also} missed at {', '.join(map(str, self.missed_below))}" if self.missed_below else ""
        return text + (f"; no result at {', '.join(map(str, self.no_result))}" if self.no_result else "")


def breaking_point(curve: Iterable[Row], key: str, test: Metric, target: float) -> BreakingPoint:
    """Return the breaking point: the value of the setting `key` from which on all results miss the target.

    Args:
        curve: one table row for each value of the setting.
        key: key of the setting.
        test: metric to which the target refers.
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
    """A value that was chosen by `tune` or `worst`, for one combination of the other compared values.

    Attributes:
        candidates: one table row for each possible value.
        chosen: the table row of the chosen value.
        decided: false if no value has results for every seed. Then the first value is chosen.
    """

    candidates: list[Row]
    chosen: Row
    decided: bool


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """Settings of a comparison, as in a table [comparison].

    Attributes:
        target: test accuracy to reach (test loss for a task without accuracy).
        tune: key of a setting, such as the learning rate, whose value is chosen by the validation result.
        worst: key of a setting, such as the attack, of which only the value with the worst result is shown.
        metric: name of the metric to compare (see `metric_called`). None: the test accuracy or loss.
        skip_invalid: leave out invalid combinations instead of raising an error.
        heatmap: the two settings on the axes of the heat map, separated by a comma. None: the first two.
    """

    target: Number = None
    tune: str | None = None
    worst: str | None = None
    metric: str | None = None
    skip_invalid: StrictBool | None = None
    heatmap: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not None, as a dict."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}

    def known_on(self, axes: Container[str]) -> ComparisonSettings:
        """Return a copy in which `tune` and `worst` are None unless `axes` contains the setting that they name."""
        tune, worst = (axis if axis in axes else None for axis in (self.tune, self.worst))
        return replace(self, tune=tune, worst=worst)

    def renamed(self, name_of: Callable[[str], str]) -> ComparisonSettings:
        """Return a copy in which `name_of` has renamed each key."""
        tune, worst = (None if axis is None else name_of(axis) for axis in (self.tune, self.worst))
        heatmap = None if self.heatmap is None else ",".join(map(name_of, self.heatmap.split(",")))
        return replace(self, tune=tune, worst=worst, heatmap=heatmap)

    @property
    def headings(self) -> dict[str, str]:
        """Column headings for the settings of `tune` and `worst`, such as "tuned local.lr", by key."""
        texts = {self.tune: f"tuned {self.tune}", self.worst: f"worst {self.worst}"}
        return {axis: text for axis, text in texts.items() if axis is not None}

    @property
    def remark(self) -> str:
        """Text for figures that says how `tune` and `worst` chose values. Empty without them."""
        return ", ".join(self.headings.values())

    def compared(self, axes: Sequence[str]) -> list[str]:
        """Return the keys of the compared settings, without the seed and the settings of `tune` and `worst`."""
        return [axis for axis in axes if axis != SEED and axis not in self.headings]

    def heat_axes(self, axes: Sequence[str]) -> tuple[str, str] | None:
        """Return the settings on the vertical and horizontal axes of the heat map.

        Returns None if `heatmap` is not set, or does not name two different compared settings other than the first."""
        down, _, across = (self.heatmap or "").partition(",")
        return (down, across) if down != across and {down, across} <= set(self.compared(axes)[1:]) else None

    def combined(self, runs: Sequence[Any], axes: Sequence[str]) -> list[Row]:
        """Return one table row for each combination of compared values, after `tune` and `worst` have chosen values."""
        return rows_of(self.of(runs, axes)[0], self.compared(axes), self.metric, self.headings)

    def of(self, runs: Sequence[Any], axes: Sequence[str]) -> tuple[list[Any], list[Choice]]:
        """Choose values by `tune` and `worst`. `axes` are the keys of all settings with several values.

        Returns the runs with the chosen values, and the choices of `tune`.
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
        """Return a table row with the runs of `candidate` (a value of the tuned setting) that `tune` compares.

        If `worst` is set, these are the runs with the worst validation result among its values, otherwise all runs.
        """
        cases = rows_of(candidate.runs, [] if self.worst is None else [self.worst])
        return best_of(cases, lambda case: -validated_quality(case))


NO_SETTINGS = ComparisonSettings()
SETTINGS = tuple(item.name for item in fields(ComparisonSettings))


def validation_result(row: Row) -> Estimate | None:
    """Return the mean validation result after the last round, or None if no run has one."""
    return row.metrics.get(row.metric.key.replace(TEST, VALIDATION))


def validated_quality(row: Row) -> float:
    """Return a number by which table rows are ranked by their validation result: the higher, the better."""
    return row.quality(validation_result(row))


def best_of(rows: Sequence[Row], quality: Callable[[Row], float]) -> Row:
    """Return the first of the table rows whose `quality` is the highest up to rounding."""
    return rows[levels(list(map(quality, rows))).index(0)]


def _choices(
    runs: Sequence[Any], compared: Sequence[str], axis: str, value: Callable[[Row], float], by: str | None = None
) -> list[Choice]:
    """Choose a value of the setting `axis` for each combination of values of the settings `compared`.

    The value with the highest `value(table row)` is chosen, or the first one if all are -inf. `by` is the name of the
    metric to compare.
    """
    choices = []
    for row in rows_of(runs, compared):
        candidates = rows_of(row.runs, [axis], by)
        chosen = best_of(candidates, value)
        choices.append(Choice(candidates, chosen, value(chosen) > -math.inf))
    return choices
