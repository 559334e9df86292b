"""What a run leaves behind: a folder that is never overwritten, whose files are written atomically."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import math
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, TypedDict

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedsim.errors import RecordError
from fedsim.experiment import Experiment
from fedsim.files import write_whole as _write
from fedsim.loading import to_toml
from fedsim.version import __version__

EXPERIMENT, ENVIRONMENT, METRICS = "experiment.toml", "environment.json", "metrics.jsonl"
MODEL, CURVE = "model.safetensors", "curve.png"


class RoundRecord(TypedDict):
    """One round, as in `metrics.jsonl` and `Result.history`."""

    round: int  # from 1
    test_loss: float  # of the global model after the round, mean per test sample
    test_accuracy: float  # fraction
    train_loss: float  # mean per sample that the cohort trained on, as it trained
    seconds: dict[str, float]  # by phase: pull_down, train, aggregate, test
    cohort: list[int]  # the workers that took part
    bytes_up: int  # what a real network would have carried from workers to server
    bytes_down: int  # and from server to workers


def new_folder_name(name: str) -> Path:
    """runs/<name>-<date>-<time>, with a number behind it where that exists already."""
    stem = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (stem.with_name(f"{stem.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([stem], numbered) if not path.exists())


class RunFolder:
    """The records of one run, in a folder that is new or empty.

    Made early, so that a run with nowhere to write stops at once; filled from `begin` on; and taken away again if the
    run ends before that. Raises RecordError where the folder holds something already, or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._metrics: TextIO | None = None
        self._made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            occupied = any(folder.iterdir())
        except OSError as error:
            raise RecordError(f"{folder}: cannot be a run folder: {error.strerror}") from error
        if occupied:
            raise RecordError(f"{folder}: holds something already, and a run never overwrites; name a new folder")

    def begin(self, experiment: Experiment, **facts: Any) -> None:
        """Write down the experiment and the environment, with further `facts` of this run."""
        try:
            self._metrics = (self.path / METRICS).open("x", encoding="utf-8")  # "x": of two runs, one gets it
        except OSError as error:
            raise RecordError(f"{self.path / METRICS}: cannot be written: {error.strerror}") from error
        _write(self.path / EXPERIMENT, to_toml(experiment).encode())
        _write(self.path / ENVIRONMENT, _json({**describe_environment(), **facts}, indent=2).encode())

    def round(self, record: RoundRecord) -> None:
        """Append one round, and flush it."""
        assert self._metrics is not None
        try:
            self._metrics.write(_json(record) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise RecordError(f"{self.path / METRICS}: cannot be written: {error.strerror}") from error

    def model(self, model: nn.Module) -> None:
        """Write the model's parameters and buffers (not what else a module may put into its state)."""
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        _write(self.path / MODEL, save({name: value.contiguous().clone() for name, value in tensors.items()}))

    def curve(self, png: bytes) -> None:
        """Write the picture of the history."""
        _write(self.path / CURVE, png)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            self._metrics.close()
        elif self._made:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def describe_environment() -> dict[str, Any]:
    """Versions, machine and the source's git commit."""
    packages = ("torchvision", "numpy", "pydantic", "safetensors", "mlxtend")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "fedsim": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {"torch": str(torch.__version__), **{name: metadata.version(name) for name in packages}},
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "command": sys.argv,
    }


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


def _json(value: Any, indent: int | None = None) -> str:
    """JSON proper: numbers that are not finite, which JSON has no word for, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
