"""What came of each run of a comparison, and the table `results.csv`."""

from __future__ import annotations

import csv
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

ATTACK_SUCCESS = "attack_success"  # a key of records where there is an attack that has it


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


def results_csv(grid: Grid, runs: Sequence[RunResult]) -> str:
    """One row per run: its point, and what it came to; empty cells where it failed."""
    attacked = any(run.error is None and run.attack_success is not None for run in runs)
    head = ["id", *grid.axes, "test_accuracy", "best_accuracy", "test_loss", "train_loss", "seconds"]
    rows = [[*head, *([ATTACK_SUCCESS] if attacked else []), "error"]]
    for run in runs:
        figures: list[Any] = [None] * (6 if attacked else 5)
        if run.error is None:
            last = run.history[-1]
            figures = [last["test_accuracy"], run.best_accuracy, last["test_loss"], last["train_loss"], run.seconds]
            figures += [run.attack_success] if attacked else []
        rows.append([run.id, *map(label, run.point.values()), *figures, run.error])
    return to_csv(rows)


def to_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
