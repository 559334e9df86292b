"""What came of each run of a comparison, and the tables `results.csv` and `curves.csv`."""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.comparison.axes import label
from fedsim.comparison.folder import GridFolder
from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.experiment import Experiment
from fedsim.records import RoundRecord
from fedsim.runs.progress import Progress, mean_staleness, progress_of, reached

ATTACK_SUCCESS = "attack_success"  # a key of records where there is an attack that has it
CLOCK = ("virtual_seconds", "updates", "trips", "staleness")  # columns where there is a clock
TO_TARGET = tuple(f"{name}_to_target" for name in ("rounds", "virtual_seconds", "updates", "trips"))


@dataclass(frozen=True)
class RunResult:
    """What came of one run.

    Attributes:
        id, point, experiment: of the run, as planned.
        history: one record per round; of a failed run, as far as it came.
        error: why it failed, in one line; None if it did not.
        folder: of its records, if they are kept.
    """

    id: str
    point: dict[str, Any]
    experiment: Experiment
    history: list[RoundRecord]
    error: str | None
    folder: Path | None

    @classmethod
    def read(cls, run: PlannedRun, folder: GridFolder, kept: bool = True) -> RunResult:
        """What the folder of a comparison says of a run."""
        error = folder.error(run)
        if error is None and not folder.is_finished(run):
            error = "its records are not complete"
        path = folder.run_folder(run)
        line = error.strip().partition("\n")[0] if error is not None else None
        return cls(path.name, run.point, run.experiment, folder.history(run), line, path if kept else None)

    @property
    def test_accuracy(self) -> float:
        """Accuracy after the last round."""
        return self.history[-1]["test_accuracy"]

    @property
    def best_accuracy(self) -> float:
        """The highest accuracy after any round."""
        return max(record["test_accuracy"] for record in self.history)

    @property
    def attack_success(self) -> float | None:
        """Success rate of the attack after the last round, where there is such a thing."""
        return self.history[-1].get(ATTACK_SUCCESS)

    @property
    def seconds(self) -> float:
        """Time of all rounds."""
        return math.fsum(sum(record["seconds"].values()) for record in self.history)

    @functools.cached_property
    def progress(self) -> list[Progress]:
        """How far it was after each round, on all scales."""
        return progress_of(self.history, self.experiment.resolved())

    @property
    def is_timed(self) -> bool:
        """Whether it ran on a virtual clock."""
        return bool(self.progress) and self.progress[-1].virtual_seconds is not None

    @property
    def staleness(self) -> float | None:
        """Mean of all that was applied; None of a synchronous run."""
        return mean_staleness(self.history)

    def reached(self, target: float) -> Progress | None:
        """How far it was after the first round with at least this test accuracy; None if there is none."""
        return reached([record["test_accuracy"] for record in self.history], self.progress, target)


def results_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """One row per run: its point, and what it came to; empty cells where it failed, or never reached the target."""
    good = [run for run in runs if run.error is None]
    figures = ["test_accuracy", "best_accuracy", "test_loss", "train_loss", "seconds"]
    figures += [ATTACK_SUCCESS] if any(run.attack_success is not None for run in good) else []
    figures += CLOCK if any(run.is_timed for run in good) else []
    figures += TO_TARGET if grid.target is not None else []
    rows = [["id", *grid.axes, *figures, "error"]]
    for run in runs:
        found = {} if run.error is not None else _figures(run, grid.target)
        rows.append([run.id, *map(label, run.point.values()), *map(found.get, figures), run.error])
    return to_csv(rows)


def _figures(run: RunResult, target: float | None) -> dict[str, Any]:
    last = run.history[-1]
    found: dict[str, Any] = {name: last[name] for name in ("test_accuracy", "test_loss", "train_loss")}
    found |= {"best_accuracy": run.best_accuracy, "seconds": run.seconds, ATTACK_SUCCESS: run.attack_success}
    found |= dict(zip(CLOCK, [*run.progress[-1][1:], run.staleness], strict=True))
    at_target = run.reached(target) if target is not None else None
    return found | (dict(zip(TO_TARGET, at_target, strict=True)) if at_target else {})


def curves_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """One row per run and round, of failed runs as far as they came; cells are empty where there is no such number."""
    metrics = ("test_accuracy", "test_loss", "train_loss", ATTACK_SUCCESS)
    rows = [["id", *grid.axes, *Progress._fields, *metrics, "seconds"]]
    for run in runs:
        point = [run.id, *map(label, run.point.values())]
        for progress, record in zip(run.progress, run.history, strict=True):
            seconds = math.fsum(record["seconds"].values())
            rows.append([*point, *progress, *map(record.get, metrics), seconds])
    return to_csv(rows)


def to_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
