"""The results of a comparison: its runs and its rows, just run or read from a folder."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsim.comparison.leaderboard import Leaderboard, leaderboard
from fedsim.comparison.tables import answer_text, comparison_text
from fedsim.config.source_catalog import component_tables
from fedsim.core.input_limits import leaves_of
from fedsim.errors import ExperimentError, RecordError, cut, plural, show
from fedsim.records.axes import label, shape_of
from fedsim.records.history import METRICS
from fedsim.records.numbers import round_rows, to_frame
from fedsim.records.reader import COMPARISON, Run, places_in, read_comparison_file
from fedsim.records.record import Metric
from fedsim.records.rows import (
    NO_SETTINGS,
    SEED,
    Choice,
    ComparisonSettings,
    Group,
    Row,
    canonical,
    groups_of,
    score_of,
)
from fedsim.system.files import is_file, is_outside

if TYPE_CHECKING:
    from pandas import DataFrame

RUN = "run"  # the axis of runs that are no comparison
NEUTRAL = ("name", SEED, "device", "engine", "processes", "data.root", "records")  # keys that name no line


@dataclass(frozen=True)
class Comparison:
    """A comparison, just run or read from its folder.

    Attributes:
        name: of the experiment.
        axes: the values of each key that is varied.
        runs: the result of each run; see `Run`.
        settings: the settings of the comparison.
        folder: of the records, if they are kept.
        left_out: a line for each problem of the invalid combinations that have no run.
    """

    name: str
    axes: dict[str, list[Any]]
    runs: list[Run]
    settings: ComparisonSettings = NO_SETTINGS
    folder: Path | None = None
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """Read the comparison in a folder; no experiment is made, so nothing is imported.

        Raises RecordError (ExperimentError for invalid TOML) if anything in it cannot come from a comparison.
        """
        path, runs, points, folders = folder / COMPARISON, list[Run](), set[str](), set[Path]()
        file = read_comparison_file(path)
        known = places_in(file.axes)
        for index, entry in enumerate(file.runs):
            where, run_folder = f"{path}: runs.{index}", folder / entry.folder
            for axis, places in known.items():
                if axis not in entry.point:
                    raise RecordError(f"{where}.point: has no value of the axis {show(axis)}")
                if canonical(entry.point[axis]) not in places:
                    raise RecordError(f"{where}.point: {show(entry.point[axis])} is not on the axis {show(axis)}")
            place = {axis: places[canonical(entry.point[axis])] for axis, places in known.items()}
            if canonical(place) in points:
                raise RecordError(f"{where}.point: another run has the same")
            if is_outside(run_folder, folder):
                raise RecordError(f"{where}.folder = {show(entry.folder)}: must lie in the comparison's folder")
            if run_folder.resolve() in folders:
                raise RecordError(f"{where}.folder = {show(entry.folder)}: is another run's")
            points.add(canonical(place))
            folders.add(run_folder.resolve())
            target = file.settings.target
            runs.append(Run.read(run_folder, id=entry.id, point=entry.point, place=place, target=target))
        if not any(run.history for run in runs):
            raise RecordError(f"{folder}: no round of its {len(runs)} runs is finished yet")
        return cls(file.name, file.axes, runs, file.settings.known_on(file.axes), folder)

    @property
    def shape(self) -> str:
        """The number of values on each axis: `3 aggregate.rule x 2 seed`."""
        return shape_of(self.axes)

    @property
    def compared(self) -> list[str]:
        """The axes that are compared: all but the seed and those along which values are chosen."""
        return self.settings.compared(list(self.axes))

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Return the rows that are compared, in the order of their runs; see `Row`."""
        return self.settings.combined(self.runs, list(self.axes))

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Return the rows in groups that differ in the first axis only."""
        return groups_of(self.rows)

    @property
    def summary(self) -> list[Row]:
        """One row for each combination of the compared values, group by group; see `Row`."""
        return [row for group in self.groups for row in group]

    @functools.cached_property
    def choices(self) -> list[Choice]:
        """Return the choices along the axis `tune`, one for each combination of the others."""
        return self.settings.of(self.runs, list(self.axes))[1]

    @property
    def metric(self) -> Metric:
        """The number that is compared."""
        return self.rows[0].metric

    @property
    def test(self) -> Metric:
        """The test result, to which a target belongs."""
        return score_of(self.runs)

    @property
    def failed(self) -> list[Run]:
        """The runs that failed or are not finished."""
        return [run for run in self.runs if run.error is not None]

    @property
    def diverged(self) -> int:
        """How many of the finished runs diverged."""
        return sum(run.finished and run.history[-1].diverged is not None for run in self.runs)

    @property
    def answer(self) -> str:
        """The best value of the first axis in words, with its interval; empty if nothing is compared."""
        return answer_text(self)

    @property
    def table(self) -> str:
        """The answer, the summary and the leaderboard as text, as `fedsim compare` prints them."""
        return comparison_text(self)

    @functools.cached_property
    def leaderboard(self) -> Leaderboard | None:
        """Return the mean ranks of the first axis' values over all others.

        None with fewer than 3 values or 5 combinations.
        """
        return leaderboard(self)

    def to_dataframe(self, per: Literal["round", "run"] = "round") -> DataFrame:
        """Return the results as a pandas data frame with one row per run and round, or one row per run.

        The first columns are `id` and the axes; a list or a table on an axis is its short name. Rows of rounds have the
        columns of `Result.to_dataframe`, and those of runs the columns of `results.csv`: the numbers of the last
        round, and `error`. A failed run has its rounds before the failure. Raises MissingPackageError without pandas.
        """
        if per not in ("round", "run"):
            raise ExperimentError(f'per = {show(per)}: must be "round" or "run"')
        rows = []
        for run in self.runs:
            names = {axis: label(value) for axis, value in run.point.items() if isinstance(value, (list, dict))}
            numbers = round_rows(run.history) if per == "round" else [{**run.metrics, "error": run.error}]
            rows += [{"id": run.id, **run.point, **names, **row} for row in numbers]
        return to_frame(rows, "Comparison.to_dataframe")

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        where = f", in {self.folder}" if self.folder else ""
        count = plural(len(self.runs), "run")
        return f"Comparison({self.name}: {count} ({self.shape}){failed}{where}; see .table)"

    def _repr_html_(self) -> str:
        from fedsim.comparison.displays import comparison_html

        return comparison_html(self)


def read_records(folder: Path) -> Run | Comparison:
    """Return the run or the comparison in a folder.

    Raises RecordError (ExperimentError for invalid TOML) if it is neither, has no finished round, or is damaged.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; expected that of a run or of a comparison")
    if (folder / COMPARISON).is_file():
        return Comparison.read(folder)
    if not is_file(folder / METRICS):
        raise RecordError(f"{folder}: neither a run (it has no {METRICS}) nor a comparison (it has no {COMPARISON})")
    run = Run.read(folder)
    if not run.history:
        raise RecordError(f"{folder / METRICS}: no round is finished yet")
    return run


def comparison_of(runs: Sequence[Run]) -> Comparison:
    """Return single runs as a comparison of what distinguishes them; an unfinished run counts with its rounds so far.

    A run is named by the settings in which it differs from others, without the seed: "median", "krum, f=2, lr=0.1".
    Runs of one name are seeds of one line. If two of these have one seed, all runs are named by their folders.
    """
    names, seeds = _names_of(runs), [run.seed for run in runs]
    axes: dict[str, list[Any]] = {RUN: list(dict.fromkeys(names)), SEED: list(dict.fromkeys(seeds))}
    if len(axes[RUN]) == 1:
        del axes[RUN]
    drawn = []
    for run, name, seed in zip(runs, names, seeds, strict=True):
        point = {key: value for key, value in ((RUN, name), (SEED, seed)) if key in axes}
        place = {key: axes[key].index(value) for key, value in point.items()}
        drawn.append(Run(run.folder, run.experiment, run.history, id=name, point=point, place=place, counts=True))
    return Comparison(" and ".join(dict.fromkeys(run.name for run in runs)), axes, drawn, folder=runs[0].folder)


def _names_of(runs: Sequence[Run]) -> list[str]:
    leaves = [dict(leaves_of(run.experiment)) for run in runs]
    keys = [key for key in dict.fromkeys(key for table in leaves for key in table) if not _is_neutral(key)]
    differing = [key for key in keys if len({canonical(table.get(key)) for table in leaves}) > 1]
    components = {f"{place}.{table.named_by}" for place, table in component_tables().items()}

    def text(key: str, value: object) -> str:
        return label(value) if key in components else f"{key.rpartition('.')[2]}={label(value)}"

    names = [", ".join(text(key, table[key]) for key in differing if key in table) for table in leaves]
    same = Counter((name, run.seed) for name, run in zip(names, runs, strict=True))
    if max(same.values()) > 1:
        return [cut(run.folder.resolve().name) if run.folder else run.id for run in runs]
    return [name or runs[0].name for name in names]


def _is_neutral(key: str) -> bool:
    return key in NEUTRAL or key.partition(".")[0] in NEUTRAL
