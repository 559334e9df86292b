"""The compared number against the values of an axis of numbers, and the value from which on a target is missed.

The missed targets are lines below the table of a comparison, and its file `breaking_points.csv`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedsim.core.confidence import mean_and_half_width
from fedsim.records.axes import label
from fedsim.records.combinations import Combination, MeanCurve, score_of
from fedsim.records.metric import Metric
from fedsim.system.files import to_csv

FEWEST_VALUES = 3  # from which there is a curve
MOST_LINES = 12  # below the table, of an axis


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether all values of an axis are finite numbers.

    >>> is_numeric([1, 2.5]), is_numeric([True, 1]), is_numeric([1, float("inf")]), is_numeric(["mean"])
    (True, False, False, False)
    """
    return all(
        isinstance(each, (int, float)) and not isinstance(each, bool) and abs(each) < math.inf for each in values
    )


def numeric_axes(axes: Mapping[str, Sequence[Any]], compared: Sequence[str]) -> list[str]:
    """The compared axes of three or more numbers."""
    return [key for key in compared if len(axes[key]) >= FEWEST_VALUES and is_numeric(axes[key])]


@dataclass(frozen=True, eq=False)
class ValueCurve:
    """The combinations that differ in one axis of numbers only.

    Attributes:
        values: of the axis, ascending.
        combinations: one for each value.
    """

    values: list[float]
    combinations: list[Combination]

    @property
    def mean(self) -> MeanCurve | None:
        """The mean of the compared number in the last round, at the values where it is complete; None without any."""
        found = zip(self.values, self.combinations, strict=True)
        known = [(value, score.values) for value, each in found if (score := each.score) and each.is_complete(score)]
        if not known:
            return None
        x, values = np.array([float(value) for value, _ in known]), np.array([scores for _, scores in known]).T
        return MeanCurve([(x, of_seed) for of_seed in values], x, values, *mean_and_half_width(values))


def value_curves(combined: Sequence[Combination], compared: Sequence[str], key: str) -> list[ValueCurve]:
    """The curves along one of the compared axes, one for each combination of the values on the others.

    Args:
        combined: the combinations of the compared axes.
        compared: the compared axes.
        key: the axis of numbers along which the curves run.
    """
    axis, groups = compared.index(key), dict[tuple[Any, ...], list[tuple[float, Combination]]]()
    for each in combined:
        other_values = (*each.place[:axis], *each.place[axis + 1 :])
        groups.setdefault(other_values, []).append((each.runs[0].point[key], each))
    ascending = [sorted(group, key=lambda pair: pair[0]) for group in groups.values()]
    return [ValueCurve([value for value, _ in group], [each for _, each in group]) for group in ascending]


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
        text += f", but{also} missed at {_listed(self.missed_below)}" if self.missed_below else ""
        return text + (f"; no result at {_listed(self.no_result)}" if self.no_result else "")


Found = tuple[dict[str, Any], BreakingPoint]  # the values on the other compared axes, and the breaking point


def breaking_point(curve: ValueCurve, test: Metric, target: float) -> BreakingPoint:
    """The breaking point of a curve for a test accuracy to reach, or a test loss of a task without accuracy."""
    reached, missed, unknown = list[float](), list[float](), list[float]()
    for value, each in zip(curve.values, curve.combinations, strict=True):
        mean = each.metrics.get(test.key)
        reaches = mean is not None and each.is_complete(mean) and test.reaches(mean.mean, target)
        (reached if reaches else missed if len(each.finished) == len(each.runs) else unknown).append(value)
    reached_at = max(reached, default=None)
    return BreakingPoint(
        breaks_at=min((value for value in missed if reached_at is None or value > reached_at), default=None),
        reached_at=reached_at,
        missed_below=[value for value in missed if reached_at is not None and value < reached_at],
        no_result=unknown,
    )


def breaking_points(grid: Any, runs: Sequence[Any]) -> dict[str, list[Found]]:
    """Return the breaking points along each axis of numbers, by its key; empty without a target.

    Args:
        grid: the axes and settings, a `Grid` or a `StoredGrid`.
        runs: of the comparison.
    """
    target = grid.settings.target
    if target is None:
        return {}
    test, combined, points = score_of(runs), grid.settings.combined(runs, list(grid.axes)), dict[str, list[Found]]()
    for key in numeric_axes(grid.axes, grid.compared):
        points[key] = []
        for curve in value_curves(combined, grid.compared, key):
            point = curve.combinations[0].runs[0].point
            others = {other: point[other] for other in grid.compared if other != key}
            points[key].append((others, breaking_point(curve, test, target)))
    return points


def breaking_lines(grid: Any, found: Sequence[Found]) -> list[str]:
    """Return a line for each of the first breaking points along an axis."""
    lines = [f"  {', '.join(map(label, others.values())) or grid.name}: {point.text}" for others, point in found]
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"  {more} more"]


def breaking_points_csv(grid: Any, points: Mapping[str, Sequence[Found]]) -> str:
    """Return one row per axis of numbers and combination of the values on the others."""
    rows: list[list[Any]] = [["key", *grid.compared, "target", *BreakingPoint._fields]]
    for key, found in points.items():
        for others, point in found:
            values = [label(others[other]) if other in others else None for other in grid.compared]
            lists = [" ".join(map(str, each)) for each in (point.missed_below, point.no_result)]
            rows.append([key, *values, grid.settings.target, point.breaks_at, point.reached_at, *lists])
    return to_csv(rows)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(map(str, values))
