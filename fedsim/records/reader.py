"""Read run folders.

A folder may be untrusted or belong to an unfinished run. Optional files may be missing, and the last line of the
metrics may be incomplete. Any other damage raises an error that names the damaged file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedsim.config.files import read_toml
from fedsim.core.numbers import Count
from fedsim.errors import RecordError, cut, printable
from fedsim.hints.attributes import HintingAttributes
from fedsim.records.early_stopping import stop_reason, stored_stop
from fedsim.records.history import METRICS, first_problem, noted_stop, read_file, read_metrics, read_object
from fedsim.records.numbers import Progress, best_score, byzantine_weight, progress_of, run_metrics
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import ENVIRONMENT, ERROR, EXPERIMENT, MODEL, PARTITION
from fedsim.records.worker_results import WorkerResults, newest_table, read_csv
from fedsim.system.files import is_file

INCOMPLETE = "the records of the run are not complete"

# Limits on file sizes, much larger than the files of any run.
MOST_PARTITION_BYTES, MOST_ERROR_BYTES = 2**28, 2**24


class LenientModel(BaseModel):
    """Base class for the content of JSON files, checked by pydantic. Unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class StoredPartition(LenientModel):
    """How the samples are distributed over the workers, as stored in `partition.json`.

    Attributes:
        counts: number of samples of each class at each worker, indexed [worker][class].
        workers: IDs of the workers in `counts`, if they are only some of all workers.
        population: number of all workers.
        byzantine: IDs of the Byzantine workers.
        names: name of each worker, and of the owners who have only test samples; None for a worker without a name.
            Empty: there are no names.
    """

    counts: list[list[Count]] = []
    workers: list[Count] | None = None
    population: Count | None = None
    byzantine: list[Count] = []
    names: list[str | None] = []


@dataclass(frozen=True)
class Run(HintingAttributes):
    """A finished, unfinished or failed run, read from its folder.

    Attributes:
        folder: run folder, or None if no records are written.
        experiment: the experiment, with all defaults, as nested dicts.
        history: one record per round.
        torn: whether the last line of the metrics file is incomplete.
        id: ID of the run in a comparison, else "".
        point: in a comparison, the run's value for each compared setting.
        position: in a comparison, the index of each of these values among the compared values.
        failure: first line of the reason why the run failed, or None if it did not fail.
        target: test result to reach, or None.
        counts: whether an unfinished run is treated as finished.
    """

    folder: Path | None
    experiment: dict[str, Any]
    history: list[RoundRecord]
    torn: bool = False
    id: str = ""
    point: dict[str, Any] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    failure: str | None = None
    target: float | None = None
    counts: bool = False

    @classmethod
    def read(cls, folder: Path, **in_comparison: Any) -> Run:
        """Read the run in a folder. Missing files are treated as empty.

        `in_comparison` contains further attributes, such as `id`, for a run that is part of a comparison.

        Raises RecordError if a file is damaged.
        """
        history, torn = read_metrics(folder / METRICS) if is_file(folder / METRICS) else ([], False)
        experiment = read_toml(folder / EXPERIMENT, folder) if is_file(folder / EXPERIMENT) else {}
        failure = failure_in(folder) if in_comparison else None
        run = cls(folder, experiment, history, torn, failure=failure, **in_comparison)
        _ = run.environment, run.partition, run.workers  # read these files now, so that damage is reported at once
        return run

    @property
    def name(self) -> str:
        """Name of the experiment, or the name of the run's folder if the experiment is unknown."""
        default = self.folder.resolve().name if self.folder else self.id
        return cut(str(self.experiment.get("name", default)))

    @property
    def seed(self) -> int:
        """Seed of the run, or 0 if the experiment is unknown."""
        seed = self.experiment.get("seed")
        return seed if isinstance(seed, int) else 0

    @property
    def planned(self) -> int | None:
        """Number of rounds that the experiment asks for, or None if it is unknown."""
        rounds = self.experiment.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @cached_property
    def stopped(self) -> str | None:
        """Return the reason why the run ended before its last round, or None if it did not."""
        reason = stop_reason(self.history, *stored_stop(self.experiment))
        return reason if reason or self.id or not self.folder else noted_stop(self.folder, len(self.history))

    @cached_property
    def finished(self) -> bool:
        """Whether the run ended without failing."""
        if self.counts:
            return True
        ended = bool(self.history) and (len(self.history) >= (self.planned or 0) or self.stopped is not None)
        return ended and self.failure is None and all(is_file(path) for path in self._expected_files())

    def _expected_files(self) -> list[Path]:
        records = self.experiment.get("records")
        if not (self.id and self.folder and isinstance(records, dict)):
            return []
        figures = records.get("figures") if records.get("curve") is True else None
        names = [f"curve.{format}" for format in figures] if isinstance(figures, list) else []
        return [self.folder / name for name in ([MODEL] if records.get("model") is True else []) + names]

    @property
    def error(self) -> str | None:
        """Reason, in one line, why the run failed or is unfinished. None if it is finished."""
        return None if self.finished else self.failure or INCOMPLETE

    @property
    def state(self) -> str:
        """State of the run as text: "3 of 10 rounds", "not begun", or "failed: ..." with the reason."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        return f"{len(self.history)} of {self.planned} rounds" if self.history else "not begun"

    @cached_property
    def progress(self) -> list[Progress]:
        """Return the totals, such as virtual seconds and updates, after each round."""
        return progress_of(self.history, self.experiment)

    @cached_property
    def metrics(self) -> dict[str, float | None]:
        """Return the results of a finished run by name, such as `test_accuracy`. Empty if the run is not finished."""
        return run_metrics(self.history, self.progress, self.target) if self.finished else {}

    @property
    def test_accuracy(self) -> float | None:
        """Test accuracy after the last round, or None for a task without accuracy."""
        return self.history[-1].test_accuracy

    @property
    def best_accuracy(self) -> float | None:
        """Highest test accuracy after any round, or None for a task without accuracy."""
        return None if self.test_accuracy is None else best_score(self.history)

    @property
    def seconds(self) -> float:
        """Computation time of all rounds in seconds."""
        return sum(record.total_seconds or 0.0 for record in self.history)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Return the software versions and the machine of the run. Empty if they are unknown."""
        path = self.folder and self.folder / ENVIRONMENT
        return read_object(path) if path and is_file(path) else {}

    @cached_property
    def partition(self) -> StoredPartition:
        """Return the number of samples per worker and class. Empty if they are unknown."""
        return read_partition(self.folder) if self.folder else StoredPartition()

    @cached_property
    def workers(self) -> WorkerResults | None:
        """Return the newest test results of the individual workers, or None if no worker was tested."""
        table = newest_table(self.folder, len(self.history)) if self.folder else None
        return read_csv(table) if table else None

    @property
    def byzantine(self) -> frozenset[int]:
        """IDs of the Byzantine workers."""
        return frozenset(self.partition.byzantine)

    @cached_property
    def byzantine_weight(self) -> float | None:
        """Return the mean share of the Byzantine workers in the aggregation weights, or None if it is unknown."""
        return byzantine_weight(self.history, self.byzantine) if self.byzantine else None


def read_partition(folder: Path) -> StoredPartition:
    """Return the contents of the file `partition.json` in a run folder. Empty if there is no such file."""
    path = folder / PARTITION
    if not is_file(path):
        return StoredPartition()
    partition = validated(StoredPartition, path, MOST_PARTITION_BYTES)
    if len({len(row) for row in partition.counts}) > 1:
        raise RecordError(
            f"{path}: is damaged: the lists in `counts`, one per worker, differ in their numbers of classes"
        )
    if partition.workers is not None and len(partition.workers) != len(partition.counts):
        raise RecordError(
            f"{path}: is damaged: `counts` has lists of {len(partition.counts)} workers, but `workers` has "
            f"{len(partition.workers)} IDs"
        )
    return partition


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], path: Path, most: int) -> Model:
    """Return the content of a JSON file with at most `most` bytes. Raises RecordError if it is not a valid `model`."""
    try:
        return model.model_validate_json(read_file(path, most))
    except ValidationError as error:
        raise RecordError(f"{path}: is damaged: {first_problem(error)}") from None


def failure_in(folder: Path) -> str | None:
    """Return the first line of the reason why the run in a folder failed, or None if the run did not fail."""
    if not is_file(folder / ERROR):
        return None
    text = read_file(folder / ERROR, MOST_ERROR_BYTES).decode(errors="replace")
    return printable(text.strip().partition("\n")[0])
