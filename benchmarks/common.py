"""Functions shared by the benchmarks: run commands, describe the machine and store figures as JSON."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from watching import watch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use the fedsim of this checkout

from fedsim.records.history import METRICS
from fedsim.records.run_folder import ENVIRONMENT, MODEL, describe_environment
from fedsim.system.devices import describe_device, usable_cores

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CPU = torch.device("cpu")


def of_torch(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the client algorithm `sgd` as arguments of `torch.optim.SGD`."""
    if params.get("momentum_at", "server") != "server":
        raise ValueError('momentum_at: torch.optim.SGD only supports "server"')
    return {name: value for name, value in params.items() if name != "momentum_at"}


class CommandRun(NamedTuple):
    """A run of fedsim in its own process, with its records."""

    seconds: float  # of the whole process
    peak_bytes: int  # of all its processes (PSS), 0 without samples
    history: list[dict[str, Any]]  # one record per round
    environment: dict[str, Any]
    state: dict[str, Tensor]  # of the final model

    @property
    def rounds(self) -> list[float]:
        """Seconds of each round."""
        return [sum(record["seconds"].values()) for record in self.history]

    @property
    def accuracy(self) -> float:
        return self.history[-1]["test_accuracy"]


def run_command(*words: str, share: float = 0.0) -> CommandRun:
    """Run `python run_experiment.py CONFIG.toml KEY=VALUE ...` as a user would, and return its records.

    `share`: maximum share of one core's time for samples of the memory. Default: no samples.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        command = [sys.executable, "run_experiment.py", *words, "--quiet", "--out", str(folder)]
        return CommandRun(
            *watch(command, share, stdout=subprocess.DEVNULL, cwd=ROOT),
            history=[json.loads(line) for line in (folder / METRICS).read_text().splitlines()],
            environment=json.loads((folder / ENVIRONMENT).read_text()),
            state=load_file(folder / MODEL),
        )


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def report(name: str, *, device: torch.device = CPU, keep: bool = True, **figures: Any) -> None:
    """Print the benchmark's figures as JSON and (`keep`) store them in results/<name>-<device>.json.

    Figures of changed code are not stored: they name a commit that has other code. Changed results do not matter.
    """
    metadata = describe_environment()
    commit = metadata["git_commit"]
    changes = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"]
    unchanged = commit is not None and subprocess.run(changes, cwd=ROOT, check=False).returncode == 0
    gpu = "" if device.type == "cpu" else f", {describe_device(device)}"
    facts_and_figures = {
        "benchmark": name,
        **figures,
        "date": f"{datetime.date.today()}",
        "machine": f"{metadata['processor']}, {usable_cores()} cores{gpu}",
        "torch": torch.__version__,
        "fedsim": commit.removesuffix("+dirty") if unchanged else commit or metadata["fedsim"],
    }
    text = json.dumps(facts_and_figures, indent=1)
    print(text)
    if keep and unchanged:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}-{device.type}.json"
        path.write_text(text + "\n")
        print(f"stored in {path.relative_to(ROOT)}", file=sys.stderr)
    elif keep:
        print("not stored: commit all changes first", file=sys.stderr)
