"""Policies on the virtual clock without an engine: tiny rows and a train function that the test provides."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.asynchronous.dispatch import Scheduler
from fedsim.asynchronous.policies import AsyncServer, Policy, policy
from fedsim.asynchronous.server_state import GradientOnly, ServerState
from fedsim.asynchronous.virtual_clock import VirtualClock
from fedsim.byzantine import Attackers
from fedsim.clients import SGD
from fedsim.config.schema import Aggregate, Attack, Topology
from fedsim.delays import Delays, noise
from fedsim.rounds.worker_states import WorkerStates
from fedsim.server.optimizer import ServerSGD
from fedsim.training.batches import WorkItem
from fedsim.training.task import RunTask, Schedule

SIZE, BATCH = 10, 4  # samples of a worker, which make 3 steps a round

LR = 0.1
START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)  # initial global row

Train = Callable[[Tensor, WorkItem], Tensor]


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=1e-12)


def nth_step(worker: int, step: int) -> WorkItem:
    """Return the work item of a worker's `step`-th step (counted from 0)."""
    return WorkItem(worker, worker, step // 3 + 1, None, step % 3)


def policy_of(name: str, **params: Any) -> Policy:
    registration = policy.get(name)
    return registration.bind(registration.check(params))


def delays_of(speeds: Sequence[float], kind: str = "constant", seed: int = 0, **params: Any) -> Delays:
    registration = noise.get(kind)
    return Delays(np.array(speeds, dtype=float), noise.bind(registration, registration.check(params)), seed)


def some_result(row: Tensor, item: WorkItem) -> Tensor:
    """Return a gradient or a model that depends on the row, the worker, the round and the step."""
    step = 0 if item.step is None else item.step + 1
    phase = torch.arange(1, len(row) + 1, dtype=row.dtype) * (item.worker + 1) + 10 * item.round + 0.7 * step
    return 0.5 * row + phase.sin()


def zero_result(row: Tensor, item: WorkItem) -> Tensor:
    """Return the gradient of a constant loss, which is zero."""
    return torch.zeros_like(row)


@dataclass
class SimulatedRun:
    """A simulated run of a policy on the virtual clock.

    Attributes:
        trained: the work items of each call of the train function.
        arrivals, times: the results that the policy has taken, and their virtual times.
    """

    server: ServerState
    clock: VirtualClock
    scheduler: Scheduler
    trained: list[list[WorkItem]] = field(default_factory=list)
    arrivals: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def row(self) -> Tensor:
        return self.server.global_row

    def advance(self, taken: int) -> SimulatedRun:
        """Advance the clock until the policy has taken at least `taken` more results."""
        count = 0
        while count < taken:
            count += self.clock.advance()
        return self

    @property
    def applied(self) -> Counter[int]:
        return Counter(arrival.staleness for arrival in self.arrivals)

    def in_flight(self) -> int:
        """Return the summed staleness of all work in flight."""
        return sum(self.server.staleness(slot) for slot in self.clock.dispatcher.in_flight)


def simulate(
    chosen: Policy,
    delays: Delays,
    *,
    train: Train = some_result,
    algorithm: Any = None,
    departures: dict[int, float] | None = None,
    seed: int = 0,
    topology: Any = "ring",
    size: int = SIZE,
    buffers: str = "average",
    global_buffers: Sequence[float] = (),
    models: float = 0.0,
    total_items: float = math.inf,
    rule: dict[str, Any] | None = None,
    f: int = 0,
    attack: dict[str, Any] | None = None,
) -> SimulatedRun:
    """Return a run of a policy on the virtual clock, with all workers of `delays`.

    Args:
        train: function that returns the result of a work item.
        models: size of a model in bytes.
        rule, attack: tables `aggregate` and `attack` of the experiment.
        f: number of Byzantine vectors that the rule must tolerate.
    """
    n, optimizer, wide = len(delays.slowdowns), ServerSGD(), torch.float64
    row, of_model = START.clone(), torch.tensor(global_buffers, dtype=wide)
    server_tensors = SimpleNamespace(
        row=row, buffers=of_model, algorithm={}, states={"parameters": optimizer.start(row)}
    )
    cohort = SimpleNamespace(
        rows=torch.zeros(n, len(row), dtype=wide),
        buffers=torch.zeros(n, len(of_model), dtype=wide),
        kept={},
        messages={},
        received={},
        train_loss=torch.zeros(n, dtype=wide),
    )
    components = {"policy": chosen, "local": algorithm or SGD(lr=LR), "server": optimizer}
    tables = {key: SimpleNamespace(component=component) for key, component in components.items()}
    tables["policy"].topology = Topology.model_validate(topology)
    tables["attack"] = Attack(**(attack or {}))
    tables["records"] = SimpleNamespace(updates=[])
    tables["aggregate"] = Aggregate(**(rule or {}))
    experiment = SimpleNamespace(**tables, seed=seed, buffers=buffers, nonfinite="error")
    experiment.rule = tables["aggregate"].pipeline(f)
    experiment.f_on_graph = lambda byzantine, round: [f] * n
    experiment.local_lr, experiment.sends_gradients = LR, chosen.work == "gradient"
    byzantine = Attackers(frozenset(tables["attack"].workers or ()), start_round=tables["attack"].start_round)
    task = SimpleNamespace(experiment=experiment, dtype=wide, device=torch.device("cpu"), algorithm=GradientOnly())
    task.byzantine = byzantine
    task.keeps_last = RunTask.keeps_last.fget(task)
    cohort.worker_rows = {"buffers": cohort.buffers}
    shared = SimpleNamespace(server=server_tensors, cohort=cohort)
    states = WorkerStates({"buffers": shared.server.buffers.clone()} if buffers == "local" else {})
    server = ServerState(task, shared, states)
    scheduler = Scheduler(seed, n, n, chosen.work, Schedule(BATCH), lambda worker: size)
    result = SimulatedRun(server, None, scheduler)

    def train_all(items: Sequence[WorkItem]) -> None:
        result.trained.append(list(items))
        for item in items:
            row = shared.cohort.rows[item.slot]
            row.copy_(train(row.clone(), item))
            shared.cohort.buffers[item.slot] += item.worker + 1
            shared.cohort.train_loss[item.slot] = item.worker

    def duration(item: WorkItem, unit: int, moved: tuple[int, int]) -> float:
        return delays.seconds(item.worker, unit, scheduler.steps(item), sum(moved) * models)

    result.clock = VirtualClock(server, scheduler, duration, train_all, departures, total_items)
    _watch(chosen, result)
    return result


def _watch(chosen: Policy, result: SimulatedRun) -> None:
    take = type(chosen).take

    class Watched(type(chosen)):
        def take(self, server: AsyncServer, arrival: Any) -> None:
            result.arrivals.append(arrival)
            result.times.append(result.clock.now)
            take(self, server, arrival)

    object.__setattr__(chosen, "__class__", Watched)


def replayed(run: SimulatedRun, rule: Callable[..., Tensor]) -> Tensor:
    """Return the global row after `rule(row, read, result, arrival, memory)` has processed a run's arrivals in order.

    The order of arrivals is that of the run, but the results are computed again at the rows that the rule produces.
    """
    items: dict[int, list[WorkItem]] = defaultdict(list)
    for item in chain.from_iterable(run.trained):
        items[item.worker].append(item)
    row, read, memory = START, [START] * run.server.n, {}
    for _, tied in groupby(zip(run.times, run.arrivals, strict=True), key=itemgetter(0)):
        arrivals = [arrival for _, arrival in tied]
        for arrival in arrivals:
            start = read[arrival.worker]
            row = rule(row, start, some_result(start, items[arrival.worker][arrival.unit]), arrival, memory)
        for arrival in arrivals:
            read[arrival.worker] = row
    return row
