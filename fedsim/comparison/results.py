"""The result of each run of a comparison, and the files `results.csv` and `curves.csv`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.comparison.folder import GridRecords
from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.config.experiment import Experiment
from fedsim.records.axes import label
from fedsim.records.combinations import canonical
from fedsim.records.dataframe import round_rows
from fedsim.records.history import read_history
from fedsim.records.progress import Progress, progress_of
from fedsim.records.reader import error_line
from fedsim.records.record import RoundRecord
from fedsim.records.run_metrics import LAST_ROUND, best_score, plug_metrics, run_metrics
from fedsim.system.files import to_csv


@dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
        id, point, experiment: of the run, as planned.
        history: one record per round; of a failed run, the rounds before the failure.
        error: why the run failed, in one line; None if it did not fail.
        folder: of the records, if they are kept.
        target: the test accuracy whose time is reported, as of the grid.
    """

    id: str
    point: dict[str, Any]
    experiment: Experiment
    history: list[RoundRecord]
    error: str | None
    folder: Path | None
    target: float | None = None

    @classmethod
    def read(cls, run: PlannedRun, folder: GridRecords, kept: bool = True) -> RunResult:
        """Read the result of a run from the folder of its comparison."""
        error, history = folder.error(run), read_history(folder.run_folder(run))
        if error is None and not folder.is_finished(run):
            error = "its records are not complete"
        line = error_line(error) if error is not None else None
        path, target = folder.run_folder(run), folder.grid.settings.target
        return cls(run.id, run.point, run.experiment, history, line, path if kept else None, target)

    @property
    def finished(self) -> bool:
        """Whether it has ended, and did not fail."""
        return self.error is None

    @property
    def place(self) -> dict[str, str]:
        """Its point, with values that can be compared and hashed."""
        return {key: canonical(value) for key, value in self.point.items()}

    @property
    def test_accuracy(self) -> float | None:
        """The test accuracy after the last round; None of a task without accuracy."""
        return self.history[-1].test_accuracy

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy after any round; None of a task without accuracy."""
        return None if self.test_accuracy is None else best_score(self.history)

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return sum(record.total_seconds or 0.0 for record in self.history)

    @functools.cached_property
    def progress(self) -> list[Progress]:
        """Rounds, virtual seconds, updates and arrivals after each round."""
        return progress_of(self.history, self.experiment.resolved())

    @functools.cached_property
    def metrics(self) -> dict[str, float | None]:
        """The numbers of a finished run by name, see `run_metrics`; empty if it is not finished."""
        return run_metrics(self.history, self.progress, self.target) if self.finished else {}


def names_in(metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics that any of these has."""
    return list(dict.fromkeys(name for each in metrics for name in each))


def results_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """Return one row per run: its point and its metrics; cells are empty if the run has no such number."""
    names = names_in(run.metrics for run in runs)
    rows: list[list[Any]] = [["id", *grid.axes, *names, "error"]]
    rows += [[run.id, *map(label, run.point.values()), *map(run.metrics.get, names), run.error] for run in runs]
    return to_csv(rows)


def curves_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """Return one row per run and round; cells are empty if the round has no such number."""
    declared = names_in(plug_metrics(record) for run in runs for record in run.history)
    names = ["test_accuracy", *LAST_ROUND, *declared]
    rows: list[list[Any]] = [["id", *grid.axes, *Progress._fields, *names, "seconds"]]
    for run in runs:
        point = [run.id, *map(label, run.point.values())]
        for progress, record in zip(run.progress, run.history, strict=True):
            values = {**record, **plug_metrics(record)}
            rows.append([*point, *progress, *map(values.get, names), record.total_seconds])
    return to_csv(rows)


def tidy_rows(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return one row per run and round: its point, and the numbers of the round as of `Result.to_dataframe`."""
    return [{**_cells(run), **row} for run in runs for row in round_rows(run.history)]


def run_rows(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return one row per run: its point, its metrics as in `results.csv`, and its error."""
    return [{**_cells(run), **run.metrics, "error": run.error} for run in runs]


def _cells(run: RunResult) -> dict[str, Any]:
    """Return the id and the point of a run; a list or a table as its short name."""
    short = {key: label(value) if isinstance(value, (list, dict)) else value for key, value in run.point.items()}
    return {"id": run.id, **short}
