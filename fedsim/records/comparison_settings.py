"""The settings of a comparison besides its axes: by which number it compares, along which axes it chooses a value.

Along an axis, the value with the best validation result may be chosen, or the worst case. A choice leaves the runs of
one value for each combination of the compared axes. These runs are compared as if the axis did not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import StrictBool

from fedsim.core.confidence import Estimate
from fedsim.errors import plural
from fedsim.records.combinations import SEED, Combination, combinations
from fedsim.records.record import Number

TEST, VALIDATION = "test_", "validation_"  # how the names of results begin


@dataclass(frozen=True)
class Choice:
    """The values of an axis for one combination of the compared axes.

    Attributes:
        candidates: one combination for each value, in the order of the runs.
        chosen: the one whose runs remain.
        decided: whether any value has a result of every seed; if not, the runs of the first value remain.
    """

    candidates: list[Combination]
    chosen: Combination
    decided: bool


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """The settings of a comparison: the keys of a table [grid], and of `grid.json`, that are not axes.

    Attributes:
        target: the test accuracy, or test loss of a task without accuracy, the time until which is reported, and from
            which value of an axis of numbers on it is missed.
        tune: the value with the best mean validation result over the seeds is chosen, among those that have a result of
            every seed; of each value the worst result along the axis `worst` counts, if there is one.
        worst: then the value with the worst mean is chosen, of the number that runs are compared by. A value with a run
            that failed, diverged or has no result is the worst.
        by: this number, see `metric_called`, perhaps with a sign that says which value is better; None: the test
            accuracy, or the test loss of a task without accuracy.
        skip_invalid: leave out the combinations that are invalid experiments; None and false: refuse the comparison.
        heatmap: the two axes of the heat map, "down,across"; None: the first two.
    """

    target: Number = None
    tune: str | None = None
    worst: str | None = None
    by: str | None = None
    skip_invalid: StrictBool | None = None
    heatmap: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}

    def known_on(self, axes: Container[str]) -> ComparisonSettings:
        """The same without the axes that a grid does not have."""
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
        """The axes that are compared: all but the seed and those along which values are chosen."""
        return [axis for axis in axes if axis != SEED and axis not in self.headings]

    def heat_axes(self, axes: Sequence[str]) -> tuple[str, str] | None:
        """The two axes of `heatmap`, if both are compared, and neither is the first, of which a cell has the best."""
        down, _, across = (self.heatmap or "").partition(",")
        return (down, across) if down != across and {down, across} <= set(self.compared(axes)[1:]) else None

    def combined(self, runs: Sequence[Any], axes: Sequence[str]) -> list[Combination]:
        """The combinations that are compared, of the runs that remain."""
        return combinations(self.of(runs, axes)[0], self.compared(axes), self.by)

    def of(self, runs: Sequence[Any], axes: Sequence[str]) -> tuple[list[Any], list[Choice]]:
        """The runs that remain, and the choices along the axis `tune`, one for each combination of the others."""
        compared, left, tuned = self.compared(axes), list(runs), list[Choice]()
        if self.tune is not None:
            tuned = _choices(left, compared, self.tune, lambda each: validated_quality(self.validated(each)))
            left = [run for choice in tuned for run in choice.chosen.runs]
        if self.worst is not None:
            worst = _choices(left, compared, self.worst, lambda each: -each.quality(each.score), self.by)
            left = [run for choice in worst for run in choice.chosen.runs]
        return left, tuned

    def undecided(self, tuned: Sequence[Choice]) -> list[str]:
        """A sentence if for some combinations no value of the axis `tune` could be chosen."""
        if not (count := sum(not choice.decided for choice in tuned)):
            return []
        return [
            f"{self.tune}: for {count} of {plural(len(tuned), 'combination')} no value was chosen, since none has a "
            "validation result of every seed; the first value is shown"
        ]

    def validated(self, candidate: Combination) -> Combination:
        """Of the runs of one value of the axis `tune`, those whose validation result counts: all, or the worst case."""
        cases = combinations(candidate.runs, [] if self.worst is None else [self.worst])
        return min(cases, key=validated_quality)


NO_SETTINGS = ComparisonSettings()
SETTINGS = tuple(each.name for each in fields(ComparisonSettings))


def validation_result(combination: Combination) -> Estimate | None:
    """The mean validation accuracy over the seeds after the last round, or loss of a task without accuracy."""
    return combination.metrics.get(combination.metric.key.replace(TEST, VALIDATION))


def validated_quality(combination: Combination) -> float:
    """The higher, the better the validation result; see `Combination.quality`."""
    return combination.quality(validation_result(combination))


def _choices(
    runs: Sequence[Any],
    compared: Sequence[str],
    axis: str,
    value: Callable[[Combination], float],
    by: str | None = None,
) -> list[Choice]:
    """For each combination of the compared axes, the value of `axis` with the highest `value`, the first of equals."""
    found = []
    for each in combinations(runs, compared):
        candidates = combinations(each.runs, [axis], by)
        chosen = max(candidates, key=value)
        found.append(Choice(candidates, chosen, value(chosen) > -math.inf))
    return found
