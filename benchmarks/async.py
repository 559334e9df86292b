"""Asynchronous training compared with baselines that are measured in the same run.

Race: Hogwild with one process per core, compared with two baselines. (i) The floor is a bare loop over the same shards
in one process with one thread, with its time divided by the number of cores. (ii) PyTorch's own Hogwild example in its
usual form: spawned processes, `share_memory`, and in each process a DataLoader over a preloaded data set and
`torch.optim.SGD`.

Clock: fedbuff with a buffer for all workers and constant delays, compared with the synchronous loop of the engine
`serial`, which takes exactly the same steps. asgd compared with sync = "gradients" for the same number of steps. Also
the events per second of a clock on which nothing is computed.

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
from fedsim.asynchronous.dispatch import Scheduler
from fedsim.asynchronous.policies import Arrival, AsyncServer, Policy
from fedsim.asynchronous.server_state import ServerState
from fedsim.asynchronous.virtual_clock import VirtualClock
from fedsim.core.randomness import batch_order
from fedsim.data import load_dataset, partition
from fedsim.data.sources import default_root
from fedsim.models import Net
from fedsim.rounds.round_clock import delays_of
from fedsim.runs.setup import begun
from fedsim.system.devices import usable_cores
from fedsim.training.batches import WorkItem

BATCH, LR, MOMENTUM = 64, 0.01, 0.5
EVENTS = 200_000


def shards_of_mnist(cores: int) -> list[tuple[Tensor, Tensor]]:
    """Return the preloaded, normalised images and the labels of each of `cores` contiguous MNIST shards."""
    train, _ = load_dataset("mnist")
    inputs, targets = train.gather(torch.arange(len(train)))
    shards = partition(train.targets.numpy(), "contiguous", cores)
    return [(inputs[torch.from_numpy(shard)], targets[torch.from_numpy(shard)]) for shard in shards]


def bare_loop_seconds(shards: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the seconds of one pass over all shards in one process with one thread, without preparing the shards."""
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
    """Return the seconds that the slowest process needs for one pass over its shard in PyTorch's usual Hogwild."""
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
    """Return the seconds of a run's rounds without their tests, and the result."""
    result = fedsim.run({"engine": "serial", **tables})
    return sum(sum(record["seconds"].values()) - record["seconds"]["test"] for record in result.history), result


@dataclass(frozen=True)
class Nothing(Policy):
    """A policy that only increments the version for each arrival."""

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        server.increment_version()


def events_per_second(workers: int = 100) -> float:
    """Return the events per second of a virtual clock with exponential delays on which nothing is computed."""
    clock = {"noise": {"name": "shifted_exponential", "shift": 0.0}}
    tables = {"workers": workers, "mode": "clock", "policy": Nothing, "model": "logistic", "clock": clock}
    experiment = Experiment(engine="serial", **tables)
    with fedsim.Session() as session, begun(experiment, session) as (task, engine):
        server = ServerState(task, engine.shared, engine.states)
        scheduler = Scheduler.of(task, engine.shared)
    delays = delays_of(experiment)

    def duration(item: WorkItem, unit: int, models: tuple[int, int]) -> float:
        return delays.seconds(item.worker, unit, 1, sum(models))

    clock = VirtualClock(server, scheduler, duration, lambda items: None)
    started, taken = time.perf_counter(), 0
    while taken < EVENTS:
        taken += clock.advance()
    return taken / (time.perf_counter() - started)


def race_seconds(cores: int) -> float:
    """Return the median time in seconds of one epoch on MNIST with Hogwild, one worker per core, without the test."""
    local = {"batch_size": BATCH, "lr": LR, "momentum": MOMENTUM}
    where = {"data": "mnist", "partition": "contiguous", "workers": cores, "processes": cores}
    how = {"mode": "race", "policy": "hogwild", "race": {"runs": 1}, "rounds": 3}
    history = fedsim.run({**where, **how, "local": local, "engine": "processes"}).history
    return median([record["seconds"]["train"] for record in history[1:]])


def compare_clock() -> dict[str, float]:
    """Return the time of runs on the clock, relative to that of the synchronous loop with the same number of steps."""
    common = {"workers": 4, "rounds": 3, "data": "mnist", "local": {"batch_size": BATCH, "lr": LR}}
    clock = {"mode": "clock", **common}
    mean, buffer = {"aggregate": {"rule": "mean"}}, {"policy": "fedbuff"}
    exact = {"rounds": 1, "precision": "float64"}  # over many steps, rounding differences grow too large in float32
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
