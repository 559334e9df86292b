"""What a run leaves behind: a folder that is never overwritten, whose files are written atomically."""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedsim.asynchronous.racelog import FILE as RACE_LOG
from fedsim.bounds import problem_with_words
from fedsim.errors import FedsimError, RecordError
from fedsim.experiment import Experiment
from fedsim.loading import to_toml
from fedsim.system.files import (
    PART,
    append_whole,
    cannot_write,
    locked,
    read_bounded,
    remedy,
    require_inside,
    require_unchanged,
    to_json,
    write_whole,
)
from fedsim.version import __version__

EXPERIMENT, ENVIRONMENT, METRICS = "experiment.toml", "environment.json", "metrics.jsonl"
ERROR = "error.txt"
EVENTS = "events.jsonl"
MODEL, PARTITION = "model.safetensors", "partition.json"
CURVE = "curve.{format}"
MOST_ENVIRONMENT_BYTES = 2**20
UPDATES = "updates-{round:05d}.safetensors"


class AsyncRecord(TypedDict):
    """What there is to say of asynchronous work, beyond what a round has."""

    updates: int  # of the global row since the start
    trips: int  # pieces of work that have been taken since the start
    staleness: dict[str, int]  # of what was applied in the round: how often each
    held: int  # pieces of work that have come in and wait for an update
    wasted: int  # that came to nothing in the round


class RaceRecord(TypedDict):
    """What a round of a race has measured; lists have a number for each run, and counts are sums over the runs.

    That a coordinate was torn, or an update of the model lost, cannot be seen without a lock. So what is counted is
    what stands for it: see docs/architecture.md.
    """

    runs: int
    test_accuracies: list[float]
    test_accuracy_half_width: float | None  # of the 95 percent interval around their mean; None of a single run
    test_losses: list[float]
    train_losses: list[float]
    samples_per_second: list[float]  # that went through training, tests left out
    updates: int  # taken
    updates_lost: float  # overwritten, as a counter beside the model tells that takes part in each; 0 under a lock
    lost_fraction: float  # of them
    torn_reads: float  # fraction of the gradients in whose time somebody else wrote the row that they are of
    locks_taken: int
    lock_contention: float  # fraction of these that another process had just then
    lock_seconds: float  # that were waited for them, summed over processes
    held_back: int  # times that a worker could not end its round, since nobody was left to let it go on


class RoundRecord(TypedDict):
    """One round, as in `metrics.jsonl` and `Result.history`."""

    round: int  # from 1
    test_loss: float  # of the global model after the round, mean per test sample
    test_accuracy: float  # fraction
    train_loss: float  # mean per sample that the cohort trained on, as it trained, without workers that were excluded
    seconds: dict[str, float]  # by phase: pull_down, train, aggregate, test
    cohort: list[int]  # the workers that took part
    coefficients: list[float] | None  # with which each one's row went into the aggregate; None: the rule has no such
    excluded: list[int]  # workers whose rows were left out because they were not finite
    lost: list[int]  # workers of the cohort who took no part, since their process was lost (on_worker_failure = "drop")
    attack_success: float | None  # fraction of what an attacker with a goal wants that the global model does
    bytes_up: int  # what a real network would have carried from workers to server
    bytes_down: int  # and from server to workers
    samples: list[int]  # that each of the cohort trained on, repetitions counted
    virtual_seconds: float | None  # since the start, on the virtual clock, if there is one
    asynchronous: AsyncRecord | None  # None: the round was synchronous
    race: RaceRecord | None  # None: it was no race. Of one, losses and accuracies above are means over the runs,
    # seconds their sums; all else is the first run's


def new_folder_name(name: str) -> Path:
    """runs/<name>-<date>-<time>, with a number behind it where that exists already."""
    stem = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (stem.with_name(f"{stem.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([stem], numbered) if not path.exists())


class RunFolder:
    """The records of one run, in a folder that is new or empty or, where it `resumes`, holds what there is of the run.

    Made early, so that a run with nowhere to write stops at once; filled from `begin` on; and taken away again, with
    what it has written there, if the run ends before a round is on record. Nobody else can write there meanwhile.
    Raises RecordError where the folder holds something else, or cannot be written.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.path = folder
        self._metrics: io.FileIO | None = None
        self._rounds = 0  # in it
        self._written: list[Path] = []
        self._early_events: list[tuple[str, dict[str, Any]]] = []  # from before `begin`
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
        self._lock = contextlib.ExitStack()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(locked(folder, "another run"))
            for half in folder.glob(PART.format("*")):  # of one that was killed as it wrote
                half.unlink()
            occupied = any(folder.iterdir())
        except OSError as error:
            raise RecordError(f"{folder}: cannot be a run folder: {error.strerror}{remedy(folder, error)}") from error
        self.resumes = self._worth_keeping = resume and (folder / EXPERIMENT).is_file()
        if occupied and not self.resumes:
            self._lock.close()
            if (folder / EXPERIMENT).is_file():
                raise RecordError(f"{folder}: holds a run; name another folder, or continue that run with --resume")
            raise RecordError(f"{folder}: is not empty, and not a run folder (no {EXPERIMENT}); name another folder")

    def begin(self, experiment: Experiment, history: Sequence[RoundRecord] = (), **facts: Any) -> None:
        """Write down the experiment and the environment, with further `facts` of this run.

        Of one that is gone on with, `history` is what stays on record.
        """
        environment = {**describe_environment(), **facts}
        if self.resumes:
            environment = self._resumed_environment(environment, len(history))
        self._write(EXPERIMENT, to_toml(experiment).encode())
        self._write(ENVIRONMENT, to_json(environment, indent=2).encode())
        self._write(METRICS, "".join(map(_line, history)).encode())
        with contextlib.suppress(OSError):
            (self.path / ERROR).unlink(missing_ok=True)  # of an earlier time
        try:
            self._metrics, self._rounds = (self.path / METRICS).open("ab", buffering=0), len(history)
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error
        for kind, event in self._early_events:
            self.event(kind, **event)

    def _resumed_environment(self, environment: dict[str, Any], rounds: int) -> dict[str, Any]:
        """That in which the run began; and of each time that it was gone on with, when, where and after which round."""
        first = _read_json_object(self.path / ENVIRONMENT)
        if not first:
            return environment
        again = {key: value for key, value in environment.items() if first.get(key) != value}
        times = first.get("resumed", [])
        return {**first, "resumed": [*(times if isinstance(times, list) else []), {"after_round": rounds, **again}]}

    def environment(self) -> dict[str, Any]:
        """What there is to be read of it; {} where it cannot be."""
        return _read_json_object(self.path / ENVIRONMENT)

    def round(self, record: RoundRecord) -> None:
        """Append one round, whole or not at all. Raises RecordError if another program changed the file."""
        assert self._metrics is not None
        require_unchanged(self._metrics, self.path / METRICS, f"after round {self._rounds}")
        append_whole(self._metrics, self.path / METRICS, _line(record).encode())
        self._rounds += 1
        self._worth_keeping = True

    def settle(self) -> None:
        """Flush the recorded rounds to the disk. Raises RecordError if another program changed their file."""
        assert self._metrics is not None
        require_unchanged(self._metrics, self.path / METRICS, f"after round {self._rounds}")
        try:
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error

    def event(self, kind: str, *, round: int, **facts: Any) -> None:
        """Append a line on something that befell a round, beside what it came to, and flush it.

        What comes before `begin` is written by that: a folder with events alone would be no run.
        """
        if self._metrics is None:
            self._early_events.append((kind, {"round": round, **facts}))
            return
        path = self.path / EVENTS
        try:
            require_inside(path, self.path)  # where a folder is gone on with, a link may lie there
            with path.open("ab", buffering=0) as file:
                append_whole(file, path, f"{to_json({'event': kind, 'round': round, **facts})}\n".encode())
        except OSError as error:
            raise cannot_write(path, error) from error
        self._written.append(path)

    def partition(
        self, counts: np.ndarray, byzantine: list[int], workers: list[int] | None = None, population: int | None = None
    ) -> None:
        """Write how many samples of each class each worker holds, int [workers, classes], and who is Byzantine.

        Where the counts are those of some workers of a population only, `workers` says of which.
        """
        sample = {} if workers is None else {"population": population, "workers": workers}
        self._write(PARTITION, to_json({**sample, "counts": counts.tolist(), "byzantine": byzantine}).encode())

    def updates(self, round: int, kept: dict[str, Tensor]) -> None:
        """Write what the rule was given in a round, for `fedsim replay`.

        updates [n, d], workers int64 [n], samples int64 [n], byzantine bool [n]; root [d] and losses [n] where the rule
        took them.
        """
        self._write(UPDATES.format(round=round), save(kept, metadata={"round": str(round)}))

    def model(self, model: nn.Module) -> None:
        """Write the model's parameters and buffers (not what else a module may put into its state)."""
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        self._write(MODEL, save({name: value.contiguous().clone() for name, value in tensors.items()}))

    def race_log(self, csv: bytes) -> None:
        """Write in which order the work of a race came in, for `clock.log`."""
        self._write(RACE_LOG, csv)

    def curve(self, figure: bytes, format: str) -> None:
        """Write the figure of the history in one format."""
        self._write(CURVE.format(format=format), figure)

    def _write(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content)
        self._written.append(self.path / name)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FedsimError) and self._worth_keeping and self._metrics is not None:
            with contextlib.suppress(RecordError):
                write_whole(self.path / ERROR, str(error).encode())
        self._lock.close()
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # each line has been written; a second complaint would hide the first
                self._metrics.close()
        if not self._worth_keeping:
            with contextlib.suppress(OSError):
                for path in reversed(self._written):  # the experiment last: until then it is a run, if killed now
                    path.unlink(missing_ok=True)  # some are written to more than once
                for path in self._made:
                    path.rmdir()


def experiment_of_run(folder: Path) -> Path:
    """The file that describes the experiment of a run folder. Raises RecordError where there is none."""
    if not (folder / EXPERIMENT).is_file():
        raise RecordError(
            f"{folder}: is not a run folder (no {EXPERIMENT}); to start a new run there, name an experiment file too"
        )
    return folder / EXPERIMENT


def _line(record: RoundRecord) -> str:
    return to_json(record) + "\n"


def _read_json_object(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(read_bounded(path, MOST_ENVIRONMENT_BYTES, path.parent))
        return value if isinstance(value, dict) and problem_with_words(value, any_text=True) is None else {}
    return {}


def describe_environment() -> dict[str, Any]:
    """Versions, machine and the source's git commit."""
    return {"date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), **_describe_process()}


@functools.cache  # one of many short runs must not pay for it again, nor be said to be of a commit made since
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
    """The version of each package that is installed, by name."""
    found = {"torch": str(torch.__version__)}
    for name in ("torchvision", "numpy", "pydantic", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git_commit() -> str | None:
    """The commit of the checkout that fedsim runs from, "+dirty" if files differ; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
        )
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() if described.returncode == tracked.returncode == 0 else None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
