"""Run programs on the same work in turn, check that they do it, and relate their times and memory."""

from __future__ import annotations

import math
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import ROOT, CommandRun, median, run_command
from watching import watch

from benchmarks.peers.export import without_fedsim, work_of
from benchmarks.peers.rivals import RIVALS, command_of
from benchmarks.peers.work import CORES, Result, State, Work
from fedsim import load_experiment

SHARE = 0.02  # of one core's time for samples of the memory
STEPS = 7  # of each client in the comparison of models
ROUNDING = 1e-5  # of the models' difference in float64, relative to the move of the round; pfl averages in float32
ACCURACY = 0.03  # maximum difference of the final accuracies
TIES = 5  # test samples whose prediction may depend on the order of a sum
PINS = {
    "engine": "engine",
    "processes": "processes",
    "threads_per_process": "threads",
    "batched.stack_size": "width",
}  # keys that repeat a run of fedsim in the same way
HOW = ("engine", "processes", "threads", "width", "reason")  # entries of the run record about how it was computed
BASES = ("fedsim", "bare")  # programs to which the others are related

Figures = dict[str, Any]


class DifferentWorkError(Exception):
    """A program that did other work than it was given."""


class Run(NamedTuple):
    """A whole run of a program in its own processes."""

    seconds: float
    peak_bytes: int
    rounds: Sequence[float]
    accuracies: Sequence[float]
    last: State  # the final model
    samples: int
    steps: int | None  # fedsim does not record its steps

    @property
    def figures(self) -> dict[str, float]:
        """The median round except the first, which may warm up; the whole run; and what it takes beyond such rounds."""
        later = statistics.median(self.rounds[1:])
        start = self.seconds - later * len(self.rounds)
        return {
            **{"round_seconds": later, "run_seconds": self.seconds, "start_seconds": start},
            "peak_mb": self.peak_bytes / 1e6,
        }


def run_of_fedsim(words: Sequence[str]) -> tuple[Run, CommandRun]:
    run = run_command(*words, share=SHARE)
    accuracies = [record["test_accuracy"] for record in run.history]
    samples = sum(sum(record["samples"]) for record in run.history)
    return Run(run.seconds, run.peak_bytes, run.rounds, accuracies, run.state, samples, None), run


def run_of_rival(name: str, work: Path) -> tuple[Run, Result]:
    path = work.with_name(f"{name}.pt")
    with path.with_suffix(".log").open("w+") as log:
        try:
            watched = watch([*command_of(name), str(work), str(path)], SHARE, stdout=log, stderr=log, cwd=ROOT)
        except subprocess.CalledProcessError as error:
            log.seek(0)
            raise DifferentWorkError(f"{name} failed: {' '.join(log.read().splitlines()[-3:])}") from error
    result: Result = torch.load(path, weights_only=False)
    path.unlink()
    return Run(*watched, result.rounds, result.accuracies, result.last, result.samples, result.steps), result


def check_counts(name: str, run: Run, work: Work) -> None:
    """Raise DifferentWorkError unless a run trained all samples in the given steps, and tested on all test samples."""
    batches = [
        len(work.batches(round, slot)) for round, cohort in enumerate(work.cohorts) for slot in range(len(cohort))
    ]
    samples = sum(len(order) for cohort in work.orders for epochs in cohort for order in epochs)
    done = len(run.rounds), run.samples, sum(batches) if run.steps is None else run.steps
    if done != (expected := (len(work.cohorts), samples, sum(batches))):
        raise DifferentWorkError(f"{name}: {done} rounds, samples and steps instead of {expected}")
    model = work.model()
    model.load_state_dict(run.last)
    accuracy, reported = work.accuracy(model), run.accuracies[-1]
    if len(run.accuracies) != len(run.rounds) or abs(accuracy - reported) > TIES / work.test_targets.numel():
        raise DifferentWorkError(f"{name}: reported an accuracy of {reported}, but its model has {accuracy}")


def check_accuracy(name: str, run: Run, fedsim: Run) -> None:
    accuracies = fedsim.accuracies[-1], run.accuracies[-1]
    if abs(accuracies[0] - accuracies[1]) > ACCURACY:
        raise DifferentWorkError(f"{name}: final accuracies of fedsim and of {name} differ: {accuracies}")


def few_samples(work: Work) -> Work:
    """Return the same training without the samples that it does not use, and with few test samples."""
    used = np.unique(np.concatenate([order for cohort in work.orders for epochs in cohort for order in epochs]))
    numbers = torch.from_numpy(used)
    return work._replace(
        inputs=work.inputs[numbers],
        targets=work.targets[numbers],
        test_inputs=work.test_inputs[:200].clone(),
        test_targets=work.test_targets[:200].clone(),
        shards=[np.searchsorted(used, np.intersect1d(shard, used)) for shard in work.shards],
        orders=[[[np.searchsorted(used, order) for order in epochs] for epochs in cohort] for cohort in work.orders],
    )


def same_model_words(words: Sequence[str], environment: dict[str, Any]) -> list[str]:
    """Return a round of few float64 steps without dropout, which fedsim trains as it did in the timed run."""
    words = [word for word in words if not word.startswith(("rounds=", "local.epochs="))]
    words += ["rounds=1", "precision=float64", f"local.steps={STEPS}"]
    if "dropout" in load_experiment(words[0], words[1:]).model.params:
        words.append("model.dropout=0.0")
    return [*words, *(f"{key}={environment[name]}" for key, name in PINS.items() if name in environment)]


def difference(work: Work, ours: State, theirs: State) -> float:
    """Return the Euclidean distance between two models, relative to how far the round moved the first."""
    return norm_of_difference(ours, theirs) / norm_of_difference(ours, work.state)


def norm_of_difference(a: State, b: State) -> float:
    return math.sqrt(sum(float((a[name] - b[name]).double().square().sum()) for name in b))


def check_model(name: str, path: Path, work: Work, ours: State) -> float:
    """Return the difference between fedsim's model and a rival's after the same few steps."""
    off = difference(work, ours, run_of_rival(name, path)[1].first)
    if not off < ROUNDING:
        raise DifferentWorkError(f"{name}: its model differs from fedsim's by {off} of the round's move")
    return off


def measure(words: Sequence[str], rivals: Sequence[str], repeats: int) -> dict[str, Figures]:
    """Return the figures of fedsim and of each rival by name, or {"error": reason} for a rival that fails.

    Raises DifferentWorkError or CalledProcessError if fedsim fails.
    """
    experiment = load_experiment(words[0], words[1:])
    work = work_of(experiment, make=without_fedsim(experiment))
    runs: dict[str, list[Run]] = {name: [] for name in ("fedsim", *rivals)}
    errors: dict[str, str] = {}
    more: dict[str, Figures] = {}  # other figures of the programs
    with tempfile.TemporaryDirectory() as folder:
        torch.save(work, path := Path(folder, "work.pt"))
        for _ in range(repeats):
            ours, command = run_of_fedsim(words)
            check_counts("fedsim", ours, work)
            runs["fedsim"].append(ours)
            for name in [name for name in rivals if name not in errors]:
                try:
                    run, _ = run_of_rival(name, path)
                    check_counts(name, run, work)
                    check_accuracy(name, run, ours)
                    runs[name].append(run)
                except DifferentWorkError as error:
                    errors[name] = str(error)
        more["fedsim"] = {key: command.environment[key] for key in HOW if key in command.environment}
        few = same_model_words(words, command.environment)
        experiment = load_experiment(few[0], few[1:])
        torch.save(work := few_samples(work_of(experiment, make=without_fedsim(experiment))), path)
        state = run_command(*few).state
        names = [name for name in rivals if name not in errors and RIVALS[name].same_batches]
        with ThreadPoolExecutor(CORES) as pool:
            checks = {name: pool.submit(check_model, name, path, work, state) for name in names}
        for name, check in checks.items():
            try:
                more[name] = {"difference_over_move": check.result()}
            except DifferentWorkError as error:
                errors[name] = str(error)
    correct = {name: runs[name] for name in runs if name not in errors}
    figures = {name: {**figures_of(name, correct), **more.get(name, {})} for name in correct}
    return {**figures, **{name: {"error": error} for name, error in errors.items()}}


def figures_of(name: str, runs: dict[str, list[Run]]) -> Figures:
    """Return medians over the repetitions, and ratios to fedsim and to the bare loop of the same repetition."""
    figures: Figures = {"accuracy": runs[name][0].accuracies[-1]}
    for key in runs[name][0].figures:
        values = {other: [run.figures[key] for run in runs[other]] for other in (name, *BASES) if other in runs}
        figures[key] = median(values[name])
        if key != "start_seconds":
            for base in values.keys() & BASES:
                ratios = [a / b for a, b in zip(values[name], values[base], strict=True)]
                figures[f"{key.rpartition('_')[0]}_over_{base}"] = median(ratios)
    return figures
