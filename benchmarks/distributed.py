"""Ranks of the engine `distributed` on one host: scaling, time compared with `processes`, and bytes sent.

Workers train `2nn` on random images of MNIST's size with batch size 10 and one thread per process. The time of a round
is the sum of its phases without the test, as the median over all rounds except the first. Strong scaling: 8 workers on
1, 2 and 4 ranks. Weak scaling: 4 workers per rank. The baseline is the engine `processes` with the same number of
processes. Then rounds of `sync = "gradients"` that average with each hook are compared with the mean of the workers'
rows. Before the timing, the rows of the ranks are compared with those of `serial`.

Bytes are counted by the kernel at the loopback interface of a new network namespace (Linux, as root). The bytes of a
run of two rounds are subtracted from those of a run of six rounds, which removes start and end. The result is compared
with the formulas in fedsim/engines/distributed.py. Without a network namespace, bytes are not measured.

    python benchmarks/distributed.py [--rounds 6] [--most-ranks 4]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, median, report
from safetensors.torch import load_file

import fedsim
from fedsim.data import TensorData
from fedsim.records.history import METRICS
from fedsim.records.run_folder import MODEL

ALLOWED = 1.3  # allowed multiple of the time of processes's round
EXACT = 0.05  # allowed relative difference between measured bytes and the formula
TOLERANCE = 1e-9  # allowed difference between rows of engines, in float64
WORKERS, A_RANK = 8, 4  # workers in strong scaling, and workers per rank in weak scaling
SAMPLES = 100  # per worker
NAMESPACE = "fedsim-benchmark"
BATCH = 10
RULES = {"mean": {}, "median": {"aggregate": "median"}, "krum": {"aggregate": {"rule": "krum", "f": 1}}}
RANK = 4  # rank of PowerSGD's factors
HOOKS = {
    "allreduce": {"name": "allreduce"},
    "fp16": {"name": "fp16"},
    "powersgd": {"name": "powersgd", "matrix_approximation_rank": RANK, "start_powerSGD_iter": 2},
}
AS_ROWS = {"sync": "gradients", "aggregate": {"nonfinite": "exclude"}}  # the mean, computed from the workers' rows


def images(root: str | None, *, n: int = 800) -> tuple[TensorData, TensorData]:
    """Return n random training images of MNIST's size, and test images."""
    rng = np.random.default_rng(0)

    def some(count: int) -> TensorData:
        inputs = torch.from_numpy(rng.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8))
        return TensorData(inputs, torch.from_numpy(rng.integers(0, 10, count)), scale=1 / 255)

    return some(n), some(250)


def experiment(workers: int, rounds: int, **changes: Any) -> dict[str, Any]:
    return {
        "workers": workers,
        "rounds": rounds,
        "model": "2nn",
        "data": {"name": "distributed:images", "n": workers * SAMPLES},
        "local": {"batch_size": BATCH, "lr": 0.05},
        "records": {"curve": False},
        **changes,
    }


def run(tables: dict[str, Any], ranks: int = 0, inside: list[str] | None = None) -> tuple[list[Any], Any, int]:
    """Return a run's history, final model and bytes at loopback. `ranks`: number of ranks (0: without a launcher)."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "experiment.toml", Path(folder) / "run"
        path.write_text(fedsim.config.files.to_toml(fedsim.Experiment(**tables)))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        command = [sys.executable, *launcher, "run_experiment.py", str(path), "--allow-imports", "--quiet"]
        command += ["--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise torchrun warns of hosts without a name
        before = loopback_bytes(inside)
        subprocess.run([*(inside or []), *command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
        sent = loopback_bytes(inside) - before
        history = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
        return history, load_file(out / MODEL), sent


def loopback_bytes(inside: list[str] | None) -> int:
    """Return the kernel's count of bytes sent through the loopback interface."""
    if inside is None:
        return 0
    counts = subprocess.run([*inside, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in counts.splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


@contextlib.contextmanager
def own_network() -> Iterator[list[str] | None]:
    """Yield the command prefix that runs a command in a separate network, or None if that is not possible."""
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", NAMESPACE], capture_output=True).returncode:
        yield None
        return
    try:
        subprocess.run(["ip", "-n", NAMESPACE, "link", "set", "lo", "up"], check=True)
        yield ["ip", "netns", "exec", NAMESPACE]
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


def round_seconds(history: list[Any]) -> float:
    """Return the median seconds of a round without its test. The first round is ignored."""
    return median([sum(record["seconds"].values()) - record["seconds"]["test"] for record in history[1:]])


def check_work(ranks: int) -> float:
    """Return the largest difference between rows of the ranks and of `serial`, which must be due to rounding."""
    tables = experiment(WORKERS, 2, precision="float64")
    models = [run({**tables, "engine": "distributed"}, ranks)[1], run({**tables, "engine": "serial"})[1]]
    difference = max(float((models[0][name] - models[1][name]).abs().max()) for name in models[0])
    assert difference <= TOLERANCE, f"{ranks} ranks: rows differ by {difference}"
    return difference


def formula(rule: str, n: int, d: int, ranks: int) -> float:
    """Return the bytes of float32 rows that all ranks together send per round (fedsim/engines/distributed.py)."""
    if rule == "mean":
        return 2 * (ranks - 1) * d * 4
    pairs = 2 * (ranks - 1) * n * n * 8 if rule == "krum" else 0
    return (n * d * (ranks - 1) / ranks + (ranks - 1) * d) * 4 + pairs


def formula_of_hook(hook: str, shapes: list[tuple[int, ...]], ranks: int) -> float:
    """Return the bytes that all ranks together send to average gradients of these shapes with a hook."""
    d = sum(map(math.prod, shapes))
    if hook == "powersgd":
        factors = sum(RANK * sum(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes)
        return 2 * (ranks - 1) * factors * 4
    return 2 * (ranks - 1) * d * (2 if hook == "fp16" else 4)


def measured_bytes(changes: dict[str, Any], ranks: int, inside: list[str]) -> tuple[float, list[tuple[int, ...]]]:
    """Return the bytes of a round as counted by the kernel, and the shapes of the model's tensors."""
    rounds = {}
    for count in (2, 6):
        _, model, rounds[count] = run(experiment(WORKERS, count, engine="distributed", **changes), ranks, inside)
    return (rounds[6] - rounds[2]) / 4, [tuple(tensor.shape) for tensor in model.values()]


def by_hook(hook: str) -> dict[str, Any]:
    return {"sync": "gradients", "distributed": {"hook": HOOKS[hook]}}


def bytes_of_all(counts: list[int], inside: list[str]) -> dict[str, Any]:
    """Return the bytes of a round for each rule and hook, and their ratios to the formulas."""
    figures: dict[str, Any] = {}
    cases = {**RULES, **{f"gradients_{hook}": by_hook(hook) for hook in HOOKS}}
    for name, changes in cases.items():
        for count in counts:
            sent, shapes = measured_bytes(changes, count, inside)
            if name in RULES:
                expected = formula(name, WORKERS, sum(map(math.prod, shapes)), count)
            else:
                expected = SAMPLES / BATCH * formula_of_hook(name.removeprefix("gradients_"), shapes, count)
            figures.setdefault(f"{name}_bytes", {})[str(count)] = round(sent)
            figures.setdefault(f"{name}_of_formula", {})[str(count)] = round(sent / expected, 3)
    return figures


def seconds_of_gradients(counts: list[int], rounds: int) -> dict[str, Any]:
    """Return the seconds of a round of gradients, for each hook and for rows of single workers."""
    ways = {**{f"gradients_{hook}_seconds": by_hook(hook) for hook in HOOKS}, "gradients_as_rows_seconds": AS_ROWS}
    tables = {name: experiment(WORKERS, rounds + 1, engine="distributed", **way) for name, way in ways.items()}
    return {name: [round_seconds(run(each, count)[0]) for count in counts] for name, each in tables.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--most-ranks", type=int, default=4)
    options = parser.parse_args()
    counts = [count for count in (1, 2, 4) if count <= options.most_ranks]
    figures: dict[str, Any] = {"ranks": counts, "rows_differ_by": check_work(counts[-1])}
    for name, workers_of in (("strong", lambda _: WORKERS), ("weak", lambda count: A_RANK * count)):
        for count in counts:
            tables = experiment(workers_of(count), options.rounds + 1)
            ranked = round_seconds(run({**tables, "engine": "distributed"}, count)[0])
            spawned = round_seconds(run({**tables, "engine": "processes", "processes": count})[0])
            figures.setdefault(f"{name}_seconds", []).append(ranked)
            figures.setdefault(f"{name}_spawn_seconds", []).append(spawned)
            figures.setdefault(f"{name}_ratio", []).append(round(ranked / spawned, 3))
    cores = fedsim.system.devices.usable_cores()
    worst = max(
        ratio
        for name in ("strong", "weak")
        for count, ratio in zip(counts, figures[f"{name}_ratio"], strict=True)
        if count <= cores
    )
    figures["allowed_ratio"], figures["holds"] = ALLOWED, worst <= ALLOWED
    figures |= seconds_of_gradients(counts, options.rounds)
    with own_network() as inside:
        if inside is not None:
            figures |= (counted := bytes_of_all([count for count in counts if count > 1], inside))
            shares = {
                name: counted[name] for name in counted if name.endswith("_of_formula") and "powersgd" not in name
            }
            figures["holds"] &= all(abs(share - 1) <= EXACT for each in shares.values() for share in each.values())
    report("distributed", **figures)


if __name__ == "__main__":
    main()
