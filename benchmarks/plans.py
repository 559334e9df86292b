"""How good the choice of the engine `auto` is, compared with the best of all choices in the same run.

There are two parts, both on a CPU:

- stacks: training of ten rows in one process with one thread, row by row and stacked, for several models and batch
  sizes. The constants in `fedsim/engines/auto.py` are based on these figures.
- workloads: the whole commands of `workloads.py` with `auto` and with each engine that it chooses from, in turn.
  The figure is the time of `auto` divided by the shortest time of the others, for the whole command.

The benchmark checks that all engines do the same work: in float64 their global rows agree after a round of few steps.

A repetition takes more than seven minutes on 2 cores, and nothing is printed before the end.

    FEDSIM_DATA=... python benchmarks/plans.py [--workloads w1,w2,w3,w4] [--repeats 3]
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from common import CPU, median, report, run_command
from workloads import WORKLOADS

import fedsim
from benchmarks.peers.compare import HOW, norm_of_difference

MODELS, BATCHES = ("logistic", "2nn", "net", "cnn"), (10, 32, 64, 250)
ROWS, STEPS, TIMES = 10, 4, 4
ROUNDING = 1e-9
WAYS = {
    "serial": ("engine=serial",),
    "processes": ("engine=processes",),
    "batched, one process": ("engine=batched", "processes=1"),
    "batched": ("engine=batched",),
}


def training_seconds(model: str, batch_size: int, engine: str) -> float:
    """Return the shortest time of a short round in one process."""
    local = {"batch_size": batch_size, "steps": STEPS}
    tables = {"model": model, "workers": ROWS, "engine": engine, "rounds": TIMES, "local": local}
    if engine == "batched":
        tables["processes"] = 1
    return min(record["seconds"]["train"] for record in fedsim.run(tables).history)


def choice(model: str, batch_size: int) -> str:
    """Return the engine that `auto` chooses in one process."""
    settings: list[Any] = []
    local = {"batch_size": batch_size, "steps": 1}
    fedsim.run({"model": model, "workers": ROWS, "rounds": 1, "processes": 1, "local": local}, on_start=settings.append)
    return settings[0].how["engine"]


def stacks() -> dict[str, Any]:
    """Return the microseconds per step and row and the speedup of stacks, for each model and batch size."""
    figures = {}
    for model, batch_size in itertools.product(MODELS, BATCHES):
        seconds = {engine: training_seconds(model, batch_size, engine) for engine in ("serial", "batched")}
        figures[f"{model}, batches of {batch_size}"] = {
            "serial_microseconds": round(seconds["serial"] / ROWS / STEPS * 1e6),
            "times_faster_stacked": round(seconds["serial"] / seconds["batched"], 2),
            "choice": choice(model, batch_size),
        }
    return figures


def check_same_work(words: tuple[str, ...]) -> float:
    """Return the largest difference of the engines' global rows after one round in float64."""
    short = (*words, "rounds=1", "precision=float64", "local.steps=2")
    short = tuple(word for word in short if not word.startswith("local.epochs"))
    states = [run_command(*short, *way).state for way in WAYS.values()]
    apart = max(norm_of_difference(states[0], state) for state in states[1:])
    assert apart < ROUNDING, f"{words[0]}: the engines' global rows differ by {apart}"
    return apart


def workload(words: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Return the figures of a workload, with the whole commands timed in turn."""
    ways = {"auto": ("engine=auto",), **WAYS}
    runs = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            runs[name].append(run_command(*words, *way))
    seconds = {name: min(run.seconds for run in of_way) for name, of_way in runs.items()}
    best = min(WAYS, key=seconds.__getitem__)
    environment = runs["auto"][0].environment
    return {
        "auto_over_best": round(seconds["auto"] / seconds[best], 3),
        "best": best,
        "choice": {key: environment[key] for key in HOW if key in environment},
        "run_seconds": {name: round(value, 2) for name, value in seconds.items()},
        "rounds_seconds": {name: median([sum(run.rounds) for run in of_way]) for name, of_way in runs.items()},
        "difference": check_same_work(words),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated names; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    names = options.workloads.split(",")
    figures = {name: workload(WORKLOADS[name], options.repeats) for name in names}
    report("plans", device=CPU, workloads=figures, stacks=stacks(), repeats=options.repeats)


if __name__ == "__main__":
    main()
