"""Time of whole commands without their rounds, relative to the import of PyTorch.

A command runs ten tiny rounds of `model=logistic` with four workers. Commands and `import torch` take turns. Each
figure is the median over the turns of the ratio to the import in the same turn, measured until the import returns. The
figures are the time to the first round, the time after the last round, and the whole time. All commands must leave the
same model, up to the rounding of stacks.

    python benchmarks/startup.py [--repeats 5] [--no-keep]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import MODEL, median, report
from safetensors.torch import load_file

ROUNDS = 10
COMMANDS = {
    "one process": ["engine=serial"],
    "two processes": ["engine=processes", "processes=2"],
    "two processes, spawned": ["engine=processes", "processes=2", "start_method=spawn"],
    "stacks": ["engine=batched", "processes=1"],
    "auto": ["engine=auto"],
}


def times_of_lines(arguments: list[str]) -> tuple[list[tuple[float, str]], float]:
    """Return a Python program's output as (seconds since its start, line), and the seconds until its end."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        lines = [(time.perf_counter() - started, line) for line in program.stdout]
    assert program.returncode == 0, arguments
    return lines, time.perf_counter() - started


def seconds_of_import() -> float:
    ((seconds, _),), _ = times_of_lines(["-c", "import torch; print('imported', flush=True)"])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-keep", action="store_true", help="print the figures without storing them")
    arguments = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in COMMANDS}
    imports: list[float] = []
    first: dict[str, torch.Tensor] | None = None
    seconds_of_import()  # warms the file cache
    for _ in range(arguments.repeats):
        imports.append(seconds_of_import())
        for name, settings in COMMANDS.items():
            with tempfile.TemporaryDirectory() as folder:
                words = ["run", f"rounds={ROUNDS}", "workers=4", "model=logistic", "data=mnist5k", *settings]
                lines, end = times_of_lines(["-m", "fedsim", *words, "--out", f"{folder}/run"])
                weights = load_file(Path(folder) / "run" / MODEL)
                assert (Path(folder) / "run" / "curve.png").exists()
            first = weights if first is None else first
            for key, tensor in weights.items():
                torch.testing.assert_close(tensor, first[key], atol=1e-6, rtol=0)
            rounds = {int(match[1]): at for at, line in lines if (match := re.match(r"\s*(\d+)\s+[\d.]+", line))}
            for phase, seconds in {
                "to_first_round": rounds[1],
                "after_last_round": end - rounds[ROUNDS],
                "whole": end,
            }.items():
                ratios[name].setdefault(phase, []).append(seconds / imports[-1])
    figures = {name: {phase: median(some) for phase, some in by.items()} for name, by in ratios.items()}
    report("startup", import_seconds=median(imports), repeats=arguments.repeats, **figures, keep=not arguments.no_keep)


if __name__ == "__main__":
    main()
