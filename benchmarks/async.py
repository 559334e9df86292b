"""Asynchronous training against baselines in the same run.

Race: Hogwild with one process for each core, against (i) the floor, a bare loop over the same shards in one process
with one thread, its time divided by the number of cores, and (ii) PyTorch's own Hogwild example written the usual way:
spawn processes, `share_memory`, a DataLoader over a preloaded data set and `torch.optim.SGD` in each.

Clock: fedbuff whose buffer holds everybody's work, with constant delays, against the synchronous loop of the engine
`serial`, which then does the very same steps; asgd against sync = "gradients", with as many steps. Events per second
of a clock on which nothing is computed.

    FEDSIM_DATA=... python benchmarks/async.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import median, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedsim
from fedsim import Experiment
from fedsim.asynchronous.delays import Delays, bind_noise, draw_speeds, noise, speed
from fedsim.asynchronous.dispatch import Scheduler
from fedsim.asynchronous.policies import Arrival, Policy
from fedsim.asynchronous.server_state import ServerState
from fedsim.asynchronous.virtual_clock import VirtualClock
from fedsim.core.randomness import batch_order
from fedsim.data import load_dataset, partition
from fedsim.data.sources import default_root
from fedsim.engines.task import Schedule
from fedsim.engines.trainers.batches import WorkItem
from fedsim.models import Net
from fedsim.runs.setup import prepare
from fedsim.system.devices import usable_cores

BATCH, LR, MOMENTUM = 64, 0.01, 0.5
EVENTS = 200_000


def shards_of_mnist(cores: int) -> list[tuple[Tensor, Tensor]]:
    """Everybody's images, preloaded and normalised, and labels."""
    train, _ = load_dataset("mnist")
    inputs, targets = train.gather(torch.arange(len(train)))
    shards = partition(train.targets.numpy(), cores, "contiguous")
    return [(inputs[torch.from_numpy(shard)], targets[torch.from_numpy(shard)]) for shard in shards]


def bare_loop_seconds(shards: Sequence[tuple[Tensor, Tensor]]) -> float:
    """One process with one thread goes through all shards once; without the time of preparing them."""
    torch.set_num_threads(1)
    model = Net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    started = time.perf_counter()
    for worker, (inputs, targets) in enumerate(shards):
        order = batch_order(0, 1, worker, 0, len(inputs))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            F.nll_loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    return time.perf_counter() - started


def usual_hogwild_seconds(shards: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The usual way; each process times its own pass, after a pass of a few batches, and the slowest counts."""
    context = mp.get_context("spawn")
    model = Net()
    model.share_memory()
    start, results = context.Barrier(len(shards)), context.Queue()
    processes = [context.Process(target=_usual_worker, args=(model, shard, start, results)) for shard in shards]
    for process in processes:
        process.start()
    seconds = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return max(seconds)


def _usual_worker(model: nn.Module, shard: tuple[Tensor, Tensor], start: Any, results: Any) -> None:
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(*shard), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model.train()
    start.wait()
    started = time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.nll_loss(model(inputs), targets).backward()
        optimizer.step()
    results.put(time.perf_counter() - started)


def train_seconds(**tables: Any) -> tuple[float, fedsim.Result]:
    """Seconds of a run's rounds without their tests."""
    result = fedsim.run({"engine": "serial", **tables})
    return sum(sum(record["seconds"].values()) - record["seconds"]["test"] for record in result.history), result


@dataclass(frozen=True)
class Nothing(Policy):
    """Counts arrivals as versions."""

    def take(self, server: ServerState, arrival: Arrival) -> None:
        server.increment_version()


def events_per_second(workers: int = 100) -> float:
    """Of a clock whose work is nothing, with exponential delays."""
    experiment = Experiment(workers=workers, mode="clock", policy="asgd", model="logistic")
    with fedsim.Session() as session, prepare(experiment, session) as (task, engine):
        server = ServerState.of(Nothing(), experiment.local.component, task, engine.shared)
    schedule = Schedule(1)
    scheduler = Scheduler(0, workers, workers, "gradient", schedule, lambda worker: 100)
    speeds = draw_speeds(speed.get("equal"), {}, workers, 0)
    delays = Delays(speeds, bind_noise(noise.get("shifted_exponential"), {"shift": 0.0}))

    def duration(item: WorkItem, unit: int, models: tuple[int, int]) -> float:
        return delays.seconds(item.worker, unit, 1, sum(models))

    clock = VirtualClock(server, scheduler, duration, lambda items: None)
    started, taken = time.perf_counter(), 0
    while taken < EVENTS:
        taken += clock.advance()
    return taken / (time.perf_counter() - started)


def race_seconds(cores: int) -> float:
    """Seconds that a pass over MNIST takes by Hogwild, one worker for each core, without the test."""
    local = {"batch_size": BATCH, "lr": LR, "momentum": MOMENTUM}
    where = {"data": "mnist", "partition": "contiguous", "workers": cores, "processes": cores}
    how = {"mode": "race", "policy": "hogwild", "race": {"runs": 1}, "rounds": 3}
    history = fedsim.run({**where, **how, "local": local, "engine": "spawn"}).history
    return median([record["seconds"]["train"] for record in history[1:]])


def compare_clock() -> dict[str, float]:
    """Ratios of seconds on the clock to those of the synchronous loop, which does as many steps."""
    common = {"workers": 4, "rounds": 3, "data": "mnist", "local": {"batch_size": BATCH, "lr": LR}}
    clock = {"mode": "clock", **common}
    mean, buffer = {"aggregate": {"rule": "mean"}}, {"policy": "fedbuff"}
    exact = {"rounds": 1, "precision": "float64"}  # in float32, rounding is amplified by many steps
    rows = [train_seconds(**{**tables, **exact})[1].global_row for tables in ({**common, **mean}, {**clock, **buffer})]
    furthest = float((rows[0] - rows[1]).abs().max())
    assert furthest < 1e-9, f"fedbuff and the synchronous loop did different work: rows differ by {furthest}"
    rounds, _ = train_seconds(**common, **mean)
    buffered, _ = train_seconds(**clock, **buffer)
    steps, _ = train_seconds(**common, **mean, sync="gradients")
    asynchronous, run = train_seconds(**clock, policy="asgd", clock={"noise": "lognormal"})
    seen = sum(map(sum, (record["samples"] for record in run.history)))
    assert abs(seen - 3 * 60_000) < 3 * BATCH, f"asgd saw {seen} samples"
    return {"fedbuff_over_rounds": buffered / rounds, "asgd_over_averaged_gradients": asynchronous / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    os.environ.setdefault("FEDSIM_DATA", str(default_root()))
    cores = usable_cores()
    shards = shards_of_mnist(cores)
    runs = []
    for _ in range(repeats):
        floor = bare_loop_seconds(shards) / cores
        race, usual = race_seconds(cores), usual_hogwild_seconds(shards)
        runs.append({"hogwild_over_floor": race / floor, "hogwild_over_usual": race / usual, **compare_clock()})
    report(
        "async",
        **{name: median([run[name] for run in runs]) for name in runs[0]},
        hogwild_samples_per_second=round(60_000 / race),
        events_per_second=round(max(events_per_second() for _ in range(repeats))),
        processes=cores,
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
