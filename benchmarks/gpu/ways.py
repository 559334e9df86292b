"""One small run in each engine, mode and precision."""

from __future__ import annotations

from benchmarks.gpu.cases import Case, Context, Facts, check
from benchmarks.gpu.comparing import STACKED, TINY, compared, run
from fedsim.system.precision import PRECISIONS

WAYS = {
    "serial": {"engine": "serial"},
    "batched": STACKED,
    "batched, no graphs": {**STACKED, "cuda_graphs": False},
    "batched, dropout": {**STACKED, "model": "net"},
    "spawn": {"engine": "spawn", "processes": 2},
    "auto": {"engine": "auto"},
    "batched, gradients": {**STACKED, "sync": "gradients"},
    "batched, BatchNorm": {**STACKED, "model": "tests.models:Normalised"},
    "batched, convolutions": {**STACKED, "model": "cnn", "rounds": 1},
    "batched, 2 processes": {"engine": "batched", "processes": 2},
    "spawn, median": {"engine": "spawn", "processes": 2, "workers": 5, "aggregate": "median"},
    "clock": {"engine": "serial", "mode": "clock", "policy": "asgd"},
    "float32": {**STACKED, "precision": "float32"},
    "tf32": {**STACKED, "precision": "tf32"},
    "bf16": {**STACKED, "precision": "bf16", "model": "net"},
}
RACES = ("hogwild", "locked")


def cases(context: Context) -> list[Case]:
    found = []
    for name, changes in WAYS.items():
        tables = {"engine": "serial", **TINY, **changes}
        if not context.on_gpu and (PRECISIONS[tables["precision"]].tf32 or tables.get("cuda_graphs") is False):
            continue
        found.append(compared(context, name, tables, limit=60.0))
    return found + [Case(f"race, {policy}", lambda policy=policy: race(context, policy)) for policy in RACES]


def race(context: Context, policy: str, **more: object) -> Facts:
    """Real processes that race: their results depend on time, so what counts is that they learn."""
    local = {"batch_size": 16, "lr": 0.05}
    racing = {"mode": "race", "policy": {"name": policy, **more}, "engine": "spawn", "processes": 2}
    tables = {**TINY, "precision": "float32", "rounds": 3, "local": local, **racing, "race": {"runs": 1}}
    last = run(context, tables).history[-1]
    kept = {key: last["race"].get(key) for key in ("samples_per_second", "updates_lost", "torn_reads")}
    return check(last["test_accuracy"] > 0.15, "does not learn", accuracy=last["test_accuracy"], **kept)
