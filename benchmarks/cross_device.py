"""Compare four experiments with a bare loop that takes the same steps. Both are timed in the same run.

w1: the classic experiment, 4 workers with 15,000 MNIST images each, `net`, batch size 64.
w2: 100 clients with 600 images each, 10 per round, `cnn`, batch size 10.
w3: 1,000 clients with 60 images each, 100 per round, `2nn`, batch size 10.
w4: the benchmark of pfl (image_classification.py): 1,000 clients with 50 images of 3 x 32 x 32 each, 50 per round, a
    user's own network with two convolutions and dropout, batch size 10.

fedsim runs as a command in its own process, and its round times are those in its records. The floor is a bare loop in
plain PyTorch with one thread (bare_loop.py), also in its own process. The benchmark compares

- a round: on a CPU with the floor's time divided by the number of cores; on a GPU with the same loop on the GPU and
  with fedsim's engine `serial`, which trains one client after another;
- the whole run from start to end. Here the floor's time is not divided, and it excludes the import of fedsim;
- if the package pfl is installed, a round with a round of pfl (pfl_loop.py), which uses all cores for each operation.

A check in float64 shows that both do the same work: after one round their global rows are equal up to rounding.
limits.py computes the shortest possible time of a round on this machine from counts of operations and bytes.

    FEDSIM_DATA=... python benchmarks/cross_device.py [--workloads w1,w2,w3,w4] [--repeats 3] [--engine auto]
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from bare_loop import BareRun, State
from common import ROOT, CommandRun, median, report, run_command
from limits import Machine, round_cost
from workloads import WORKLOADS

from fedsim import Experiment, load_dataset, load_experiment
from fedsim.system.devices import resolve_device, usable_cores

ROUNDING = 1e-6  # maximum difference of global rows after a round in float64, relative to the move of the round
ACCURACY = 0.03  # maximum difference of the timed runs' final accuracies
HOW = ("engine", "processes", "threads", "width", "reason")  # entries of the run record about how it was computed
PINS = {
    "engine": "engine",
    "processes": "processes",
    "threads_per_process": "threads",
    "batched.stack_size": "width",
}  # keys that repeat a run in the same way


class BareProcess(NamedTuple):
    seconds: float  # from start to end, without the import of fedsim
    run: BareRun


class Pair(NamedTuple):
    """The runs of one repetition, which followed one another."""

    fedsim: CommandRun
    serial: CommandRun | None
    bare: BareProcess
    pfl: BareProcess | None


def bare_process(words: Sequence[str], device: torch.device, loop: Literal["bare", "pfl"] = "bare") -> BareProcess:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.pt"
        script = str(Path(__file__).with_name("bare_process.py"))
        started = time.perf_counter()
        subprocess.run([sys.executable, script, loop, str(path), str(device), *words], check=True, cwd=ROOT)
        seconds = time.perf_counter() - started
        result = torch.load(path)
    return BareProcess(seconds - result.pop("imports"), BareRun(**result))


def check_same_work(words: Sequence[str], pair: Pair, device: torch.device) -> float:
    """Return the difference of the global rows of fedsim and the bare loop after one more round in float64.

    It is a Euclidean norm relative to the move of the round. Raises AssertionError if rounding cannot explain it. (In
    float32, two summation orders differ by one percent of the move after the 235 steps of w1.) fedsim runs in the way
    that was timed, without dropout, because the bare loop draws dropout differently.
    """
    words, how = [*words, "rounds=1", "precision=float64"], pair.fedsim.environment
    if "dropout" in load_experiment(words[0], words[1:]).model.params:
        words.append("model.dropout=0.0")
    pins = [f"{key}={how[name]}" for key, name in PINS.items() if name in how]
    state, bare = run_command(*words, f"device={device}", *pins).state, bare_process(words, device).run
    off = norm_of_difference(state, bare.first) / norm_of_difference(bare.start, bare.first)
    assert off < ROUNDING, f"{words[0]}: fedsim and the bare loop differ by {off} of the first round's move"
    accuracies = pair.fedsim.accuracy, pair.bare.run.accuracy
    assert abs(accuracies[0] - accuracies[1]) < ACCURACY, f"{words[0]}: final accuracies differ: {accuracies}"
    return off


def norm_of_difference(a: State, b: State) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).double().square().sum()) for name in b))


def later_round(rounds: Sequence[float]) -> float:
    """Return the median over all rounds except the first, which may warm up."""
    return statistics.median(rounds[1:])


def phases(runs: Sequence[CommandRun]) -> dict[str, float]:
    """Return the median seconds of each phase, over all rounds except the first."""
    later = [record["seconds"] for run in runs for record in run.history[1:]]
    return {phase: median([seconds[phase] for seconds in later]) for phase in later[0]}


def measure(name: str, options: argparse.Namespace, device: torch.device, machine: Machine) -> dict[str, Any]:
    """Return all figures of a workload."""
    words = [*WORKLOADS[name], *([f"rounds={options.rounds}"] if options.rounds else [])]
    command = [*words, f"device={device}"]
    pairs = []
    for _ in range(options.repeats):
        ours = run_command(*command, f"engine={options.engine}")
        serial = run_command(*command, "engine=serial") if options.serial else None
        pfl = bare_process(words, device, "pfl") if options.pfl else None
        pairs.append(Pair(ours, serial, bare_process(words, device), pfl))
    share = usable_cores() if device.type == "cpu" else 1
    our_round = [later_round(pair.fedsim.rounds) for pair in pairs]
    bare_round = [later_round(pair.bare.run.rounds) for pair in pairs]
    whole = [(sum(pair.fedsim.rounds), sum(pair.bare.run.rounds) / share) for pair in pairs]
    environment = pairs[0].fedsim.environment
    return {
        "round_seconds": median(our_round),
        "floor_round_seconds": median([seconds / share for seconds in bare_round]),
        "round_over_floor": median([a / b * share for a, b in zip(our_round, bare_round, strict=True)]),
        "all_rounds_over_floor": median([a / b for a, b in whole]),
        "run_seconds": median([pair.fedsim.seconds for pair in pairs]),
        "bare_run_seconds": median([pair.bare.seconds for pair in pairs]),
        "run_over_bare_run": median([pair.fedsim.seconds / pair.bare.seconds for pair in pairs]),
        "outside_rounds_seconds": median([pair.fedsim.seconds - sum(pair.fedsim.rounds) for pair in pairs]),
        **against_serial([(pair.fedsim, pair.serial) for pair in pairs if pair.serial]),
        **against_pfl([(pair.fedsim, pair.pfl) for pair in pairs if pair.pfl]),
        "phases": phases([pair.fedsim for pair in pairs]),
        "how": [{key: pair.fedsim.environment[key] for key in HOW if key in pair.fedsim.environment} for pair in pairs],
        "accuracy": {"fedsim": pairs[0].fedsim.accuracy, "floor": pairs[0].bare.run.accuracy},
        "difference_over_move": check_same_work(words, pairs[0], device),
        "limit": limit(load_experiment(words[0], words[1:]), environment, machine, statistics.median(our_round)),
    }


def against_serial(pairs: Sequence[tuple[CommandRun, CommandRun]]) -> dict[str, Any]:
    """Return the comparison with fedsim's engine `serial`, which trains one client after another."""
    if not pairs:
        return {}
    rounds = [(later_round(ours.rounds), later_round(serial.rounds)) for ours, serial in pairs]
    return {
        "serial_round_seconds": median([serial for _, serial in rounds]),
        "round_times_faster_than_serial": median([serial / ours for ours, serial in rounds]),
        "run_times_faster_than_serial": median([serial.seconds / ours.seconds for ours, serial in pairs]),
        "serial_phases": phases([serial for _, serial in pairs]),
    }


def against_pfl(pairs: Sequence[tuple[CommandRun, BareProcess]]) -> dict[str, float]:
    """Return the comparison with pfl, whose process uses all cores for each operation."""
    if not pairs:
        return {}
    rounds = [(later_round(ours.rounds), later_round(pfl.run.rounds)) for ours, pfl in pairs]
    return {
        "pfl_round_seconds": median([pfl for _, pfl in rounds]),
        "round_times_faster_than_pfl": median([pfl / ours for ours, pfl in rounds]),
    }


def limit(
    experiment: Experiment, environment: dict[str, Any], machine: Machine, round_seconds: float
) -> dict[str, float]:
    """Return the counted cost of a round, compared with the measured rates of the machine."""
    train, _ = load_dataset(experiment.data.name, experiment.data.root, **experiment.data.params)
    sizes = environment["train_samples"], environment["test_samples"]
    return machine.compare(round_cost(experiment, tuple(train.inputs.shape[1:]), *sizes), round_seconds)


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated names; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", help="default: auto on a CPU, batched on a GPU")
    parser.add_argument(
        "--serial", action=argparse.BooleanOptionalAction, help="time the engine serial too (default: only on a GPU)"
    )
    parser.add_argument("--rounds", type=int, help="number of rounds for a trial, whose figures are not stored")
    options = parser.parse_args(words)
    options.pfl = importlib.util.find_spec("pfl") is not None
    options.workloads = options.workloads.split(",")
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"--workloads: {', '.join(sorted(unknown))}: must be of {', '.join(WORKLOADS)}")
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds: {options.rounds}: must be at least 2, since the first is left out")
    return options


def main() -> None:
    options = options_of()
    device = resolve_device(options.device)
    on_card = device.type != "cpu"
    options.engine = options.engine or ("batched" if on_card else "auto")
    options.serial = on_card if options.serial is None else options.serial
    machine = Machine.measured(device)
    figures = {name: measure(name, options, device, machine) for name in options.workloads}
    report(
        "cross_device",
        device=device,
        keep=options.rounds is None,
        **figures,
        limits=machine.figures(),
        engine=options.engine,
        repeats=options.repeats,
    )


if __name__ == "__main__":
    main()
