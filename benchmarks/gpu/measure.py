"""Measure speed, launches and memory on a GPU, or at a small scale on the CPU. Each measurement is a pytest case.

The workloads are rounds of experiments, each run in several ways:

w1: 4 workers with 15,000 MNIST images each, `net`, batch size 64.
w2: 10 of 100 clients with 600 images each, `cnn`, batch size 10.
w3: 100 of 1,000 clients with 60 images each, `2nn`, batch size 10.
w4: 50 of 1,000 clients with 50 images in colour each, the network of benchmarks/image_classification.py, batch size 10.

The time of a round is the median over all rounds except the first. The baseline is a bare loop in plain PyTorch, which
trains one worker after another with the data on the device. The case "same work" checks that both have the same model
up to rounding after a round in float64.
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

import pytest
import torch

import fedsim
from benchmarks.gpu.data import workload_data
from benchmarks.gpu.profiling import profiled
from fedsim.engines.stacking.operations import WAYS, way_on

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for imports of the other benchmarks, which are scripts

from bare_loop import bare_loop, without_dropout
from convolutions import SHAPES, Shape, layer, step
from cross_device import HOW, ROUNDING, WORKLOADS, norm_of_difference
from limits import Machine, round_cost, timed

Figures = dict[str, Any]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STACKED = ("engine=batched", "processes=1")
ENGINES = {
    **{"batched": STACKED, "serial": ("engine=serial",), "auto": ("engine=auto",)},
    **{"spawn": ("engine=spawn", "processes=4")},
    **({"no graphs": (*STACKED, "cuda_graphs=false"), "tf32": (*STACKED, "precision=tf32")} if ON_GPU else {}),
}
NAMES = ("w3", "w1", "w2", "w4") if ON_GPU else ("w3",)
ROUNDS = {"w1": 4, "w2": 4, "w3": 12, "w4": 12}
SLOW_ROUNDS = 3  # of ways that train one worker after another
ROWS = (10, 100) if ON_GPU else (4,)  # rows per stack in the convolution measurements
NODES = 120  # kernels in a measured CUDA graph

torch.set_num_threads(1)


def microseconds(work: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the microseconds of one call on the device, averaged over as many calls as fill `seconds` (at least 3)."""
    timed(work, 3, DEVICE)  # warm-up
    count = max(3, min(2000, int(seconds / max(timed(work, 1, DEVICE), 1e-7))))
    return round(1e6 * timed(work, count, DEVICE) / count, 2)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of `work`, or on the CPU `work` itself."""
    if not ON_GPU:
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def launch() -> Figures:
    return {"us": microseconds(partial(torch.randn(1000, device=DEVICE).add_, 1))}


def wait() -> Figures:
    return {"us": microseconds(torch.ones((), device=DEVICE).item)}


def copy_to_the_device() -> Figures:
    return {"us": microseconds(partial(torch.zeros(1000, dtype=torch.int64).to, DEVICE, copy=True))}


def node_of_a_graph() -> Figures:
    """Return the time of a minimal kernel among others in a CUDA graph."""
    numbers = torch.ones(1000, device=DEVICE)

    def add() -> None:
        for _ in range(NODES):
            numbers.add_(1)

    return {"us": round(microseconds(captured(add)) / NODES, 3)}


def convolution(shape: Shape, rows: int) -> Figures:
    """Return the microseconds of a stack's forward and backward pass for each implementation, captured in a graph."""
    tensors = layer(shape, rows, torch.float, DEVICE)
    us = {name: microseconds(captured(partial(step, way, shape, tensors))) for name, way in WAYS.items()}
    return {"us": us, "used": way_on(DEVICE)}


def experiment_of(workload: str, *words: str, rounds: int) -> fedsim.Experiment:
    file, *changes = WORKLOADS[workload]
    experiment = fedsim.load_experiment(file, [*changes, *words, f"rounds={rounds}", f"device={DEVICE.type}"])
    on_mnist = experiment.data.name == "mnist"
    return fedsim.load_experiment(experiment, data=workload_data(quick=not ON_GPU)) if on_mnist else experiment


def rounds_of(workload: str, engine: str) -> Figures:
    rounds = SLOW_ROUNDS if engine == "serial" or not ON_GPU else ROUNDS[workload]
    settings: list[Any] = []
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = fedsim.run(experiment_of(workload, *ENGINES[engine], rounds=rounds), on_start=settings.append)
    run_seconds = round(time.perf_counter() - started, 2)
    seconds = [record["seconds"] for record in result.history]
    return {
        "round_ms": milliseconds([sum(phases.values()) for phases in seconds[1:]]),
        "first_round_ms": milliseconds([sum(seconds[0].values())]),
        "phases_ms": {phase: milliseconds([phases[phase] for phases in seconds[1:]]) for phase in seconds[0]},
        **{"run_seconds": run_seconds, "accuracy": result.test_accuracy},
        "how": {key: settings[0].how[key] for key in (*HOW, "cuda_graphs") if key in settings[0].how},
        **({"peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)} if ON_GPU else {}),  # of this process
    }


def bare_rounds(workload: str) -> Figures:
    bare = bare_loop(experiment_of(workload, rounds=SLOW_ROUNDS), DEVICE)
    return {"round_ms": milliseconds(bare.rounds[1:]), "accuracy": bare.accuracy}


def same_work(workload: str) -> Figures:
    """Return the difference of fedsim and the bare loop after a float64 round, relative to the move of the round."""
    experiment = without_dropout(experiment_of(workload, *STACKED, "precision=float64", rounds=1))
    bare = bare_loop(experiment, DEVICE)
    ours = {key: value.cpu() for key, value in fedsim.run(experiment).model.state_dict().items()}
    difference = norm_of_difference(ours, bare.first) / norm_of_difference(bare.start, bare.first)
    assert difference < ROUNDING
    return {"difference": difference}


@functools.cache
def machine() -> Machine:
    return Machine.measured(DEVICE)


def limit(workload: str) -> Figures:
    """Return the milliseconds of a round's arithmetic at the device's float32 rate, and of its row traffic."""
    experiment = experiment_of(workload, rounds=1)
    data = experiment.data
    train, test = fedsim.load_dataset(data.name, data.root, **data.params)
    cost = round_cost(experiment, tuple(train.inputs.shape[1:]), len(train), len(test))
    arithmetic, rows = cost.flops / machine().rate, cost.row_bytes / machine().bandwidth
    return {
        **{"limit_ms": round(1e3 * max(arithmetic, rows), 3), "gflop": round(cost.flops / 1e9, 1)},
        **{"arithmetic_ms": round(1e3 * arithmetic, 3), "row_traffic_ms": round(1e3 * rows, 3)},
        **machine().figures(),
    }


def profile_of_batched(workload: str) -> Figures:
    """Return the kernels, launches and waits of the third round."""
    with profiled() as (start, stop, figures):

        def on_round(record: dict[str, Any]) -> None:
            {2: start, 3: stop}.get(record["round"], int)()

        fedsim.run(experiment_of(workload, *STACKED, rounds=3), on_round=on_round)
    return figures


def profile_of_the_bare_loop(workload: str) -> Figures:
    """Return the kernels, launches and waits of a run of one round."""
    experiment = experiment_of(workload, rounds=1)
    with profiled() as (start, stop, figures):
        start()
        bare_loop(experiment, DEVICE)
        stop()
    return figures


def milliseconds(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def measurements() -> dict[str, Callable[[], Figures]]:
    """Return all measurements by their names in the results, the most informative first."""
    main: dict[str, Callable[[str], Figures]] = {
        "batched": partial(rounds_of, engine="batched"),
        **{"bare loop": bare_rounds, "limit": limit, "same work": same_work},
        **{"batched, profile": profile_of_batched, "bare loop, profile": profile_of_the_bare_loop},
    }
    others = {engine: partial(rounds_of, engine=engine) for engine in ENGINES if engine != "batched"}
    return {
        **{"launch": launch, "wait": wait, "copy of 8 kB to the device": copy_to_the_device},
        "node of a graph": node_of_a_graph,
        **{f"{name}, {way}": partial(work, name) for way, work in main.items() for name in NAMES},
        **{f"{name}, {k} rows": partial(convolution, shape, k) for name, shape in SHAPES.items() for k in ROWS},
        **{f"{name}, {way}": partial(work, name) for way, work in others.items() for name in NAMES},
    }


MEASUREMENTS = measurements()


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measurement(name: str, record_property: Callable[[str, object], None]) -> None:
    record_property("figures", MEASUREMENTS[name]())
