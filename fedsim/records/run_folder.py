"""Write the folder of a run. Existing runs are never overwritten, and files are written atomically."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import io
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedsim.config.experiment import Experiment
from fedsim.config.files import to_toml
from fedsim.errors import FedsimError, RecordError
from fedsim.records.history import EVENTS, EXPERIMENT, METRICS, PATTERNS, RACE_LOG, read_object, records_digest, to_line
from fedsim.records.record import RoundRecord
from fedsim.records.worker_results import WorkerResults, workers_csv
from fedsim.system.files import (
    PART,
    append_atomically,
    locked,
    os_errors_as_record_errors,
    remove_parts,
    require_inside,
    require_unchanged,
    to_json,
    write_atomically,
)
from fedsim.version import __version__

ENVIRONMENT = "environment.json"
ERROR = "error.txt"
MODEL, PARTITION = "model.safetensors", "partition.json"
WORKERS, UNSEEN = "workers-{round:05d}.csv", "unseen-{round:05d}.csv"
UPDATES = "updates-{round:05d}.safetensors"
NO_FOLDER = "cannot be a run folder"


@contextlib.contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """Create the folder runs/<name>-<date>-<time>. It is removed after the `with` block if it is still empty.

    Raises RecordError if the folder cannot be created.
    """
    stem = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (stem.with_name(f"{stem.name}-{number}") for number in itertools.count(2))
    for folder in itertools.chain([stem], numbered):
        with os_errors_as_record_errors(folder, NO_FOLDER):
            folder.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # the folder is not empty
            folder.rmdir()
            folder.parent.rmdir()


class RunFolder:
    """Writes the records of one run into a folder. Use it as a context manager around the run.

    The folder must be new or empty, or, with `resume`, contain the earlier part of the run. Otherwise RecordError is
    raised.

    Attributes:
        path: the folder.
        resumes: whether the folder contains the earlier part of the run.
        rewritten: whether `begin` changed the records of earlier rounds, so that existing checkpoints do not match the
            records.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.path = folder
        self._metrics: io.FileIO | None = None
        self._rounds, self.rewritten = 0, False  # number of recorded rounds
        self._written: list[Path] = []
        self._early_events: list[tuple[str, dict[str, Any]]] = []  # events before `begin`
        with os_errors_as_record_errors(folder, NO_FOLDER), contextlib.ExitStack() as stack:
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder, "another run"))
            self.resumes = self._worth_keeping = resume and (folder / EXPERIMENT).is_file()
            if not self.resumes:
                _require_empty(folder)
            remove_parts(folder, PATTERNS)
            self._lock = stack.pop_all()

    def begin(self, experiment: Experiment, history: Sequence[RoundRecord] = (), **metadata: Any) -> None:
        """Write the experiment, metadata of the machine, and the records of earlier rounds (`history`) if resumed.

        `metadata` is stored together with that of the machine.
        """
        environment = {**describe_environment(), **metadata}
        if self.resumes:
            environment = self._resumed_environment(environment, len(history))
        self.write(EXPERIMENT, to_toml(experiment).encode())
        self.write(ENVIRONMENT, to_json(environment, indent=2).encode())
        lines = "".join(map(to_line, history)).encode()
        self._digest = hashlib.sha256(lines)
        self.rewritten = self.resumes and records_digest(self.path, len(history)) != self.digest
        self.write(METRICS, lines)
        with contextlib.suppress(OSError):
            (self.path / ERROR).unlink(missing_ok=True)  # written by an earlier attempt
        with os_errors_as_record_errors(self.path / METRICS):
            self._metrics, self._rounds = (self.path / METRICS).open("ab", buffering=0), len(history)
        for kind, event in self._early_events:
            self.event(kind, **event)

    def _resumed_environment(self, environment: dict[str, Any], rounds: int) -> dict[str, Any]:
        """Return the stored metadata of the machine, with a new entry about the continuation of the run.

        If no round is kept, the run starts again, and the new metadata replaces the stored one.
        """
        first = self.environment()
        if not first:
            return environment
        again = {key: value for key, value in environment.items() if first.get(key) != value}
        times = first.get("resumed", [])
        return {
            **(again | first if rounds else first | again),
            "resumed": [*(times if isinstance(times, list) else []), {"after_round": rounds, **again}],
        }

    def environment(self) -> dict[str, Any]:
        """Return the stored software versions and metadata of the machine, or {} if there are none."""
        with contextlib.suppress(RecordError):
            return read_object(self.path / ENVIRONMENT)
        return {}

    def round(self, record: RoundRecord) -> None:
        """Append the record of a round to the file. Raises RecordError if another program changed the file."""
        assert self._metrics is not None
        require_unchanged(self._metrics, self.path / METRICS, f"after round {self._rounds}")
        line = to_line(record).encode()
        append_atomically(self._metrics, self.path / METRICS, line)
        self._digest.update(line)
        self._rounds += 1
        self._worth_keeping = True

    @property
    def digest(self) -> str:
        """SHA-256 of all records, for the checkpoint of the latest round (see `records_digest`)."""
        return self._digest.hexdigest()

    def settle(self) -> None:
        """Make sure that all records are on disk. Raises RecordError if another program changed the file."""
        assert self._metrics is not None
        require_unchanged(self._metrics, self.path / METRICS, f"after round {self._rounds}")
        with os_errors_as_record_errors(self.path / METRICS):
            os.fsync(self._metrics.fileno())

    def event(self, kind: str, *, round: int, **details: Any) -> None:
        """Append an event, such as a lost process, to `events.jsonl`."""
        if self._metrics is None:
            self._early_events.append((kind, {"round": round, **details}))
            return
        path = self.path / EVENTS
        with os_errors_as_record_errors(path):
            require_inside(path, self.path)  # the folder of a resumed run may contain links
            with path.open("ab", buffering=0) as file:
                append_atomically(file, path, f"{to_json({'event': kind, 'round': round, **details})}\n".encode())
        self._written.append(path)

    def partition(
        self,
        counts: np.ndarray,
        byzantine: list[int],
        workers: list[int] | None = None,
        population: int | None = None,
        names: Sequence[str | None] = (),
    ) -> None:
        """Write how the samples are distributed over the workers.

        Args:
            counts: number of samples per worker and class, int, shape [workers, classes].
            byzantine: IDs of the Byzantine workers.
            workers: IDs of the workers in `counts`, if they are only some of all workers.
            population: number of all workers.
            names: name of each worker, and of the owners who have only test samples. Empty: there are no names.
        """
        sample = {} if workers is None else {"population": population, "workers": workers}
        named = {"names": list(names)} if names else {}
        content = {**sample, "counts": counts.tolist(), "byzantine": byzantine, **named}
        self.write(PARTITION, to_json(content).encode())

    def updates(self, round: int, tensors: dict[str, Tensor]) -> None:
        """Write the inputs of the aggregation rule in a round, for `fedsim replay`.

        `tensors` has updates [n, d], workers int64 [n], byzantine bool [n] and more inputs, as in `STORED` of
        `fedsim.cli.rule_replay`.
        """
        self.write(UPDATES.format(round=round), save(tensors, metadata={"round": str(round)}))

    def model(self, model: nn.Module) -> None:
        """Write the tensors of the model's `state_dict` (parameters and buffers)."""
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        self.write(MODEL, save({name: value.contiguous().clone() for name, value in tensors.items()}))

    def race_log(self, csv: bytes) -> None:
        """Write the log of a race (the order of its events), from which the race can be repeated."""
        self.write(RACE_LOG, csv)

    def workers(self, results: WorkerResults) -> None:
        """Write the test results after a round of individual workers, and of owners without training samples."""
        for name, part in ((WORKERS, results), (UNSEEN, results.unseen)):
            if part and part.workers:
                self.write(name.format(round=results.round), workers_csv(part).encode())

    def forget_workers(self, round: int) -> None:
        """Remove the test results of individual workers after `round`, because the continued run has later rounds."""
        for name in (WORKERS, UNSEEN):
            with contextlib.suppress(OSError):
                (self.path / name.format(round=round)).unlink(missing_ok=True)

    def write(self, name: str, content: bytes) -> None:
        """Write the file `name`, such as a figure."""
        write_atomically(self.path / name, content)
        self._written.append(self.path / name)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FedsimError) and self._worth_keeping and self._metrics is not None:
            with contextlib.suppress(RecordError):
                write_atomically(self.path / ERROR, str(error).encode())
        self._lock.close()
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # all lines are written, and a new error would hide the first one
                self._metrics.close()
        if not self._worth_keeping:
            with contextlib.suppress(OSError):
                for path in reversed(self._written):  # the experiment last, so that a killed run can be resumed
                    path.unlink(missing_ok=True)  # a file that was written twice is listed twice
                for path in self._made:
                    path.rmdir()


def _require_empty(folder: Path) -> None:
    """Raise RecordError if a folder is not empty."""
    if (folder / EXPERIMENT).is_file():
        raise RecordError(
            f"{folder}: holds a run; name another folder, or continue that run with --resume (in Python, resume=True)"
        )
    if any(path.name != PART.format(EXPERIMENT) for path in folder.iterdir()):
        raise RecordError(f"{folder}: is not empty and has no {EXPERIMENT}; choose a new or an empty folder")


def describe_environment() -> dict[str, Any]:
    """Return the date, the software versions, the machine and the git commit, to be stored with a run."""
    now = datetime.datetime.now(datetime.timezone.utc)
    with contextlib.suppress(ValueError):  # an impossible time zone, such as TZ=XYZ99
        now = now.astimezone()
    return {"date": now.isoformat(timespec="seconds"), **_describe_process()}


@functools.cache  # slow for short runs, and the code in memory stays that of the first commit
def _describe_process() -> dict[str, Any]:
    return {
        "fedsim": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": _versions(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "command": sys.argv,
    }


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    for name in ("torchvision", "numpy", "pydantic", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _git_commit() -> str | None:
    """Return the git commit of fedsim's source code, or None if it is unknown.

    "+dirty" is appended if there are uncommitted changes.
    """
    git = ["git", "-C", str(Path(__file__).parent), "-c", "core.fsmonitor=false"]  # it names a command to execute
    tracked = ["ls-files", "--error-unmatch", "__init__.py"]  # otherwise the repository is another project's
    describe = ["describe", "--always", "--dirty=+dirty", "--abbrev=40", "--exclude=*"]
    try:
        for words in (tracked, describe):
            done = subprocess.run([*git, *words], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
