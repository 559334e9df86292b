"""Processor time of a worker and round beside the arithmetic of training.

1,000 of 10,000 workers train `logistic` (610 parameters) for one step on one sample per round, in one process with one
thread, with the engines `batched` and `serial` in turns. A round is measured without the test of the global model. All
times are processor times (`time.process_time`), which other programs disturb little, and the best round counts. The
kernels are measured in the same rounds: the functions that gather the batches, compute the gradients and take the steps
are wrapped in a clock. Everything else is overhead: drawing the cohort and the batches, bookkeeping, aggregation and
records.

    python benchmarks/overhead.py [--repeats 3] [--rounds 10]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from common import report

import fedsim
from fedsim.rounds.executor import Executor
from fedsim.training import sequential, stacked

WORKERS, COHORT = 10_000, 1_000
EXPERIMENT = {
    "workers": WORKERS,
    "cohort": COHORT,
    "device": "cpu",
    "model": {"name": "logistic", "inputs": 60},
    "data": {"name": "synthetic", "users": 100},
    "partition": "iid",
    "local": {"batch_size": 1, "steps": 1, "lr": 0.01},
}
ENGINES = {"batched": {"engine": "batched", "processes": 1}, "serial": {"engine": "serial"}}
KERNELS = {"batched": ((stacked, "gather"), (stacked.StackStep, "__call__")), "serial": ((sequential, "train_epoch"),)}
TEST = Executor, "test"


class Stopwatch:
    """Processor time of calls of wrapped functions. Calls inside other wrapped calls must not occur."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.process_time() - begun

        return timed


def rounds_of(engine: str, rounds: int) -> list[tuple[float, float]]:
    """Return (microseconds of overhead, microseconds of kernels) per worker for each round but the first."""
    kernels, tests, marks = Stopwatch(), Stopwatch(), list[tuple[float, ...]]()

    def note(record: Any) -> None:
        marks.append((time.process_time(), tests.seconds, kernels.seconds))

    with ExitStack() as stack:
        for watch, (owner, name) in [(kernels, place) for place in KERNELS[engine]] + [(tests, TEST)]:
            stack.enter_context(patch.object(owner, name, watch.around(getattr(owner, name))))
        fedsim.run({**EXPERIMENT, **ENGINES[engine], "rounds": rounds + 1}, on_round=note)
    spans = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(marks)]
    return [(1e6 / COHORT * (whole - test - kernel), 1e6 / COHORT * kernel) for whole, test, kernel in spans]


def best(rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    overhead, kernels = min(rounds)
    return {"overhead_us": round(overhead, 2), "kernels_us": round(kernels, 2), "all_us": round(overhead + kernels, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, list[tuple[float, float]]] = {engine: [] for engine in arguments.engines}
    for _ in range(arguments.repeats):
        for engine, rounds in measured.items():
            rounds += rounds_of(engine, arguments.rounds)
    figures = {engine: best(rounds) for engine, rounds in measured.items()}
    if len(figures) == len(ENGINES):
        figures["serial_over_batched"] = round(figures["serial"]["all_us"] / figures["batched"]["all_us"], 2)
    metadata = {"workers": WORKERS, "cohort": COHORT, "repeats": arguments.repeats, "rounds": arguments.rounds}
    report("overhead", **figures, **metadata, keep=set(measured) == set(ENGINES))


if __name__ == "__main__":
    main()
