"""Time of a local step of each client algorithm, relative to a step of plain SGD on the same engine.

Every algorithm trains the same workers on the same batches. `per_gradient` is its time relative to SGD, divided by the
number of gradients that its definition needs per batch. A pass over all samples at the start of a round counts as one
gradient. In float64 the rows of both engines must agree up to rounding after two rounds. Only training is timed, in
float32, without start-up and tests.

    python benchmarks/solvers.py [--repeats 5] [--rounds 11] [--model 2nn]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import median, report

import fedsim

ENGINES: dict[str, dict[str, Any]] = {"serial": {}, "batched": {"processes": 1}}
ALGORITHMS: dict[str, tuple[int, dict[str, Any]]] = {  # gradients per batch, and parameters
    "sgd": (1, {}),
    "fedprox": (1, {}),
    "adam": (1, {"lr": 1e-3}),
    "scaffold": (1, {}),
    "fednova": (1, {}),
    "feddyn": (1, {}),
    "fedsam": (2, {}),
    "mimelite": (2, {}),
    "mime": (3, {}),
    "ditto": (2, {}),
    "pfedme": (5, {"inner_steps": 5}),
    "apfl": (2, {"adaptive": True}),
    "per_fedavg": (1, {}),
}
BATCH = 10
TOLERANCE = 1e-8  # allowed difference between float64 rows


def seconds_of_step(tables: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Return the median time of a local step over all rounds except the first, and the final row."""
    result = fedsim.run({**tables, "local": {"batch_size": BATCH, **tables["local"]}})
    seconds = [
        record["seconds"]["train"] / sum(-(-samples // BATCH) for samples in record["samples"])
        for record in result.history[1:]
    ]
    return statistics.median(seconds), result.global_row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--model", default="2nn")
    parser.add_argument("--no-keep", action="store_true", help="print the figures without storing them")
    arguments = parser.parse_args()
    base = {"model": arguments.model, "workers": 20, "cohort": 4, "rounds": arguments.rounds, "data": "mnist5k"}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.repeats):  # algorithms take turns, so that a slow period does not affect only one of them
        for engine, settings in ENGINES.items():
            for name, (_, params) in ALGORITHMS.items():
                local = {"algorithm": name, **params}
                seconds, _ = seconds_of_step({**base, "engine": engine, **settings, "local": local})
                times.setdefault((engine, name), []).append(seconds)
    figures: dict[str, Any] = {}
    for name, (gradients, params) in ALGORITHMS.items():
        wide = {**base, "precision": "float64", "rounds": 2, "local": {"algorithm": name, **params}}
        rows = [seconds_of_step({**wide, "engine": engine, **settings})[1] for engine, settings in ENGINES.items()]
        furthest = float((rows[0] - rows[1]).abs().max())
        assert furthest < TOLERANCE, f"{name}: the engines did different work: rows differ by {furthest}"
        figures[name] = {"gradients": gradients, "largest_difference": furthest}
        for engine in ENGINES:
            pairs = zip(times[engine, name], times[engine, "sgd"], strict=True)
            ratio = median([ours / of_sgd for ours, of_sgd in pairs])
            figures[name][engine] = {"over_sgd": ratio, "per_gradient": round(ratio / gradients, 4)}
    report("solvers", model=arguments.model, repeats=arguments.repeats, **figures, keep=not arguments.no_keep)


if __name__ == "__main__":
    main()
