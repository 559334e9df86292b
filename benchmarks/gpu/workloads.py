"""Three experiments on the device: seconds of a round with fedsim, with plain loops, and at the limit.

w1: 4 workers of 15,000 MNIST images, `net`, batches of 64.
w2: 10 of 100 clients of 600 images, `cnn`, batches of 10.
w3: 100 of 1,000 clients of 60 images, `2nn`, batches of 10.

The figure of a round is the median over all rounds but the first. That fedsim and the bare loop do the same work is
checked in float64, where a round leaves both with the same model up to rounding.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedsim
from benchmarks.gpu.cases import Case, Context, Facts, NotApplicableError, check, need_gpu
from benchmarks.gpu.comparing import HOW
from benchmarks.gpu.data import workload_data
from benchmarks.gpu.naive import naive_run
from benchmarks.gpu.profiling import Profile
from fedsim.system.devices import resolve_device

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the other benchmarks, which are programs

from bare_loop import bare_loop, without_dropout
from cross_device import ROUNDING, WORKLOADS, norm_of_difference
from limits import Machine, round_cost

STACKED = ("engine=batched", "processes=1")
ENGINES = {
    "batched": STACKED,
    "serial": ("engine=serial",),
    "auto": ("engine=auto",),
    "spawn": ("engine=spawn", "processes=4"),
    "no graphs": (*STACKED, "cuda_graphs=false"),
    "tf32": (*STACKED, "precision=tf32"),
}
NEED_GPU = ("no graphs", "tf32")
ROUNDS = {"w1": 4, "w2": 4, "w3": 12}
SLOW_ROUNDS = 3  # of what takes one worker after another
MOST_NAIVE = 16  # processes at a time
LIMIT, NAIVE_LIMIT = 60.0, 110.0  # seconds of a case

torch.set_num_threads(1)

Way = Callable[[Context, str], Facts]


def cases(context: Context) -> list[Case]:
    """In the order of what they tell: every workload in the main ways, before any of them in the others."""
    ways: dict[str, Way] = {
        "batched": partial(rounds_of_engine, engine="batched"),
        **{"bare loop": bare_rounds, "limit": limit, "same work": same_work, "profile": profile},
        **{name: partial(rounds_of_engine, engine=name) for name in ENGINES if name != "batched"},
        "naive": naive,
    }
    names = ("w3",) if context.quick else ("w3", "w1", "w2")
    limits = {"naive": NAIVE_LIMIT}
    return [
        Case(f"{name}, {way}", partial(work, context, name), limits.get(way, LIMIT))
        for way, work in ways.items()
        for name in names
    ]


def experiment_of(context: Context, name: str, *words: str, rounds: int) -> fedsim.Experiment:
    given = [*WORKLOADS[name][1:], *words, f"rounds={rounds}", f"device={context.device}"]
    experiment = fedsim.load_experiment(WORKLOADS[name][0], given)
    return fedsim.load_experiment(experiment, data=workload_data(context.quick))


def rounds_of_engine(context: Context, name: str, *, engine: str) -> Facts:
    if engine in NEED_GPU:
        need_gpu(context)
    rounds = SLOW_ROUNDS if context.quick or engine == "serial" else ROUNDS[name]
    settings: list[Any] = []
    if context.on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    started = time.perf_counter()
    result = fedsim.run(experiment_of(context, name, *ENGINES[engine], rounds=rounds), on_start=settings.append)
    run_seconds = time.perf_counter() - started
    seconds = [record["seconds"] for record in result.history]
    phases = {phase: milliseconds([each[phase] for each in seconds[1:]]) for phase in seconds[0]}
    return {
        "round_ms": milliseconds([sum(each.values()) for each in seconds[1:]]),
        **{"first_round_ms": milliseconds([sum(seconds[0].values())]), "phases_ms": phases},
        **{"run_seconds": round(run_seconds, 2), "accuracy": result.test_accuracy},
        "how": {key: settings[0].how[key] for key in HOW if key in settings[0].how},
        **({"device_mib": round(torch.cuda.max_memory_allocated(context.device) / 2**20)} if context.on_gpu else {}),
    }


def bare_rounds(context: Context, name: str) -> Facts:
    """One worker after another in plain PyTorch, with the data on the device."""
    found = bare_loop(experiment_of(context, name, rounds=SLOW_ROUNDS), resolve_device(context.device))
    return {"round_ms": milliseconds(found.rounds[1:]), "accuracy": found.accuracy}


def same_work(context: Context, name: str) -> Facts:
    """How far fedsim and the bare loop are from one another after a round in float64, relative to its move."""
    experiment = without_dropout(experiment_of(context, name, *STACKED, "precision=float64", rounds=1))
    bare = bare_loop(experiment, resolve_device(context.device))
    ours = {key: value.cpu() for key, value in fedsim.run(experiment).model.state_dict().items()}
    off = norm_of_difference(ours, bare.first) / norm_of_difference(bare.start, bare.first)
    return check(off < ROUNDING, f"fedsim and the bare loop differ by {off:.1e} of the round's move", off=off)


@functools.cache
def machine(device: str) -> Machine:
    return Machine.measured(resolve_device(device))


def limit(context: Context, name: str) -> Facts:
    """Milliseconds of a round's arithmetic at the device's rate in float32, and of the traffic of its rows."""
    experiment = experiment_of(context, name, rounds=1)
    data = experiment.data
    train, test = fedsim.load_dataset(data.dataset, data.root, **data.params)
    cost = round_cost(experiment, tuple(train.inputs.shape[1:]), len(train), len(test))
    arithmetic, rows = cost.flops / machine(context.device).rate, cost.row_bytes / machine(context.device).bandwidth
    return {
        **{"limit_ms": round(1e3 * max(arithmetic, rows), 3), "gflop": round(cost.flops / 1e9, 1)},
        **{"arithmetic_ms": round(1e3 * arithmetic, 3), "row_traffic_ms": round(1e3 * rows, 3)},
        **machine(context.device).figures(),
    }


def profile(context: Context, name: str) -> Facts:
    """What the device does in a later round."""
    need_gpu(context)
    profiled = Profile(after_round=2)
    fedsim.run(experiment_of(context, name, *STACKED, rounds=3), on_round=profiled.on_round)
    return profiled.facts()


def naive(context: Context, name: str) -> Facts:
    """A new process for each worker in every round."""
    experiment = experiment_of(context, name, rounds=1)
    if not context.on_gpu:
        raise NotApplicableError(f"would start {experiment.cohort_size} processes on a few cores")
    found = naive_run(experiment, context.device, MOST_NAIVE)
    expected = steps_of(experiment)
    facts = {"round_ms": milliseconds(found.rounds), "accuracy": found.accuracy, "steps": found.steps}
    return check(found.steps == expected, f"takes {found.steps} steps, not {expected}", **facts)


def steps_of(experiment: fedsim.Experiment) -> int:
    """Of all workers in the first round, whose shards are of one size."""
    train, _ = fedsim.load_dataset(experiment.data.dataset, experiment.data.root, **experiment.data.params)
    local, shard = experiment.local, len(train) // experiment.workers
    return experiment.cohort_size * local.epochs * -(-shard // local.batch_size)


def milliseconds(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)
