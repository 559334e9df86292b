"""Which engine is fastest for an experiment on this machine, measured: `fedsim tune`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tomli_w

from fedsim.config.experiment import Experiment
from fedsim.config.overrides import SETTINGS
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, FedsimError
from fedsim.runs.run import run
from fedsim.runs.setup import PreparedRun, schedule_of
from fedsim.system.devices import default_processes, shares_memory

STEPS = 10  # of each worker in a measured round, at most
PASSES = 2  # the faster one counts
EXACT_SHARE = 0.9  # stacks must take less than this share of the time of single rows, whose rounding is portable


@dataclass(frozen=True)
class Candidate:
    """One way to compute an experiment.

    Attributes:
        keys: the keys of the experiment that it sets.
        round_seconds: time of a whole round, estimated from a shortened one.
        start_seconds: time before the first round.
        refusal: why the experiment cannot run in this way; None if it can.
    """

    keys: dict[str, Any]
    round_seconds: float = 0.0
    start_seconds: float = 0.0
    refusal: str | None = None

    @property
    def label(self) -> str:
        """`engine=spawn processes=2`"""
        return " ".join(f"{key}={value}" for key, value in self.keys.items())

    def seconds(self, rounds: int) -> float:
        """The time of a run of so many rounds."""
        return self.start_seconds + rounds * self.round_seconds


def tune(experiment: Experiment, on_candidate: Callable[[Candidate], object] = lambda candidate: None) -> Candidate:
    """Measure each way to compute an experiment, and return the fastest one.

    Args:
        experiment: what to measure, with rounds of a few steps per worker.
        on_candidate: called with each candidate after its measurement.

    Raises:
        ExperimentError: the mode or engine leaves no choice, or no candidate works.
    """
    if experiment.mode == "race" or engines.get(experiment.engine).target.traits.ranks:
        what = 'mode = "race"' if experiment.mode == "race" else f'engine = "{experiment.engine}"'
        raise ExperimentError(f"{what}: fedsim tune compares the engines serial, spawn and batched, not this")
    measured = []
    for keys in _ways(experiment):
        measured.append(_measure(experiment, keys))
        on_candidate(measured[-1])
    working = [candidate for candidate in measured if candidate.refusal is None]
    if not working:
        raise ExperimentError(*(f"{candidate.label}: {candidate.refusal}" for candidate in measured))

    def cost(candidate: Candidate) -> float:
        share = EXACT_SHARE if candidate.keys["engine"] == "batched" else 1.0
        return candidate.seconds(experiment.rounds) / share

    return min(working, key=cost)


def lines_for_file(candidate: Candidate) -> str:
    """The keys as lines of an experiment file."""
    return tomli_w.dumps(candidate.keys).strip()


def _ways(experiment: Experiment) -> Iterable[dict[str, Any]]:
    device = engines.get("serial").target.device_for(experiment.device)
    most = experiment.processes or default_processes(device, experiment.cohort_size, experiment.threads_per_process)
    yield {"engine": "serial"}
    yield {"engine": "batched", "processes": 1}
    if most > 1 and shares_memory(device):
        yield {"engine": "spawn", "processes": most}
        yield {"engine": "batched", "processes": most}


def _measure(experiment: Experiment, keys: dict[str, Any]) -> Candidate:
    """Run the shortened experiment in one way, and scale its training to whole rounds."""
    rounds, starts = [], []
    try:
        shortened = _shortened(experiment, keys)
        for _ in range(PASSES):
            settings: list[PreparedRun] = []
            began = time.perf_counter()
            result = run(shortened, on_start=settings.append, progress=False)
            taken = time.perf_counter() - began
            seconds = [sum(record["seconds"].values()) for record in result.history]
            starts.append(taken - sum(seconds))
            longer = _steps(experiment, settings[0]) / _steps(shortened, settings[0])
            last = result.history[-1]["seconds"]  # the first round may have to warm up
            rounds.append(seconds[-1] + (longer - 1) * last["train"])
    except FedsimError as error:
        return Candidate(keys, refusal=str(error).splitlines()[0])
    return Candidate(keys, min(rounds), min(starts))


def _shortened(experiment: Experiment, keys: dict[str, Any]) -> Experiment:
    """Two rounds of few steps, of the same work otherwise."""
    tables = experiment.model_dump(exclude_none=True)  # with objects
    used = engines.get(keys["engine"]).target.traits.settings(keys.get("processes", 1))
    for key in (SETTINGS - used) | {"records", "checkpoint", "stop", "evaluation"}:  # nothing is written or tested
        tables.pop(key, None)
    tables["data"].pop("worker_test", None)
    tables["server"].pop("schedule", None)
    if experiment.sync == "post_local":
        tables["sync"] = "gradients" if 2 * experiment.rounds_of_gradients > experiment.rounds else "parameters"
        tables.pop("gradient_rounds", None)
    local, steps = tables["local"], experiment.local.steps
    local.pop("schedule", None)
    with contextlib.suppress(ExperimentError):  # some client algorithms divide the epochs of a round
        shorter = min(STEPS, steps) if isinstance(steps, int) else STEPS
        experiment.client_algorithm.check_work(None, shorter)
        local.pop("epochs", None)
        local["steps"] = shorter
    return Experiment(**{**tables, **keys, "rounds": 2})


def _steps(experiment: Experiment, prepared: PreparedRun) -> float:
    """Of a worker in a round, on average."""
    schedule, sizes = schedule_of(experiment), prepared.shard_sizes
    return sum(schedule.of(worker, 1).steps_for(size) for worker, size in enumerate(sizes)) / len(sizes)
