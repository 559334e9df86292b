"""Reading a data set of 1 GB of uint8 images, and the number of its copies in the memory of all processes.

Reading: CPU seconds of `load_dataset` against those of a plain read of the same bytes (`numpy.fromfile`), both
from the page cache, in turn. Copies: the proportional set size (PSS) of a run with two spawned processes, sampled every
20 ms, less that of the same run on few images, divided by the size of the data set. At the peak, which is the highest
sample, the data set moves to shared memory; the other figure is the median while rounds run.

    python benchmarks/loading.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, median, report
from watching import tree_pss

from fedsim import load_dataset
from fedsim.data.formats.images import MNIST_FILES

IMAGES, FEW, TESTS = 1_275_510, 5_000, 1_000  # 28 x 28 pixels: 1 GB
SETTINGS = [
    *(
        "engine=processes",
        "processes=2",
        "start_method=spawn",
        "workers=4",
        "model=logistic",
        "rounds=15",
        "local.steps=50",
    ),
    *("data.name=mnist", "local.batch_size=32"),
]


def write(root: Path, images: int) -> Path:
    """Write files in the format of MNIST with random pixels; return the file of the training images."""
    folder, rng = root / "MNIST" / "raw", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for pixels, labels, n in ((*MNIST_FILES[:2], images), (*MNIST_FILES[2:], TESTS)):
        for name, shape in ((pixels, (n, 28, 28)), (labels, (n,))):
            with open(folder / name, "wb") as file:
                file.write(bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes())
                rng.integers(0, 256 if name == pixels else 10, shape, dtype=np.uint8).tofile(file)
    return folder / MNIST_FILES[0]


def read_seconds(root: Path, path: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of `load_dataset` and of plain reads, which vary less than wall time on a busy machine."""
    seconds: tuple[list[float], list[float]] = [], []
    load_dataset("mnist", root)  # imports, and the page cache
    for _ in range(repeats):
        for times, read in zip(
            seconds, (lambda: load_dataset("mnist", root), lambda: np.fromfile(path, np.uint8)), strict=True
        ):
            started = time.process_time()
            held = read()
            times.append(time.process_time() - started)
            del held
    return seconds


def pss(root: Path) -> tuple[float, float]:
    """Highest PSS of a run, and its median while rounds run, in bytes."""
    with tempfile.TemporaryDirectory() as parent:
        command = [sys.executable, "run_experiment.py", *SETTINGS, f"data.root={root}", "--out", f"{parent}/run"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
        samples, in_rounds, metrics = [], [], Path(parent) / "run" / "metrics.jsonl"
        while process.poll() is None:
            samples.append(tree_pss(process.pid))
            if metrics.exists() and metrics.stat().st_size:
                in_rounds.append(samples[-1])
            time.sleep(0.02)
        assert process.returncode == 0, command
    return max(samples), statistics.median(in_rounds[:-3])  # the last ones see processes that end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as large, tempfile.TemporaryDirectory() as small:
        path = write(Path(large), IMAGES)
        write(Path(small), FEW)
        nbytes = path.stat().st_size
        ours, plain = read_seconds(Path(large), path, 2 * repeats + 1)
        runs = [(pss(Path(large)), pss(Path(small))) for _ in range(repeats)]
        peaks, rounds = ([(a[n] - b[n]) / nbytes for a, b in runs] for n in (0, 1))
    report(
        "loading",
        data_gb=round(nbytes / 1e9, 3),
        plain_read_cpu_s=median(plain),
        load_cpu_s=median(ours),
        load_to_plain_read=median([a / b for a, b in zip(ours, plain, strict=True)]),
        data_copies_at_the_peak=median(peaks),
        data_copies_in_rounds=median(rounds),
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
