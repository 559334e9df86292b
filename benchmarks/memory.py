"""Peak memory of the process tree for 4 and 64 workers, and the number of copies of the data set in memory.

The benchmark samples the proportional set size (PSS) of all processes together, in which a page that k processes share
counts once. The baseline is the same experiment on fewer images. The number of copies is the difference between the
peaks divided by the difference between the data sizes.

    FEDSIM_DATA=... python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import median, report
from watching import watch

from fedsim.data import TensorData, load_dataset

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = (str(ROOT / "experiments" / "mnist_sync_sgd.toml"), "rounds=2", "engine=processes")
SMALL = 5_000  # images of the baseline


def small_mnist(root: Path) -> tuple[TensorData, TensorData]:
    """Return the first images of MNIST, the baseline's data set, which is named by import path."""
    parts = load_dataset("mnist", root)
    train, test = (TensorData(p.inputs[:SMALL].clone(), p.targets[:SMALL].clone(), p.scale, p.shift) for p in parts)
    return train, test


def peak_pss(*words: str) -> float:
    """Return the peak PSS in MB of the process tree of `fedsim run WORDS`."""
    with tempfile.TemporaryDirectory() as parent:
        command = [sys.executable, str(ROOT / "run_experiment.py"), *words, "--out", f"{parent}/run"]
        return watch(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent).peak_bytes / 1e6


def _megabytes(parts: tuple[TensorData, TensorData]) -> float:
    return sum(part.inputs.nbytes + part.targets.nbytes for part in parts) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    data, small = load_dataset("mnist"), small_mnist(None)  # type: ignore[arg-type]
    extra = _megabytes(data) - _megabytes(small)
    four = [peak_pss(*EXPERIMENT, "workers=4") for _ in range(repeats)]
    sixty_four = [peak_pss(*EXPERIMENT, "workers=64") for _ in range(repeats)]
    baseline = [peak_pss(*EXPERIMENT, "workers=4", "data.name=memory:small_mnist") for _ in range(repeats)]
    report(
        "memory",
        peak_mb_4_workers=median(four),
        peak_mb_64_workers=median(sixty_four),
        ratio_64_to_4=median([b / a for a, b in zip(four, sixty_four, strict=True)]),
        baseline_mb=median(baseline),
        data_mb=round(_megabytes(data), 1),
        data_copies=median([(a - b) / extra for a, b in zip(four, baseline, strict=True)]),
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
