"""Run and comparison folders for the report tests, from real runs and made up."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import fedsim

ROUNDS, WORKERS = 4, 5


def write_run(folder: Path, *, byzantine: list[int] = (), **settings: Any) -> Path:
    """Run logistic regression, add weights and a partition to its records, and return the folder."""
    experiment = {
        "name": "tried",
        "model": "logistic",
        "engine": "serial",
        "rounds": ROUNDS,
        "workers": WORKERS,
        "local": {"lr": 0.05, "steps": 3},
        "records": {"model": False, "curve": False},
    }
    fedsim.run({**experiment, **settings}, folder)
    add_to_rounds(folder, lambda record: _weights_without(record["cohort"], byzantine))
    (folder / "partition.json").write_text(
        json.dumps({"counts": [[80] * 10 for _ in range(WORKERS)], "byzantine": list(byzantine)})
    )
    return folder


def _weights_without(cohort: list[int], byzantine: list[int]) -> dict[str, Any]:
    """Return equal weights for honest workers and 0 for Byzantine ones, the first of which is excluded."""
    honest = [worker for worker in cohort if worker not in byzantine]
    weights = [1 / len(honest) if worker in honest else 0.0 for worker in cohort]
    return {"weights": weights, "excluded": list(byzantine)[:1], "attack_success": 0.25}


def write_comparison(folder: Path) -> Path:
    axes = {"aggregate.rule": ["mean", "weighted_mean"], "local.lr": [0.01, 0.1], "seed": [0, 1, 2]}

    def make(path: Path, point: dict[str, Any]) -> None:
        write_run(
            path,
            byzantine=[0] if point["aggregate.rule"] == "mean" else [],
            seed=point["seed"],
            aggregate=point["aggregate.rule"],
            local={"lr": point["local.lr"], "steps": 3},
        )

    return write_points(folder, axes, make)


def write_points(folder: Path, axes: dict[str, list[Any]], make, **settings: Any) -> Path:
    """Write a comparison folder whose runs `make(path, point)` may write, and return the folder.

    `settings` are further keys of comparison.json, such as `target`.
    """
    runs = []
    for number, values in enumerate(itertools.product(*axes.values())):
        point = dict(zip(axes, values, strict=True))
        runs.append({"id": f"run{number}", "point": point, "folder": f"runs/run{number}"})
        make(folder / "runs" / f"run{number}", point)
    folder.mkdir(exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps({"name": "tried", "axes": axes, "runs": runs} | settings))
    return folder


def invent_run(folder: Path, accuracies: list[float], rounds: int | None = None, **settings: Any) -> Path:
    """Write a made-up run folder with these accuracies, planned for `rounds` rounds, and return the folder."""
    folder.mkdir(parents=True)
    plan = {"name": "made_up", "rounds": rounds or len(accuracies), "workers": 2, **settings}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plan.items()]
    (folder / "experiment.toml").write_text("\n".join(lines))
    (folder / "environment.json").write_text('{"device": "cpu"}')
    records = [invent_round(number, accuracy) for number, accuracy in enumerate(accuracies, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def invent_round(number: int, accuracy: float) -> dict[str, Any]:
    return {
        "round": number,
        "test_loss": 1 - accuracy,
        "test_accuracy": accuracy,
        "train_loss": 2 - accuracy,
        "seconds": {"broadcast": 0.001, "train": 0.2, "aggregate": 0.01, "test": 0.02},
        "cohort": [0, 1],
        "bytes_up": 1000,
        "bytes_down": 2000,
    }


def on_the_clock(seconds: float, updates: int = 2, staleness: dict[str, int] | None = None):
    """Return a function for `add_to_rounds` that adds asynchronous keys: `seconds` and `updates` per round."""

    def keys(record: dict[str, Any]) -> dict[str, Any]:
        number = record["round"]
        work = {"updates": updates * number, "arrivals": 2 * updates * number, "buffered": 0, "discarded": 0}
        work["staleness"] = staleness or {"0": 1, "3": 1}
        return {"virtual_seconds": seconds * number, "samples": [4, 4], "asynchronous": work}

    return keys


def race_of(runs: int, updates: int, lost: float):
    """Return a function for `add_to_rounds` that adds the keys of a race of `runs` repetitions, 0.01 apart."""

    def keys(record: dict[str, Any]) -> dict[str, Any]:
        accuracies = [record["test_accuracy"] + 0.01 * side for side in ((-1, 1) if runs == 2 else (0,))]
        race = {"runs": runs, "test_accuracies": accuracies, "updates": updates, "updates_lost": lost}
        work = {"updates": updates * record["round"] // runs, "arrivals": updates * record["round"] // runs}
        return {"race": {**race, "lost_fraction": lost / updates}, "asynchronous": work}

    return keys


def add_to_rounds(folder: Path, keys) -> None:
    """Add `keys(record)` to every line of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**record, **keys(record)}) + "\n" for record in records))


def timed_comparison(folder: Path) -> Path:
    """Write a comparison of two variants: "sync" tests every 10 s; "asgd" every 1 s (seed 0) or 2 s (seed 1)."""

    def make(path: Path, point: dict[str, Any]) -> None:
        if point["variant"]["label"] == "sync":
            invent_run(path, [0.2, 0.9, 0.95], mode="clock")
            add_to_rounds(path, lambda record: {"virtual_seconds": 10.0 * record["round"], "samples": [4, 4]})
        else:
            invent_run(path, [0.3, 0.5, 0.9 if point["seed"] else 0.6], mode="clock", policy="asgd")
            add_to_rounds(path, on_the_clock(1.0 + point["seed"]))

    variants = [{"label": "sync"}, {"label": "asgd", "policy": "asgd"}]
    return write_points(folder, {"variant": variants, "seed": [0, 1]}, make, target=0.9)
