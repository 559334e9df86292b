"""The compared number against the values of an axis of numbers, and the value from which on a target is missed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedsim.core.confidence import mean_and_half_width
from fedsim.records.record import Metric
from fedsim.records.rows import MeanCurve, Row

FEWEST_VALUES = 3  # from which there is a curve


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
    combinations: list[Row]

    @property
    def mean(self) -> MeanCurve | None:
        """The mean of the compared number in the last round, at the values where it is complete; None without any."""
        found = zip(self.values, self.combinations, strict=True)
        known = [(value, score.values) for value, each in found if (score := each.score) and each.is_complete(score)]
        if not known:
            return None
        x, values = np.array([float(value) for value, _ in known]), np.array([scores for _, scores in known]).T
        return MeanCurve([(x, of_seed) for of_seed in values], x, values, *mean_and_half_width(values))


def value_curves(rows: Sequence[Row], key: str) -> list[ValueCurve]:
    """The curves along one of the compared axes, one for each combination of the values on the others.

    Args:
        rows: of a comparison.
        key: the axis of numbers along which the curves run.
    """
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        others = tuple(place for axis, place in zip(row.point, row.place, strict=True) if axis != key)
        groups.setdefault(others, []).append(row)
    ascending = [sorted(group, key=lambda row: row.point[key]) for group in groups.values()]
    return [ValueCurve([row.point[key] for row in group], group) for group in ascending]


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


def _listed(values: Sequence[float]) -> str:
    return ", ".join(map(str, values))
