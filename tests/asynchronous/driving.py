"""Policies driven on the virtual clock without an engine: tiny rows, and a train function made up by the test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.server import ServerSGD
from fedsim.asynchronous.clock import VirtualClock
from fedsim.asynchronous.delays import Delays, bind_noise, noise
from fedsim.asynchronous.policies import Policy, policy
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.engines.feed import Member
from fedsim.engines.job import Schedule
from fedsim.local import SGD

SIZE, BATCH = 10, 4  # samples of a worker, so 3 steps of a round

Train = Callable[[Tensor, Member], Tensor]


def policy_of(name: str, **params: Any) -> Policy:
    plug = policy.get(name)
    return plug.bind(plug.check(params))


def delays_of(speeds: Sequence[float], kind: str = "constant", seed: int = 0, **params: Any) -> Delays:
    plug = noise.get(kind)
    return Delays(np.array(speeds, dtype=float), bind_noise(plug, plug.check(params)), seed)


def made_up(row: Tensor, member: Member) -> Tensor:
    """A gradient, or a model, that depends on the row, the worker and the moment."""
    step = 0 if member.step is None else member.step + 1
    phase = torch.arange(1, len(row) + 1, dtype=row.dtype) * (member.worker + 1) + 10 * member.round + 0.7 * step
    return 0.5 * row + phase.sin()


def nothing(row: Tensor, member: Member) -> Tensor:
    """The gradient of a constant."""
    return torch.zeros_like(row)


@dataclass
class Driven:
    """A policy on the clock.

    Attributes:
        trained: the members of each call of the train function.
        arrivals: what the policy has been given, in order; `times` beside it.
    """

    server: Server
    clock: VirtualClock
    roster: Roster
    trained: list[list[Member]] = field(default_factory=list)
    arrivals: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def row(self) -> Tensor:
        return self.server.global_row

    def go(self, taken: int) -> Driven:
        """On until so many pieces of work, at least, have been taken."""
        count = 0
        while count < taken:
            count += self.clock.advance()
        return self

    @property
    def applied(self) -> Counter[int]:
        return Counter(arrival.staleness for arrival in self.arrivals)

    def in_flight(self) -> int:
        """Sum over the work under way of how many versions it is behind."""
        return sum(self.server.staleness(slot) for slot in self.clock.in_flight)


def driven(
    chosen: Policy,
    delays: Delays,
    *,
    slots: int | None = None,
    train: Train | None = made_up,
    solver: Any = None,
    optimizer: Any = None,
    start: Sequence[float] = (1.0, -2.0, 0.5),
    dtype: torch.dtype = torch.float64,
    departures: dict[int, float] | None = None,
    seed: int = 0,
    schedule: Schedule | None = None,
    size: int = SIZE,
    buffers: str = "average",
    global_buffers: Sequence[float] = (),
    models: float = 0.0,
    watched: bool = True,
    pieces: float = math.inf,
) -> Driven:
    """All workers of `delays` at work, or `slots` of them at a time; `models` are the bytes of a model.

    Without `train` nothing is trained, and where it is not watched, arrivals are not noted down.
    """
    n_workers = len(delays.speeds)
    slots = slots or n_workers
    optimizer, wide = optimizer or ServerSGD(), torch.float64
    global_row = torch.tensor(start, dtype=dtype)
    memory = SimpleNamespace(
        global_row=global_row,
        rows=torch.zeros(slots, len(global_row), dtype=dtype),
        global_buffers=torch.tensor(global_buffers, dtype=wide),
        buffers=torch.zeros(slots, len(global_buffers), dtype=wide),
        own_buffers=torch.tensor([list(global_buffers)] * n_workers, dtype=wide).reshape(n_workers, -1),
        states={"parameters": optimizer.start(global_row)},
        train_loss=torch.zeros(slots, dtype=wide),
    )
    task = SimpleNamespace(
        seed=seed, server=optimizer, buffers=buffers, nonfinite="error", dtype=dtype, device=torch.device("cpu")
    )
    server = Server.of(chosen, solver or SGD(lr=0.1), task, memory)
    schedule = schedule or Schedule(BATCH)
    roster = Roster(seed, n_workers, slots, chosen.work, schedule, lambda worker: size)
    result = Driven(server, None, roster)

    def train_all(members: Sequence[Member]) -> None:
        result.trained.append(list(members))
        for member in members:
            row = memory.rows[member.slot]
            row.copy_(train(row.clone(), member))
            memory.buffers[member.slot] += member.worker + 1
            memory.train_loss[member.slot] = member.worker

    def pace(member: Member, unit: int, moved: int) -> float:
        return delays.seconds(member.worker, unit, roster.steps(member), moved * models)

    result.clock = VirtualClock(server, roster, pace, train_all if train else lambda members: None, departures, pieces)
    if watched:
        _watch(chosen, result)
    return result


def _watch(chosen: Policy, result: Driven) -> None:
    take = type(chosen).take

    class Watched(type(chosen)):
        def take(self, server: Server, arrival: Any) -> None:
            result.arrivals.append(arrival)
            result.times.append(result.clock.now)
            take(self, server, arrival)

    object.__setattr__(chosen, "__class__", Watched)
