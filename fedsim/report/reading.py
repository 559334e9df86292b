"""Run folders and grid folders, as they are on disk.

A folder may come from anywhere, and from a run that is still going: what is optional may be missing, the last line of
the metrics may be torn, and everything else that is not as it should be is one line that says where.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedsim.bounds import problem_with_words
from fedsim.errors import RecordError, cut, printable
from fedsim.loading import read_toml
from fedsim.records import ENVIRONMENT, EXPERIMENT, METRICS
from fedsim.runs.progress import Progress, mean_staleness, progress_of
from fedsim.system.files import is_file, read_bounded, require_inside

PARTITION, GRID, ERROR = "partition.json", "grid.json", "error.txt"
SEED = "seed"  # the axis of a grid that repeats runs

# What is read of a file, and shown of what it holds: far more than any run writes, and far less than a machine has.
MOST_METRICS_BYTES, MOST_PARTITION_BYTES, MOST_GRID_BYTES = 2**29, 2**28, 2**26
MOST_LINE_BYTES = 2**26  # of the metrics
MOST_OBJECT_BYTES = MOST_ERROR_BYTES = 2**24
MOST_ROUNDS = 500_000
MOST_PHASES = 50  # of a round, and of all of them
LARGEST = 1e145  # of a number: sums of squares of such are numbers still

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[
    float | None, AfterValidator(lambda value: value if value is None or abs(value) <= LARGEST else None)
]


class Lenient(BaseModel):
    """What is known of an object in a file; keys that are not known are somebody else's."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Race(Lenient):
    """What a round of a race has measured, of all its runs."""

    runs: Count | None = None
    test_accuracies: list[Number] = []
    samples_per_second: list[Number] = []
    lost_fraction: Number = None
    torn_reads: Number = None
    lock_contention: Number = None


class Asynchronous(Lenient):
    """What a round says of asynchronous work; `staleness` is how often each was applied."""

    updates: Count | None = None
    trips: Count | None = None
    staleness: dict[Count, Count] = {}
    held: Count | None = None
    wasted: Count | None = None


class Round(Lenient):
    """One line of the metrics; null, and what is not a finite number, is None."""

    round: Count
    test_loss: Number = None
    test_accuracy: Number = None
    train_loss: Number = None
    seconds: Annotated[dict[str, Number], Field(max_length=MOST_PHASES)] = {}
    cohort: list[Count] = []
    bytes_up: Count | None = None
    bytes_down: Count | None = None
    coefficients: list[Number] | None = None  # one per member of the cohort; None: the rule has none
    excluded: list[Count] = []
    lost: list[Count] = []  # whose process was lost, and who were left out for that
    attack_success: Number = None
    samples: list[Count] = []
    virtual_seconds: Number = None
    asynchronous: Asynchronous | None = None
    race: Race | None = None

    @property
    def staleness(self) -> float | None:
        """Mean of all that was applied."""
        return mean_staleness([self.model_dump(include={"asynchronous"})])

    @property
    def weights(self) -> list[tuple[int, float | None]]:
        """(worker, its weight) of the cohort; empty where the rule has none."""
        return [] if self.coefficients is None else list(zip(self.cohort, self.coefficients, strict=True))


class Partition(Lenient):
    """How many samples of each class every worker holds, and which workers are Byzantine.

    Of a virtual population, the counts are those of a sample of its workers only, whose numbers are `workers`.
    """

    counts: list[list[Count]] = []
    workers: list[Count] | None = None
    population: Count | None = None
    byzantine: list[Count] = []


class GridEntry(Lenient):
    """One run of a grid: where it stands on the axes, and in which folder."""

    id: str
    point: dict[str, Any]
    folder: str


class GridFile(Lenient):
    """grid.json."""

    name: str
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]]
    runs: list[GridEntry]
    target: Number = None


@dataclass(frozen=True)
class Run:
    """A run folder: what was run, where, and the rounds that are finished."""

    folder: Path
    experiment: dict[str, Any]  # empty where the file is missing
    environment: dict[str, Any]
    rounds: list[Round]
    torn: bool  # whether a last line was being written, or lost
    partition: Partition

    @property
    def name(self) -> str:
        return str(self.experiment.get("name", self.folder.resolve().name))

    @property
    def planned(self) -> int | None:
        """The number of rounds that the experiment asks for."""
        rounds = self.experiment.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def finished(self) -> bool:
        return bool(self.rounds) and len(self.rounds) >= (self.planned or 0)

    @cached_property
    def progress(self) -> list[Progress]:
        """How far it was after each round, on all scales."""
        keys = {"round", "cohort", "samples", "virtual_seconds", "asynchronous"}
        return progress_of([record.model_dump(include=keys) for record in self.rounds], self.experiment)

    @cached_property
    def byzantine(self) -> frozenset[int]:
        return frozenset(self.partition.byzantine)


@dataclass(frozen=True)
class GridRun:
    """One run of a grid: `place` holds, for each axis, the number of its value there."""

    id: str
    place: dict[str, int]
    run: Run | None  # None: has not begun
    error: str | None = None  # the first line of why it failed

    @property
    def finished(self) -> bool:
        return self.run is not None and self.run.finished and self.error is None

    @property
    def state(self) -> str:
        """How far it is, or why it went no further."""
        if self.error is not None:
            return f"failed: {self.error}"
        if self.run is None:
            return "not begun"
        return f"{len(self.run.rounds)} of {self.run.planned} rounds"


@dataclass(frozen=True)
class Grid:
    """A grid folder."""

    folder: Path
    name: str
    axes: dict[str, list[Any]]
    runs: list[GridRun]
    target: float | None = None  # the test accuracy for which it was asked how long runs take to reach it


def read_records(folder: Path) -> Run | Grid:
    """The run or the grid in a folder.

    Raises RecordError (of an experiment that is not TOML, ExperimentError), in one line, where the folder is neither,
    has no finished round yet, or holds something that is damaged.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder; expected that of a run or of a grid")
    if (folder / GRID).is_file():
        return read_grid(folder)
    run = read_run(folder)
    if run is None:
        raise RecordError(f"{folder}: neither a run (it has no {METRICS}) nor a grid (it has no {GRID})")
    if not run.rounds:
        raise RecordError(f"{folder / METRICS}: no round is finished yet")
    return run


def read_run(folder: Path) -> Run | None:
    """The run in a folder; None where none has begun."""
    if not is_file(folder / METRICS):
        return None
    rounds, torn = read_metrics(folder / METRICS)
    return Run(
        folder=folder,
        experiment=read_toml(folder / EXPERIMENT, folder) if is_file(folder / EXPERIMENT) else {},
        environment=_read_object(folder / ENVIRONMENT) if is_file(folder / ENVIRONMENT) else {},
        rounds=rounds,
        torn=torn,
        partition=_read_partition(folder / PARTITION) if is_file(folder / PARTITION) else Partition(),
    )


def read_metrics(path: Path) -> tuple[list[Round], bool]:
    """The rounds of a metrics file, and whether its last line is torn, which is then left out."""
    lines = io.BytesIO(_read(path, MOST_METRICS_BYTES))
    rounds: list[Round] = []
    phases: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        if len(line) > MOST_LINE_BYTES or len(rounds) == MOST_ROUNDS:
            raise RecordError(f"{where}: at most {MOST_LINE_BYTES:,} bytes a line, and {MOST_ROUNDS:,} rounds")
        try:
            rounds.append(_validated(Round, line, where))
        except _NotJsonError:
            if lines.read().strip():
                raise
            return rounds, True
        _check_round(rounds[-1], where)
        phases.update(rounds[-1].seconds)
        if len(phases) > MOST_PHASES:
            raise RecordError(f"{where}: seconds: more than {MOST_PHASES} phases have been named")
    return rounds, False


def _check_round(record: Round, where: str) -> None:
    coefficients = record.coefficients
    if coefficients is not None and len(coefficients) != len(record.cohort):
        raise RecordError(f"{where}: {len(coefficients)} coefficients for a cohort of {len(record.cohort)}")


def _read_partition(path: Path) -> Partition:
    partition = _validated(Partition, _read(path, MOST_PARTITION_BYTES), str(path))
    if len({len(row) for row in partition.counts}) > 1:
        raise RecordError(f"{path}: counts: every worker must have as many numbers, one per class")
    if partition.workers is not None and len(partition.workers) != len(partition.counts):
        raise RecordError(f"{path}: counts: of {len(partition.counts)} workers, and {len(partition.workers)} are named")
    return partition


def read_grid(folder: Path) -> Grid:
    """The grid in a folder, with those of its runs that have begun."""
    path = folder / GRID
    file = _validated(GridFile, _read(path, MOST_GRID_BYTES), str(path))
    _refuse_oddities([file.name, file.axes, [entry.point for entry in file.runs]], path)
    positions = {axis: _positions(values) for axis, values in file.axes.items()}
    runs, places, folders = [], set(), set()
    for index, entry in enumerate(file.runs):
        where = f"{path}: runs.{index}"
        place = {axis: _position(entry, axis, known, where) for axis, known in positions.items()}
        if tuple(place.values()) in places:
            raise RecordError(f"{where}.point: another run has the same")
        places.add(tuple(place.values()))
        run_folder = folder / _inner(entry.folder, where)
        _require_inside(run_folder, folder)
        if run_folder.resolve() in folders:
            raise RecordError(f"{where}.folder = {_short(entry.folder)}: is another run's")
        folders.add(run_folder.resolve())
        runs.append(GridRun(entry.id, place, read_run(run_folder), _first_line(run_folder / ERROR)))
    if not any(entry.run and entry.run.rounds for entry in runs):
        raise RecordError(f"{folder}: no round of its {len(runs)} runs is finished yet")
    return Grid(folder, file.name, file.axes, runs, file.target)


def _positions(values: list[Any]) -> dict[str, int]:
    """The number of each value of an axis; of equal ones the first."""
    found: dict[str, int] = {}
    for position, value in enumerate(values):
        found.setdefault(_canonical(value), position)
    return found


def _position(entry: GridEntry, axis: str, known: dict[str, int], where: str) -> int:
    """The number of the value that a run has on an axis."""
    if axis not in entry.point:
        raise RecordError(f"{where}.point: says nothing of the axis {_short(axis)}")
    position = known.get(_canonical(entry.point[axis]))
    if position is None:
        raise RecordError(f"{where}.point: {_short(entry.point[axis])} is not on the axis {_short(axis)}")
    return position


def _require_inside(path: Path, folder: Path) -> None:
    try:
        require_inside(path, folder)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None


def _refuse_oddities(value: Any, path: Path) -> None:
    """Raise RecordError for what is too deep or too large for the page; see `fedsim.bounds`."""
    if problem := problem_with_words(value, any_text=True):
        raise RecordError(f"{path}: {problem}")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _short(value: Any) -> str:
    """A value from a file as an error line can show it, whatever it holds."""
    text = _canonical(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _inner(folder: str, where: str) -> PurePosixPath:
    """A relative path that stays within the grid's folder."""
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts or "\0" in folder:
        raise RecordError(f"{where}.folder = {_short(folder)}: must lie in the grid's folder")
    return path


class _NotJsonError(RecordError):
    """A text is not JSON, as when it was cut short."""


Model = TypeVar("Model", bound=BaseModel)


def _validated(model: type[Model], text: bytes, where: str) -> Model:
    """The object that JSON text holds. Raises RecordError with its first problem."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        kind = _NotJsonError if problem["type"] == "json_invalid" else RecordError
        raise kind(f"{where}: {printable(': '.join([*_dotted(problem['loc']), problem['msg']]))}") from None


def _dotted(location: tuple[int | str, ...]) -> list[str]:
    return [".".join(map(str, location))] if location else []


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object of any keys."""
    try:
        value = json.loads(_read(path, MOST_OBJECT_BYTES))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{path}: must be an object")
    _refuse_oddities(value, path)
    return value


def _first_line(path: Path) -> str | None:
    """Of a text, as far as a line of the page has room; None where there is no such file."""
    if not is_file(path):
        return None
    return cut(_read(path, MOST_ERROR_BYTES).decode(errors="replace").strip().partition("\n")[0])


def _read(path: Path, most: int) -> bytes:
    """A file of a run's or a grid's folder, in which it has to lie itself: what is linked there is not its to show."""
    try:
        return read_bounded(path, most, inside=path.parent)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
