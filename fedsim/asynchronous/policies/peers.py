"""Policies whose workers have models of their own that last: pulled towards a centre, or averaged in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server import Server
from fedsim.errors import ExperimentError
from fedsim.local import State
from fedsim.randomness import numpy_generator

Moments = frozenset[Literal["shared", "private"]]


class OwnModels(Policy):
    """Every worker steps a model of its own, with the state of its own solver."""

    @property
    def replicas(self) -> bool:
        return True

    @property
    def moments(self) -> Moments:
        return frozenset(["private"])


@policy("easgd")
@dataclass(frozen=True)
class ElasticAveraging(OwnModels):
    """After every `period` steps of worker i: e = alpha (x_i - W), x_i -= e, W += e. Zhang et al. 2015.

    One difference: the next gradient is of the x_i after that, where the paper takes it at the x_i before.

    alpha: from 0 to 1; None stands for the paper's 0.9 / workers.
    synchronous: all workers do so at once, from the same old W, and wait for each other; else each when it comes to it.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    period: PositiveInt = 10
    synchronous: bool = False

    def start(self, server: Server) -> State:
        return {"arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: Server, slot: int) -> bool:
        return not (self.synchronous and server.remembered["arrived"].numpy()[slot])

    def pull(self, server: Server, slot: int) -> None:
        server.stay(slot)

    def left(self, server: Server) -> None:
        self._meet(server)  # it may have been the last to be waited for

    def take(self, server: Server, arrival: Arrival) -> None:
        slot = arrival.slot
        server.step_replica(slot, server.rows[slot])
        if (arrival.unit + 1) % self.period:
            return
        if self.synchronous:
            server.remembered["arrived"][slot] = 1
            self._meet(server)
        else:
            self._exchange(server, [slot])

    def traffic(self, unit: int) -> tuple[int, int]:
        exchanges = int((unit + 1) % self.period == 0)
        return exchanges, exchanges

    def _meet(self, server: Server) -> None:
        arrived = server.remembered["arrived"]
        if bool(arrived.any()) and bool(arrived[server.alive].all()):
            self._exchange(server, server.alive.tolist())
            arrived.zero_()

    def _exchange(self, server: Server, slots: list[int]) -> None:
        alpha = 0.9 / server.n if self.alpha is None else self.alpha
        elastic = (server.replicas[slots] - server.global_row).mul_(alpha)
        server.replicas[slots] -= elastic
        server.global_row.add_(elastic.sum(0))
        server.moved()
        server.mix_buffers(slots)
        for slot in slots:
            server.read[slot] = server.version


@policy("eamsgd")
@dataclass(frozen=True)
class ElasticAveragingMomentum(ElasticAveraging):
    """easgd with workers that have Nesterov momentum, local.momentum and local.nesterov, which they keep.

    Zhang et al. 2015; the momentum there is 0.99.
    """

    needs_momentum = True


def ring(slot: int, n: int) -> list[int]:
    return sorted({(slot - 1) % n, (slot + 1) % n} - {slot})


def complete(slot: int, n: int) -> list[int]:
    return [other for other in range(n) if other != slot]


def exponential(slot: int, n: int) -> list[int]:
    """At distances 1, 2, 4, ... both ways, so that who is somebody's neighbour has it for one."""
    steps = [2**k for k in range(n.bit_length()) if 2**k < n]
    return sorted({(slot + sign * step) % n for step in steps for sign in (-1, 1)} - {slot})


GRAPHS = {"ring": ring, "complete": complete, "exponential": exponential}


@dataclass(frozen=True)
class Pairwise(OwnModels):
    """Workers average their models in pairs of neighbours on a graph; what is tested is the mean of all."""

    locking = "pair"

    graph: Literal["ring", "complete", "exponential"] = "ring"

    def start(self, server: Server) -> State:
        # those in the memory may be ahead, of work that has been computed and has not arrived
        return {"buffers": server.memory.buffers.clone()}

    def pull(self, server: Server, slot: int) -> None:
        server.read[slot] = server.version
        if server.has_buffers:
            server.memory.buffers[slot] = server.remembered["buffers"][slot]

    def partner(self, server: Server, slot: int, unit: int) -> int | None:
        """The neighbour, drawn by (seed, slot, unit), with whom a worker averages; None where it has no living one."""
        neighbours = [other for other in GRAPHS[self.graph](slot, server.n) if server.living[other]]
        if not neighbours:
            return None
        return neighbours[int(numpy_generator(server.seed, "neighbour", slot, unit).integers(len(neighbours)))]

    def average(self, server: Server, arrival: Arrival) -> None:
        slot, other = arrival.slot, self.partner(server, arrival.slot, arrival.unit)
        buffers = server.remembered["buffers"]
        if server.has_buffers:
            buffers[slot] = server.memory.buffers[slot]
        if other is not None:
            mine, theirs = server.models[slot], server.models[other]
            theirs.copy_(mine.add_(theirs).mul_(0.5))
            if server.has_buffers and server.buffers == "average":
                buffers[[slot, other]] = buffers[[slot, other]].mean(0)
        server.moved()

    def publish(self, server: Server) -> None:
        slots = server.alive.tolist()
        if not slots:
            raise ExperimentError("policy: all workers have left (clock.departures), and with them their models")
        server.global_row.copy_(server.replicas[slots].mean(0))
        if server.has_buffers and server.buffers != "server":
            server.memory.global_buffers.copy_(server.remembered["buffers"][slots].mean(0))


@policy("ad_psgd")
@dataclass(frozen=True)
class ADPSGD(Pairwise):
    """A worker averages its model with a random neighbour's, then steps along the gradient of what it was. Lian 2018.

    graph: who are neighbours: a "ring", "complete", or "exponential" (at distances 1, 2, 4, ...).
    """

    def take(self, server: Server, arrival: Arrival) -> None:
        self.average(server, arrival)
        server.step_replica(arrival.slot, server.rows[arrival.slot])


@policy("gossip")
@dataclass(frozen=True)
class Gossip(Pairwise):
    """A worker steps along its gradient, then averages its model with a random neighbour's. Boyd et al. 2006.

    graph: who are neighbours: a "ring", "complete", or "exponential" (at distances 1, 2, 4, ...).
    """

    def take(self, server: Server, arrival: Arrival) -> None:
        server.step_replica(arrival.slot, server.rows[arrival.slot])
        self.average(server, arrival)
