"""What the benchmarks share: the machine's name, and the one JSON line each of them prints."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout's fedsim, installed or not

from fedsim.devices import usable_cores
from fedsim.records import describe_environment

RESULTS = Path(__file__).resolve().parent / "results"


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def report(name: str, **figures: Any) -> None:
    """Print the benchmark's figures as one JSON line, and keep them as results/<name>-<device>.json."""
    facts = describe_environment()
    line = {
        "benchmark": name,
        **figures,
        "date": f"{datetime.date.today()}",
        "machine": f"{facts['processor']}, {usable_cores()} cores",
        "torch": torch.__version__,
        "fedsim": facts["git_commit"] or facts["fedsim"],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-cpu.json").write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line))
