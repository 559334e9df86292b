"""The combinations of the values on a grid's axes: statistics and curves over their seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedsim.core.confidence import Estimate, estimate, mean_and_half_width, on_common_grid
from fedsim.records.metric import Metric
from fedsim.records.progress import places_on
from fedsim.records.record import metric_called, score_in

SEED = "seed"  # the axis over which results are averaged


def canonical(value: Any) -> str:
    """Return a text that identifies a value of an axis, or a point; 1, 1.0 and true are different."""
    return json.dumps(value, sort_keys=True)


@dataclass(frozen=True, eq=False)
class Combination:
    """The runs that differ in the seed alone. Its statistics are those of the finished runs.

    Attributes:
        place: the place of its runs on each axis except the seed.
        runs: of all seeds, finished or not: each a `RunResult` of a comparison or a `GridRun` of a stored grid.
        metric: by which all combinations are compared: see `score_of`.
    """

    place: tuple[Any, ...]
    runs: list[Any]
    metric: Metric

    @property
    def finished(self) -> list[Any]:
        return [run for run in self.runs if run.finished]

    @cached_property
    def metrics(self) -> dict[str, Estimate | None]:
        """The mean of each metric over the runs that have it; None if no run has a value."""
        names = dict.fromkeys(name for run in self.finished for name in run.metrics)
        values = {name: [run.metrics.get(name) for run in self.finished] for name in names}
        return {name: estimate([each for each in found if each is not None]) for name, found in values.items()}

    @property
    def score(self) -> Estimate | None:
        """The mean over the seeds of the compared number in the last round; None if no run has it."""
        return estimate(list(self._scores.values()))

    @property
    def diverged(self) -> int:
        """How many of the finished runs diverged: their results are those of an earlier model."""
        return sum(run.history[-1].diverged is not None for run in self.finished)

    @property
    def counted(self) -> int:
        """How many runs count in the score."""
        return self.score.n if self.score else 0

    def is_complete(self, mean: Estimate | None) -> bool:
        """Whether each run counts in this mean over the seeds, and none of them failed or diverged."""
        return mean is not None and math.isfinite(mean.mean) and mean.n == len(self.runs) and not self.diverged

    def quality(self, mean: Estimate | None) -> float:
        """Return how good the combination is by a mean over the seeds of its metric, or of the validation's.

        The higher, the better. It is -inf, worse than any other, unless the mean is complete, and if no value of the
        metric is better than another. All that ranks, chooses or marks combinations goes by this number.
        """
        if mean is None or not self.is_complete(mean) or self.metric.better is None:
            return -math.inf
        return self.metric.sign * mean.mean

    def difference_to(self, other: Combination) -> Estimate | None:
        """The mean over seeds of the score minus that of another combination, over the seeds that both have.

        Runs of one seed share their start, cohorts and batches, so the difference varies less than either score.
        """
        ours, theirs = self._scores, other._scores
        return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])

    @cached_property
    def _scores(self) -> dict[Hashable, float]:
        values = {run.place.get(SEED): self.metric.read(run.history[-1]) for run in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}


def combinations(runs: Iterable[Any], axes: Sequence[str], by: str | None = None) -> list[Combination]:
    """The combinations of the values on these axes, without the seed, in their order; `by` is that of `score_of`."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    runs = list(runs)
    for run in runs:
        found.setdefault(tuple(run.place[axis] for axis in axes), []).append(run)
    metric = score_of(runs, by)
    return [Combination(place, each, metric) for place, each in found.items()]


def score_of(runs: Iterable[Any], by: str | None = None) -> Metric:
    """The number that runs are compared by: `by`, see `metric_called`, or else the test result, see `score_in`."""
    return score_in(record for run in runs for record in run.history) if by is None else metric_called(by)


def groups_of(combined: Iterable[Combination]) -> list[list[Combination]]:
    """The combinations that differ in the first axis only, such as all rules under one attack."""
    groups: dict[tuple[Any, ...], list[Combination]] = {}
    for each in combined:
        groups.setdefault(each.place[1:], []).append(each)
    return list(groups.values())


def time_to_target(metrics: Mapping[str, Estimate | None], finished: int, timed: bool) -> tuple[str, float | None]:
    """The mean virtual seconds, or rounds, until the target, as text and as a number.

    The text says how many of the finished runs reached the target if not all did, and that it counts rounds if others
    are `timed` in virtual seconds.
    """
    rounds, seconds = metrics.get("rounds_to_target"), metrics.get("virtual_seconds_to_target")
    if not rounds:
        return "not reached" if finished else "", None
    time = seconds or rounds
    unit = " rounds" if timed and not seconds else ""
    share = f" ({rounds.n} of {finished})" if rounds.n < finished else ""
    return f"{time.amount()}{unit}{share}", time.mean


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
    """The mean curve of a metric on a scale of `SCALES`; None if it is empty."""
    curves = [each for run in runs if (each := _curve(run, metric, scale))[0].size]
    if not curves:
        return None
    x, values = on_common_grid(curves)
    return MeanCurve(curves, x, values, *mean_and_half_width(values)) if x.size else None


def _curve(run: Any, metric: Metric, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """The places and the values of all rounds that have both."""
    points = list(zip(places_on(scale, run.progress, run.history), map(metric.read, run.history), strict=True))
    x, y = np.array([point for point in points if None not in point], dtype=float).reshape(-1, 2).T
    return x, y
