"""The runs of a comparison, with the statistics over seeds."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.comparison.axes import shape_of
from fedsim.comparison.leaderboard import Leaderboard, leaderboard
from fedsim.comparison.rows import (
    NO_SETTINGS,
    Choice,
    ComparisonSettings,
    Group,
    Pair,
    Row,
    canonical,
    groups_of,
    score_of,
)
from fedsim.hints.attributes import HintingAttributes
from fedsim.records.reader import Run
from fedsim.records.record import Metric


@dataclass(frozen=True)
class ComparedRuns(HintingAttributes):
    """Runs of a comparison, with the properties that tables and figures need. `Comparison` describes the attributes."""

    name: str
    axes: dict[str, list[Any]]
    runs: list[Run]
    settings: ComparisonSettings = NO_SETTINGS
    folder: Path | None = None
    left_out: list[str] = field(default_factory=list)
    whole: dict[str, list[Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def shape(self) -> str:
        """The number of values of each compared setting, such as "3 aggregate.rule x 2 seed"."""
        return shape_of(self.axes)

    @property
    def compared(self) -> list[str]:
        """The keys of the compared settings, without the seed and the settings of `tune` and `worst`."""
        return self.settings.compared(list(self.axes))

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Return the table of results, with one row for each combination of compared values."""
        return self.settings.combined(self.runs, list(self.axes))

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Return the table rows in groups, such as all rules under the same attack.

        The rows of a group differ only in the first compared setting.
        """
        return groups_of(self.rows)

    @property
    def summary(self) -> list[Row]:
        """The table of results, with one row for each combination of compared values, sorted by group."""
        return [row for group in self.groups for row in group]

    @property
    def pairs(self) -> list[Pair]:
        """All pairs of table rows of a group that have results for a common seed, with their differences."""
        pairs = [pair for group in self.groups for pair in itertools.combinations(group, 2)]
        return [Pair(*pair, gap) for pair in pairs if (gap := pair[1].difference_to(pair[0])) is not None]

    @functools.cached_property
    def choices(self) -> list[Choice]:
        """The value that `tune` has chosen for each combination of the other compared values."""
        return self.settings.of(self.runs, list(self.axes))[1]

    def style_of(self, key: str, position: int) -> int:
        """Return the number of the line style for a compared value, by its index among the values of `key`.

        If only some values are drawn, their lines look as in the figure of the whole comparison.
        """
        value = canonical(self.axes[key][position])
        return [canonical(each) for each in self.whole.get(key, self.axes[key])].index(value)

    @property
    def metric(self) -> Metric:
        """The metric by which the runs are compared."""
        return self.rows[0].metric

    @property
    def test(self) -> Metric:
        """The metric to which `target` refers: the test accuracy, or the test loss for a task without accuracy."""
        return score_of(self.runs)

    @property
    def failed(self) -> list[Run]:
        """The runs that failed or did not finish."""
        return [run for run in self.runs if run.error is not None]

    @property
    def diverged(self) -> int:
        """Number of finished runs that diverged."""
        return sum(run.finished and run.history[-1].diverged is not None for run in self.runs)

    @functools.cached_property
    def leaderboard(self) -> Leaderboard | None:
        """Leaderboard of the values of the first compared setting, ranked by their results for all other settings.

        None if there are fewer than 3 values to rank, or fewer than 5 combinations of the other settings.
        """
        return leaderboard(self.groups)
