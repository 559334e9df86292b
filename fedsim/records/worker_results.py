"""Write and read the test results of individual workers in a run folder."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsim.errors import RecordError, plural, with_name
from fedsim.records.history import read_file
from fedsim.records.numbers import to_frame
from fedsim.records.record import RoundRecord
from fedsim.system.files import to_csv

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_BYTES = 2**28  # maximum size of a table that is read, much more than any run writes
LABELS = {"global": "global model", "personal": "personal model", "fine_tuned": "after local training"}
WORST = 0.1  # fraction of workers in the mean over the worst workers
METRIC = re.compile(r"(metrics\.((global|fine_tuned|unseen)_)?)?worker_(accuracy|loss)(_\w+)?")

Tested = dict[str, tuple[float, float | None]]  # loss and accuracy by model; accuracy None if the task has none


@dataclass(frozen=True)
class WorkerResults:
    """Test results of each worker after one round.

    Attributes:
        round: number of the round.
        workers: IDs of the tested workers.
        samples: number of test samples of each worker.
        loss, accuracy: for each tested model ("global", "personal" or "fine_tuned"), a list with one value per worker.
            `accuracy` is empty if the task has no accuracy.
        unseen: results of the global model for owners of test samples who have no training samples. Their numbers
            follow the IDs of the workers. None: there are no such owners.
        names: name of each of the `workers`, such as a hospital. Empty: the data has no names.
    """

    round: int
    workers: list[int]
    samples: list[int]
    loss: dict[str, list[float]]
    accuracy: dict[str, list[float]]
    unseen: WorkerResults | None = None
    names: list[str | None] = field(default_factory=list)

    @classmethod
    def of(
        cls, round: int, samples: dict[int, int], tested: dict[int, Tested], names: Sequence[str | None] = ()
    ) -> WorkerResults:
        """Create a WorkerResults from the results of a round.

        Args:
            round: number of the round.
            samples: number of test samples by worker ID.
            tested: for each worker ID, the loss and accuracy of each tested model.
            names: names of all workers and unseen owners.
        """
        workers = sorted(tested)
        models = list(tested[workers[0]]) if workers else []
        loss = {model: [tested[worker][model][0] for worker in workers] for model in models}
        accuracies = {model: [tested[worker][model][1] for worker in workers] for model in models}
        known = {model: [value for value in values if value is not None] for model, values in accuracies.items()}
        accuracy = {model: values for model, values in known.items() if values}
        named = [names[worker] for worker in workers] if names else []
        return cls(round, workers, [samples[worker] for worker in workers], loss, accuracy, names=named)

    @property
    def labels(self) -> list[str]:
        """ID of each worker, with its name if there are names, such as "3 (hospital_2)"."""
        return [with_name(worker, name) for worker, name in zip_longest(self.workers, self.names)]

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return the columns of a table with one row per worker, by name: worker, perhaps name, samples, results."""
        scores = {"loss": self.loss, "accuracy": self.accuracy}
        results = {
            f"{model}_{quantity}": scores[quantity][model]
            for model in self.loss
            for quantity in scores
            if model in scores[quantity]
        }
        named = {"name": self.names} if self.names else {}
        return {"worker": self.workers, **named, "samples": self.samples, **results}

    def to_dataframe(self) -> DataFrame:
        """Return the results as a pandas data frame with one row per worker, and the columns of `workers-*.csv`.

        Raises MissingPackageError if pandas is not installed.
        """
        columns = self.columns()
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return to_frame(rows, "WorkerResults.to_dataframe")

    @property
    def score_name(self) -> Literal["accuracy", "loss"]:
        """Name of the metric by which workers are compared: "accuracy", or "loss" if the task has no accuracy."""
        return "accuracy" if self.accuracy else "loss"

    @property
    def scores(self) -> dict[str, list[float]]:
        """Accuracy of each worker (or loss, if the task has no accuracy), as a list for each tested model."""
        return self.accuracy or self.loss

    @property
    def used(self) -> str:
        """The tested model that workers would use: "personal" if there are personal models, otherwise "global"."""
        return "personal" if "personal" in self.loss else "global"

    def means(self) -> dict[str, float]:
        """Return `worker_accuracy` and `worker_loss`: means over the workers for the models that they would use."""
        scores = {"accuracy": self.accuracy, "loss": self.loss}
        return {f"worker_{name}": float(np.mean(values[self.used])) for name, values in scores.items() if values}

    def metrics(self) -> dict[str, float]:
        """Return statistics of the workers' scores by metric name, such as `worker_accuracy_gini`.

        The statistics are those of `describe`. Names without a prefix are for the workers' personal models, or for the
        global model if there are no personal models. Names with a prefix, such as `global_worker_accuracy_mean`, are
        for the global model or the fine-tuned models. Those with the prefix `unseen_` are for `unseen`.
        """
        tested = [(self, "", self.used)] * bool(self.workers)
        tested += [(self, f"{model}_", model) for model in self.scores if model != "personal"]
        tested += [(self.unseen, "unseen_", "global")] if self.unseen else []
        statistics = {
            f"{prefix}worker_{results.score_name}_{name}": value
            for results, prefix, model in tested
            for name, value in describe(results.scores[model], results.samples, results.score_name == "loss").items()
        }
        statistics.pop(f"worker_{self.score_name}_mean", None)  # it is in `means`
        return statistics


def describe(values: Sequence[float], samples: Sequence[int], lower_is_better: bool = False) -> dict[str, float]:
    """Return statistics of per-worker values by name.

    All workers have equal weight, except in `weighted_mean`, where a worker's weight is its number of `samples`.
    `worst10` is the mean of the worst 10 percent (at least one worker), which have the lowest values, or the highest if
    `lower_is_better` is true. The Gini coefficient is the mean absolute difference between two values, over all pairs,
    divided by twice the mean. It is 0 if all values are equal.

    >>> from fedsim.records.worker_results import describe
    >>> {name: round(value, 3) for name, value in describe([0.5, 1.0], samples=[30, 10]).items()}
    {'mean': 0.75, 'weighted_mean': 0.625, 'std': 0.25, 'worst10': 0.5, 'gini': 0.167}
    """
    ascending = np.sort(np.asarray(values, dtype=np.float64))
    n, mean = len(ascending), float(ascending.mean())
    pairs = float((2 * np.arange(1, n + 1) - n - 1) @ ascending)  # half the sum of all differences
    return {
        "mean": mean,
        "weighted_mean": float(np.average(values, weights=samples)),
        "std": float(ascending.std()),
        "worst10": float((ascending[::-1] if lower_is_better else ascending)[: max(1, round(WORST * n))].mean()),
        "gini": pairs / (n * n * mean) if mean else 0.0,
    }


def workers_csv(results: WorkerResults) -> str:
    """Return the test results of individual workers as a CSV table with one line per worker."""
    columns = results.columns()
    return to_csv([columns, *zip(*columns.values(), strict=True)])


def read_csv(path: Path) -> WorkerResults:
    """Read a table that `workers_csv` wrote, and the table of owners without training samples, if there is one.

    Raises RecordError if a file does not have the format of `workers_csv`.
    """
    text = read_file(path, MOST_BYTES).decode(errors="replace")
    try:
        head, *rows = csv.reader(io.StringIO(text))
        columns = dict(zip(head, zip(*rows, strict=True), strict=True))
        numbers, samples, names = columns.pop("worker"), columns.pop("samples"), columns.pop("name", ())
        values = {name: [float(cell) for cell in column] for name, column in columns.items()}
        loss, accuracy = (
            {model: values[f"{model}_{quantity}"] for model in LABELS if f"{model}_{quantity}" in values}
            for quantity in ("loss", "accuracy")
        )
        workers, counts = list(map(int, numbers)), list(map(int, samples))
        named = [name.removeprefix("'") or None for name in names]
    except (ValueError, IndexError, KeyError, csv.Error):
        raise RecordError(
            f"{path}: is damaged: it is not a CSV table of workers with their samples, losses and accuracies"
        ) from None
    beside = path.with_name(path.name.replace("workers", "unseen"))
    unseen = read_csv(beside) if beside != path and beside.is_file() else None
    return WorkerResults(_round_of(path), workers, counts, loss, accuracy, unseen, named)


def newest_table(folder: Path, most: int | None = None) -> Path | None:
    """Return the path of the newest CSV table of test results of individual workers, or None if there is none.

    Tables of rounds after `most` are ignored.
    """
    tables = sorted(path for path in folder.glob("workers-*.csv") if re.fullmatch(r"workers-\d{5,9}", path.stem))
    usable = [path for path in tables if most is None or _round_of(path) <= most]
    return usable[-1] if usable else None


def _round_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def without_worker_tests(record: RoundRecord) -> RoundRecord:
    """Return a record without the results of tests of individual workers."""
    metrics = {name: value for name, value in record.metrics.items() if not METRIC.fullmatch(f"metrics.{name}")}
    return replace(record, worker_accuracy=None, worker_loss=None, metrics=metrics)


def workers_line(results: WorkerResults) -> str:
    """Return one line of text: for each model, the mean test result over all workers and over the worst 10 percent.

    Example: "4 workers: global model 0.6525 (worst 10 percent 0.0625), personal model 0.8252 (worst 10 percent 0.6565)"
    """
    groups = [("worker", results), ("unseen client", results.unseen)]
    return "; ".join(
        f"{plural(len(part.workers), kind)}: {_scores(part)}" for kind, part in groups if part and part.workers
    )


def _scores(results: WorkerResults) -> str:
    parts, worst_of = [], max if results.score_name == "loss" else min
    for model, values in results.scores.items():
        figures = describe(values, results.samples, results.score_name == "loss")
        worst = f"; worst: {results.labels[values.index(worst_of(values))]}" if results.names else ""
        parts.append(f"{LABELS[model]} {figures['mean']:.4f} (worst 10 percent {figures['worst10']:.4f}{worst})")
    return ", ".join(parts)
