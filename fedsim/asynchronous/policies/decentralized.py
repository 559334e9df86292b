"""Policies in which each worker keeps its own model: elastic averaging, and pairwise averaging on a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveInt

from fedsim.asynchronous.policies.policy import Arrival, Policy, StateScope, policy
from fedsim.asynchronous.policies.server import AsyncServer
from fedsim.clients import State
from fedsim.core.numbers import Fraction
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError


class OwnModels(Policy):
    """Base class for policies in which each worker keeps its own model and its own optimizer state (momentum).

    The server stores these models as `AsyncServer.replicas`.
    """

    @property
    def needs_replicas(self) -> bool:
        return True

    @property
    def state_scope(self) -> StateScope:
        return frozenset(["private"])


@policy("easgd")
@dataclass(frozen=True)
class ElasticAveraging(OwnModels):
    """Elastic averaging SGD: every `period` steps, worker i's model x_i and the global model W move towards each other.

    Zhang et al. 2015. This exchange computes e = alpha (x_i - W), x_i -= e, W += e. Unlike in the paper, the next
    gradient is computed at the new x_i, not at the old x_i.

    Args:
        alpha: strength of an exchange, from 0 to 1. None: 0.9 / workers, as in the paper.
        period: number of local steps between two exchanges.
        synchronous: whether all workers wait for each other, and then exchange with the same W.

    >>> ElasticAveraging(period=4).traffic(unit=3)  # the fourth step sends x_i and receives W
    (1, 1)
    """

    alpha: Fraction | None = None
    period: PositiveInt = 10
    synchronous: bool = False

    def start(self, server: AsyncServer) -> State:
        return {"arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: AsyncServer, slot: int) -> bool:
        return not (self.synchronous and server.policy_state["arrived"].numpy()[slot])

    def pull(self, server: AsyncServer, slot: int) -> None:
        server.keep_model(slot)

    def on_departure(self, server: AsyncServer) -> None:
        self._exchange_if_complete(server)  # possibly the last worker that the others waited for

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        slot = arrival.slot
        server.step_replica(slot, server.rows[slot])
        if (arrival.unit + 1) % self.period:
            return
        if self.synchronous:
            server.policy_state["arrived"][slot] = 1
            self._exchange_if_complete(server)
        else:
            self._exchange(server, [slot])

    def traffic(self, unit: int) -> tuple[int, int]:
        exchanges = int((unit + 1) % self.period == 0)
        return exchanges, exchanges

    def _exchange_if_complete(self, server: AsyncServer) -> None:
        arrived = server.policy_state["arrived"]
        if bool(arrived.any()) and bool(arrived[server.alive].all()):
            self._exchange(server, server.alive.tolist())
            arrived.zero_()

    def _exchange(self, server: AsyncServer, slots: list[int]) -> None:
        alpha = 0.9 / server.n if self.alpha is None else self.alpha
        elastic = (server.replicas[slots] - server.global_row).mul_(alpha)
        server.replicas[slots] -= elastic
        server.global_row.add_(elastic.sum(0))
        server.increment_version()
        server.mix_buffers(slots)
        for slot in slots:
            server.read[slot] = server.version


@policy("eamsgd")
@dataclass(frozen=True)
class ElasticAveragingMomentum(ElasticAveraging):
    """Elastic averaging with momentum: the policy `easgd`, but each worker keeps a momentum buffer.

    Zhang et al. 2015, with `local.momentum = 0.99` and `local.nesterov = true`.

    >>> ElasticAveragingMomentum.needs_momentum
    True
    """

    needs_momentum = True


def ring(slot: int, n: int) -> list[int]:
    """Return the two neighbours of worker number `slot` on a ring of n workers."""
    return sorted({(slot - 1) % n, (slot + 1) % n} - {slot})


def complete(slot: int, n: int) -> list[int]:
    """Return the neighbours of worker number `slot` on a complete graph of n workers: all other workers."""
    return [other for other in range(n) if other != slot]


def exponential(slot: int, n: int) -> list[int]:
    """Return the neighbours of worker number `slot` on an exponential graph of n workers.

    The neighbours are the workers at distances 1, 2, 4, ... on a ring, in both directions.
    """
    steps = [2**k for k in range(n.bit_length()) if 2**k < n]
    return sorted({(slot + sign * step) % n for step in steps for sign in (-1, 1)} - {slot})


GRAPHS = {"ring": ring, "complete": complete, "exponential": exponential}


@dataclass(frozen=True)
class Pairwise(OwnModels):
    """Base class for policies in which a worker averages its model with the model of a random neighbour.

    The global model, which is tested, is the mean of all workers' models.
    """

    locking = "pair"

    graph: Literal["ring", "complete", "exponential"] = "ring"

    def start(self, server: AsyncServer) -> State:
        # A copy, since `worker_buffers` may contain results that have not arrived yet.
        return {"buffers": server.worker_buffers.clone()}

    def pull(self, server: AsyncServer, slot: int) -> None:
        server.read[slot] = server.version
        if server.has_buffers:
            server.worker_buffers[slot] = server.policy_state["buffers"][slot]

    def partner(self, server: AsyncServer, slot: int, unit: int) -> int | None:
        """Draw a random neighbour of a worker from the neighbours that still take part in the run.

        Args:
            server: state of the run, with the seed.
            slot: number of the worker.
            unit: number of steps that the worker has started before, on which the draw depends too.

        Returns the number of the neighbour, or None if no neighbour takes part any more.
        """
        neighbours = [other for other in GRAPHS[self.graph](slot, server.n) if server.alive_mask[other]]
        if not neighbours:
            return None
        return neighbours[int(numpy_generator(server.seed, "neighbour", slot, unit).integers(len(neighbours)))]

    def average(self, server: AsyncServer, arrival: Arrival) -> None:
        """Replace the models of a worker and its partner by their average."""
        slot, partner = arrival.slot, self.partner(server, arrival.slot, arrival.unit)
        buffers = server.policy_state["buffers"]
        if server.has_buffers:
            buffers[slot] = server.worker_buffers[slot]
        if partner is not None:
            mine, theirs = server.models[slot], server.models[partner]
            theirs.copy_(mine.add_(theirs).mul_(0.5))
            if server.has_buffers and server.buffers == "average":
                buffers[[slot, partner]] = buffers[[slot, partner]].mean(0)
        server.increment_version()

    def publish(self, server: AsyncServer) -> None:
        slots = server.alive.tolist()
        if not slots:
            raise ExperimentError(
                "policy: all workers have left (clock.departures), so no model remains to test; keep at least one "
                "worker"
            )
        server.global_row.copy_(server.replicas[slots].mean(0))
        if server.has_buffers and server.buffers != "frozen":
            server.global_buffers.copy_(server.policy_state["buffers"][slots].mean(0))


@policy("ad_psgd")
@dataclass(frozen=True)
class ADPSGD(Pairwise):
    """AD-PSGD: a worker averages its model with a random neighbour's model, then takes its gradient step.

    Lian et al. 2018.

    Args:
        graph: which workers are neighbours: "ring", "complete", or "exponential" (at distances 1, 2, 4, ...).

    >>> ADPSGD().locking  # a race locks both workers of a pair
    'pair'
    """

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        self.average(server, arrival)
        server.step_replica(arrival.slot, server.rows[arrival.slot])


@policy("gossip")
@dataclass(frozen=True)
class Gossip(Pairwise):
    """Gossip SGD: a worker takes its gradient step, then averages its model with a random neighbour's model.

    Boyd et al. 2006.

    Args:
        graph: which workers are neighbours: "ring", "complete", or "exponential" (at distances 1, 2, 4, ...).

    >>> GRAPHS[Gossip(graph="exponential").graph](slot=0, n=8)  # neighbours of worker 0
    [1, 2, 4, 6, 7]
    """

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        server.step_replica(arrival.slot, server.rows[arrival.slot])
        self.average(server, arrival)
