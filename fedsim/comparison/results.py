"""The result of each run of a comparison, and the files `results.csv` and `curves.csv`."""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.comparison.axes import label
from fedsim.comparison.folder import GridFolder
from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.config.experiment import Experiment
from fedsim.records.progress import Progress, progress_of, reached
from fedsim.records.record import RoundRecord, mean_staleness

LAST_ROUND = ("test_loss", "train_loss", "attack_success")  # numbers of a record that are metrics of the run


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
    def read(cls, run: PlannedRun, folder: GridFolder, kept: bool = True) -> RunResult:
        """Read the result of a run from the folder of its comparison."""
        error = folder.error(run)
        if error is None and not folder.is_finished(run):
            error = "its records are not complete"
        line = error.strip().partition("\n")[0] if error is not None else None
        path, history = folder.run_folder(run), folder.history(run)
        return cls(run.id, run.point, run.experiment, history, line, path if kept else None, folder.grid.target)

    @property
    def test_accuracy(self) -> float:
        """Accuracy after the last round."""
        return self.history[-1]["test_accuracy"]

    @property
    def best_accuracy(self) -> float:
        """The highest accuracy after any round."""
        return max(record["test_accuracy"] for record in self.history)

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return math.fsum(second for record in self.history for second in record["seconds"].values())

    @functools.cached_property
    def progress(self) -> list[Progress]:
        """Rounds, virtual seconds, updates and arrivals after each round."""
        return progress_of(self.history, self.experiment.resolved())

    @property
    def is_timed(self) -> bool:
        """Whether the run had a virtual clock."""
        return bool(self.progress) and self.progress[-1].virtual_seconds is not None

    @property
    def declared(self) -> dict[str, float]:
        """The numbers that plugs added to the record of the last round, by name."""
        return _declared(self.history[-1]) if self.history else {}

    @functools.cached_property
    def metrics(self) -> dict[str, float | None]:
        """The numbers of a finished run by name, such as `test_accuracy` and `seconds`; empty for a failed run.

        `..._to_target` are the rounds, virtual seconds, updates and arrivals to the target; None if it was not reached.
        """
        if self.error is not None:
            return {}
        last = self.history[-1]
        found = {"test_accuracy": self.test_accuracy, "best_accuracy": self.best_accuracy}
        found |= {name: last.get(name) for name in LAST_ROUND}
        found |= {"seconds": self.seconds, **self.declared}
        if self.is_timed:
            found |= {**self.progress[-1]._asdict(), "staleness": mean_staleness(self.history)}
            del found["round"]
        found = {name: value for name, value in found.items() if value is not None}
        if self.target is not None:
            accuracies = [record["test_accuracy"] for record in self.history]
            there = reached(accuracies, self.progress, self.target)
            scales = there or [None] * len(Progress._fields)
            names = ["rounds", *Progress._fields[1:]]
            found |= {f"{name}_to_target": value for name, value in zip(names, scales, strict=True)}
        return found


def _declared(record: RoundRecord) -> dict[str, float]:
    return {f"metrics.{name}": value for name, value in record.metrics.items()}


def names_in(metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics that any of these has."""
    return list(dict.fromkeys(name for each in metrics for name in each))


def results_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """Return one row per run: its point and its metrics; cells are empty if the run has no such number."""
    names = names_in(run.metrics for run in runs)
    rows = [["id", *grid.axes, *names, "error"]]
    rows += [[run.id, *map(label, run.point.values()), *map(run.metrics.get, names), run.error] for run in runs]
    return to_csv(rows)


def curves_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """Return one row per run and round; cells are empty if the round has no such number."""
    declared = names_in(_declared(record) for run in runs for record in run.history)
    names = ["test_accuracy", *LAST_ROUND, *declared]
    rows = [["id", *grid.axes, *Progress._fields, *names, "seconds"]]
    for run in runs:
        point = [run.id, *map(label, run.point.values())]
        for progress, record in zip(run.progress, run.history, strict=True):
            values = {**record, **_declared(record)}
            rows.append([*point, *progress, *map(values.get, names), math.fsum(record["seconds"].values())])
    return to_csv(rows)


def to_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
