"""Write and read the test results of individual workers in a run folder."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from fedsim.errors import RecordError, plural
from fedsim.records.history import read_file
from fedsim.rounds.worker_evaluation import WorkerResults
from fedsim.system.files import to_csv

MOST_BYTES = 2**28  # maximum size of a table that is read, much more than any run writes
LABELS = {"global": "global model", "personal": "personal model", "fine_tuned": "after local training"}


def workers_csv(results: WorkerResults) -> str:
    """Return the test results of individual workers as a CSV table with one line per worker."""
    scores = {"loss": results.loss, "accuracy": results.accuracy}
    columns = {
        f"{model}_{quantity}": scores[quantity][model]
        for model in results.loss
        for quantity in scores
        if model in scores[quantity]
    }
    rows = zip(results.workers, results.samples, *columns.values(), strict=True)
    return to_csv([["worker", "samples", *columns], *rows])


def read_csv(path: Path) -> WorkerResults:
    """Read a table that `workers_csv` wrote. Raises RecordError if the file is not such a table."""
    text = read_file(path, MOST_BYTES).decode(errors="replace")
    try:
        rows = list(csv.reader(io.StringIO(text)))
        head, (numbers, samples, *columns) = rows[0][2:], zip(*rows[1:], strict=True)
        values = {name: [float(cell) for cell in column] for name, column in zip(head, columns, strict=True)}
        loss, accuracy = (
            {model: values[f"{model}_{quantity}"] for model in LABELS if f"{model}_{quantity}" in values}
            for quantity in ("loss", "accuracy")
        )
        workers, counts = list(map(int, numbers)), list(map(int, samples))
    except (ValueError, IndexError, KeyError, csv.Error):
        raise RecordError(f"{path}: is not a CSV table of workers with their samples, losses and accuracies") from None
    return WorkerResults(_round_of(path), workers, counts, loss, accuracy)


def newest_table(folder: Path, most: int | None = None) -> Path | None:
    """Return the path of the newest CSV table of test results of individual workers, or None if there is none.

    Tables of rounds after `most` are ignored.
    """
    tables = sorted(path for path in folder.glob("workers-*.csv") if re.fullmatch(r"workers-\d{5,9}", path.stem))
    usable = [path for path in tables if most is None or _round_of(path) <= most]
    return usable[-1] if usable else None


def _round_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def workers_line(results: WorkerResults) -> str:
    """Return one line of text: for each model, the mean test result of all workers and of the worst 10 percent.

    Example: "4 workers: global model 0.6525 (worst 10 percent 0.0625), personal model 0.8252 (worst 10 percent 0.6565)"
    """
    figures, score = results.metrics(), results.score_name
    parts = [
        f"{LABELS[model]} {figures[f'{model}_worker_{score}_mean']:.4f} "
        f"(worst 10 percent {figures[f'{model}_worker_{score}_worst10']:.4f})"
        for model in results.scores
    ]
    return f"{plural(len(results.workers), 'worker')}: {', '.join(parts)}"
