"""Measure speed, launches and memory on a GPU, or at a small scale on the CPU. Each measurement is a pytest case.

The workloads are rounds of experiments, each run in several ways:

w1: 4 workers with 15,000 MNIST images each, `net`, batch size 64.
w2: 10 of 100 clients with 600 images each, `cnn`, batch size 10.
w3: 100 of 1,000 clients with 60 images each, `2nn`, batch size 10.
w3-1000: all 1,000 clients of w3.
w4: 50 of 1,000 clients with 50 images in colour each, the network of benchmarks/image_classification.py, batch size 10.
resnet20, char_lstm, gpt: the models of benchmarks/models.py with eight times the data, resnet20 with GroupNorm.

The time of a round is the median over all rounds except the first. Baselines are a bare loop in plain PyTorch, which
trains one worker after another, and the programs in benchmarks/gpu/baselines.py. A baseline trains as many samples as
fedsim in each round, and its test accuracy agrees with fedsim's. The cases "same work" check that it has the same model
up to rounding after a round in float64 with few samples. Goals are in benchmarks/gpu/goals.py.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import models
import pytest
import rules
import torch
from bare_loop import bare_loop, without_dropout
from common import ROOT
from convolutions import SHAPES, Shape, layer, step
from limits import Machine, round_cost, timed
from workloads import WORKLOADS

import fedsim
from benchmarks.gpu.baselines import captured, jax_of, run_baseline
from benchmarks.gpu.data import workload_data
from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.profiling import profiled
from benchmarks.peers.compare import HOW, difference
from benchmarks.peers.export import work_of
from benchmarks.peers.work import Result
from fedsim.errors import FedsimError
from fedsim.system.devices import release_memory
from fedsim.system.precision import full_precision
from fedsim.training.operations import WAYS, way_for

Figures = dict[str, Any]

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STACKED = ("engine=batched", "processes=1")
ENGINES = {
    **{"batched": STACKED, "serial": ("engine=serial",), "auto": ("engine=auto",)},
    **{"processes": ("engine=processes", "processes=4")},
    **({"no graphs": (*STACKED, "cuda_graphs=false"), "tf32": (*STACKED, "precision=tf32")} if ON_GPU else {}),
}
NAMES = ("w3", "w1", "w2")
OTHERS = tuple(name for name in WORKLOADS if name not in NAMES)
MODELS = tuple(models.TASKS)
GPU_WORKLOADS = {"w3-1000": (*WORKLOADS["w3"], "cohort=1000" if ON_GPU else "cohort=150")}
PROGRAMS_OF = {  # baselines of each workload, the most informative first
    **dict.fromkeys(NAMES, ("captured loop", "captured vmap", "jax", "bare loop", "vmap")),
    "w3-1000": ("captured loop", "captured vmap", "jax", "vmap"),
    **dict.fromkeys((*OTHERS, "resnet20", "gpt"), ("captured loop", "captured vmap", "bare loop")),
    "char_lstm": ("captured loop", "bare loop"),  # torch.func.vmap has no rule for the LSTM of cuDNN
}
ROUNDS = {"w1": 4, "w2": 4, "w3": 12}
ROUNDING = 1e-6  # maximum difference of models after a round in float64, relative to the move of the round
FEWEST_ROUNDS = 3  # also of ways that train one worker after another
ROWS = (10, 100) if ON_GPU else (4,)  # rows per stack in the convolution measurements
UPDATES = [(n, d) for d in (21_840, 1_663_370) for n in (20, 100)] if ON_GPU else [(20, 1000)]  # for rules
RULES = ("mean", "median", "trimmed_mean", "krum", "geometric_median")  # measured without byzfl
NODES = 120  # kernels in a measured CUDA graph

torch.set_num_threads(1)


def microseconds(work: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the microseconds of one call on the device, averaged over as many calls as fill `seconds` (at least 3)."""
    timed(work, 3, DEVICE)  # warm-up
    count = max(3, min(2000, int(seconds / max(timed(work, 1, DEVICE), 1e-7))))
    return round(1e6 * timed(work, count, DEVICE) / count, 2)


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

    return {"us": round(microseconds(captured(add, DEVICE)) / NODES, 3)}


def convolution(shape: Shape, rows: int) -> Figures:
    """Return the microseconds of a stack's forward and backward pass for each implementation, captured in a graph."""
    tensors = layer(shape, rows, torch.float, DEVICE)
    with full_precision(DEVICE):
        us = {name: microseconds(captured(partial(step, way, shape, tensors), DEVICE)) for name, way in WAYS.items()}
    return {"us": us, "used": way_for(tensors[1], turns=True)}


def experiment_of(workload: str, *words: str, rounds: int = FEWEST_ROUNDS, few: bool = not ON_GPU) -> fedsim.Experiment:
    """Return the experiment of a workload. `few`: whether each worker trains on two whole batches and a short one."""
    data: dict[str, Any] = {}
    if workload in MODELS:
        tables, _ = models.TASKS[workload]
        norm = {"model": {"name": "resnet20", "norm": "group"}} if workload == "resnet20" else {}
        experiment = models.experiment_of(workload, **norm)
        data = {"train": 8 * tables["data"]["train"]}
    else:
        file, *changes = {**WORKLOADS, **GPU_WORKLOADS}[workload]
        experiment = fedsim.load_experiment(ROOT / file, changes)
    experiment = fedsim.load_experiment(experiment, words)
    train = experiment.workers * (2 * experiment.local.batch_size + 3) if few else None
    if experiment.data.name == "mnist":
        data = workload_data(train)
    elif few:
        data = {"train": train} if workload in MODELS else {"train": train, "test": 200}
    return fedsim.load_experiment(experiment, [f"rounds={rounds}", f"device={DEVICE.type}"], data=data)


@functools.cache
def run_of(workload: str, engine: str) -> tuple[fedsim.Result, Figures]:
    """Run a workload with fedsim once in this process. Returns the result and the figures."""
    rounds = FEWEST_ROUNDS if engine == "serial" or not ON_GPU else ROUNDS.get(workload, FEWEST_ROUNDS)
    settings: list[Any] = []
    starts: list[float] = []

    def on_start(metadata: Any) -> None:
        settings.append(metadata)
        starts.append(time.perf_counter())

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = fedsim.run(experiment_of(workload, *ENGINES[engine], rounds=rounds), on_start=on_start)
    run_seconds = round(time.perf_counter() - started, 2)
    seconds = [record["seconds"] for record in result.history]
    return result, {
        "round_ms": milliseconds([sum(phases.values()) for phases in seconds[1:]]),
        "first_round_ms": milliseconds([sum(seconds[0].values())]),
        "phases_ms": {phase: milliseconds([phases[phase] for phases in seconds[1:]]) for phase in seconds[0]},
        "start_seconds": round(starts[0] - started, 2),
        **{"run_seconds": run_seconds, "accuracy": result.test_accuracy},
        "how": {key: settings[0].how[key] for key in (*HOW, "cuda_graphs") if key in settings[0].how},
        **({"peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)} if ON_GPU else {}),  # of this process
    }


def rounds_of(workload: str, engine: str) -> Figures:
    return run_of(workload, engine)[1]


def baseline_run(workload: str, program: str, experiment: fedsim.Experiment) -> Result:
    if program == "bare loop":
        return bare_loop(experiment, DEVICE)
    if program == "jax":
        require_jax()
    return run_baseline(program, experiment, DEVICE)


def require_jax() -> None:
    """Skip the test if there is no JAX for the device."""
    pytest.importorskip("jax")
    try:
        backend = jax_of("float32").default_backend()
    except RuntimeError as error:
        pytest.skip(f"JAX does not start: {error}")
    if backend != ("gpu" if ON_GPU else "cpu"):
        pytest.skip(f"JAX computes on {backend}")


def baseline_rounds(workload: str, program: str) -> Figures:
    """Return the figures of a baseline, with an error if it did other work than fedsim, or if fedsim failed."""
    rounds = FEWEST_ROUNDS if program == "bare loop" or not ON_GPU else ROUNDS.get(workload, FEWEST_ROUNDS)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    experiment = experiment_of(workload, rounds=rounds)
    run = baseline_run(workload, program, experiment)
    figures: Figures = {
        **{"round_ms": milliseconds(run.rounds[1:]), "first_round_ms": milliseconds(run.rounds[:1])},
        **{"accuracy": run.accuracies[-1], "samples_in_a_round": run.samples // len(run.rounds)},
        **({"peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)} if ON_GPU else {}),  # of PyTorch
    }
    try:
        return {**figures, **different_work(workload, run)}
    except FedsimError as error:
        return {**figures, "error": f"fedsim: {error}"}


def different_work(workload: str, run: Result) -> Figures:
    """Return an error if a baseline's samples or accuracy differ from those of fedsim in the same rounds."""
    result, _ = run_of(workload, "batched")
    records = result.history[: len(run.rounds)]
    samples = sum(sum(record.samples) for record in records)
    if samples != run.samples:
        return {"error": f"fedsim trained on {samples} samples, the baseline on {run.samples}"}
    ours, theirs = records[-1].test_accuracy, run.accuracies[len(records) - 1]
    data = result.experiment.data
    _, test = fedsim.load_dataset(data.name, data.root, **data.params)
    if abs(ours - theirs) > 2 / len(test) ** 0.5:  # four times the largest standard error
        return {"error": f"round {len(records)}: test accuracies differ: fedsim {ours}, baseline {theirs}"}
    return {}


def few_samples(workload: str) -> fedsim.Experiment:
    """Return a float64 round with few samples and without dropout."""
    return without_dropout(experiment_of(workload, *STACKED, "precision=float64", rounds=1, few=True))


@functools.cache
def state_after_few_samples(workload: str) -> dict[str, torch.Tensor]:
    return {key: value.cpu() for key, value in fedsim.run(few_samples(workload)).model.state_dict().items()}


def same_work(workload: str, program: str) -> Figures:
    """Return the difference of fedsim and a baseline after a float64 round, relative to the move of the round."""
    few = few_samples(workload)
    run = baseline_run(workload, program, few)
    off = difference(work_of(few), state_after_few_samples(workload), run.first)
    return {"difference": off, **({} if off < ROUNDING else {"error": "different models"})}


def which_rule() -> Figures:
    """Return the seconds of the command `fedsim compare which_rule`."""
    few = [] if ON_GPU else ["rounds=1", "seed=0"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedsim", "compare", "which_rule", *few, f"device={DEVICE.type}"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--out", folder],
            env=os.environ | {"PYTHONPATH": path},
            **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
        )
    assert done.returncode == 0, done.stderr[-500:]
    return {"seconds": round(time.perf_counter() - started, 1)}


def rules_on(n: int, d: int) -> Figures:
    """Return the fastest time of each rule in fedsim and, if installed, in byzfl, and the largest ratio of the two."""
    updates, f = torch.randn(n, d, device=DEVICE), n // 5
    try:
        others = rules.theirs(f)
    except ImportError:
        others = {}
    ms = {name: shortest(rules.ours(name, updates, f)) for name in others or RULES}
    byzfl_ms = {name: shortest(partial(rule, updates)) for name, rule in others.items()}
    over_byzfl = {name: round(ms[name] / byzfl_ms[name], 2) for name in byzfl_ms}
    return {"ms": ms, **({"byzfl_ms": byzfl_ms, "most_over_byzfl": max(over_byzfl.values())} if others else {})}


def shortest(work: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the milliseconds of the shortest call, of as many calls as fill `seconds` (at least 3)."""
    timed(work, 1, DEVICE)  # warm-up
    times = [timed(work, 1, DEVICE) for _ in range(3)]
    while sum(times) < seconds:
        times.append(timed(work, 1, DEVICE))
    return round(1e3 * min(times), 4)


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
    programs = [(name, program) for program in PROGRAMS_OF["w3"] for name, own in PROGRAMS_OF.items() if program in own]
    checked = [  # without what takes long: many workers, and compilations of JAX
        (name, program)
        for name, program in programs
        if name != "w3-1000" and (program not in ("vmap", "jax") or (name, program) == ("w3", "jax"))
    ]
    profiles = {"batched, profile": profile_of_batched, "bare loop, profile": profile_of_the_bare_loop}
    engines = [engine for engine in ENGINES if engine != "batched"]
    return {
        **{"launch": launch, "wait": wait, "copy of 8 kB to the device": copy_to_the_device},
        "node of a graph": node_of_a_graph,
        **{f"{name}, batched": partial(rounds_of, name, "batched") for name in (*NAMES, "w3-1000", *OTHERS, *MODELS)},
        "w3, processes": partial(rounds_of, "w3", "processes"),
        "which_rule": which_rule,
        **{f"rules, {n} x {d}": partial(rules_on, n, d) for n, d in UPDATES},
        **{f"{name}, {program}": partial(baseline_rounds, name, program) for name, program in programs},
        **{f"{name}, {program}, same work": partial(same_work, name, program) for name, program in checked},
        **{f"{name}, limit": partial(limit, name) for name in NAMES},
        **{f"{name}, {way}": partial(work, name) for way, work in profiles.items() for name in NAMES},
        **{f"{name}, {k} rows": partial(convolution, shape, k) for name, shape in SHAPES.items() for k in ROWS},
        **{f"{name}, {engine}": partial(rounds_of, name, engine) for engine in engines for name in NAMES},
    }


MEASUREMENTS = measurements()
NAMES_OF_GOALS = {goal.measurement for goal in GOALS}
OTHER_NAMES = [name for name in MEASUREMENTS if name not in NAMES_OF_GOALS]


def measure(name: str, record_property: Callable[[str, object], None]) -> None:
    release_memory(DEVICE)  # of the measurement before
    figures = MEASUREMENTS[name]()
    record_property("figures", figures)
    assert "error" not in figures, figures["error"]


@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if name in NAMES_OF_GOALS])
def test_goal(name: str, record_property: Callable[[str, object], None]) -> None:
    measure(name, record_property)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_measurement(name: str, record_property: Callable[[str, object], None]) -> None:
    measure(name, record_property)
