"""Policies whose workers keep their own models: elastic averaging with a centre, and pairwise averaging on a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt

from fedsim.asynchronous.policy import Arrival, Policy, StateScope, policy
from fedsim.asynchronous.server_state import ServerState
from fedsim.clients import State
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError


class OwnModels(Policy):
    """Each worker steps its own model with its own client algorithm state."""

    @property
    def needs_replicas(self) -> bool:
        return True

    @property
    def state_scope(self) -> StateScope:
        return frozenset(["private"])


@policy("easgd")
@dataclass(frozen=True)
class ElasticAveraging(OwnModels):
    """Elastic averaging SGD: every `period` steps of worker i, e = alpha (x_i - W), x_i -= e, W += e.

    Zhang et al. 2015. One difference: the next gradient is taken at the new x_i; in the paper, at the old one.

    Args:
        alpha: from 0 to 1; None: the paper's 0.9 / workers.
        period: local steps between two exchanges.
        synchronous: all workers exchange at once with the same old W, and wait for each other.

    >>> ElasticAveraging(period=4).traffic(unit=3)  # the fourth step sends the model and receives the centre
    (1, 1)
    """

    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    period: PositiveInt = 10
    synchronous: bool = False

    def start(self, server: ServerState) -> State:
        return {"arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: ServerState, slot: int) -> bool:
        return not (self.synchronous and server.policy_state["arrived"].numpy()[slot])

    def pull(self, server: ServerState, slot: int) -> None:
        server.keep_model(slot)

    def on_departure(self, server: ServerState) -> None:
        self._exchange_if_complete(server)  # the others may have waited for this worker only

    def take(self, server: ServerState, arrival: Arrival) -> None:
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

    def _exchange_if_complete(self, server: ServerState) -> None:
        arrived = server.policy_state["arrived"]
        if bool(arrived.any()) and bool(arrived[server.alive].all()):
            self._exchange(server, server.alive.tolist())
            arrived.zero_()

    def _exchange(self, server: ServerState, slots: list[int]) -> None:
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
    """Elastic averaging with momentum: easgd, where each worker keeps its momentum.

    Zhang et al. 2015, with `local.momentum = 0.99` and `local.nesterov = true`.

    >>> ElasticAveragingMomentum.needs_momentum
    True
    """

    needs_momentum = True


def ring(slot: int, n: int) -> list[int]:
    """Return the neighbours of a slot on a ring of n."""
    return sorted({(slot - 1) % n, (slot + 1) % n} - {slot})


def complete(slot: int, n: int) -> list[int]:
    """All other slots."""
    return [other for other in range(n) if other != slot]


def exponential(slot: int, n: int) -> list[int]:
    """Return the slots at distances 1, 2, 4, ... in both directions of a ring of n."""
    steps = [2**k for k in range(n.bit_length()) if 2**k < n]
    return sorted({(slot + sign * step) % n for step in steps for sign in (-1, 1)} - {slot})


GRAPHS = {"ring": ring, "complete": complete, "exponential": exponential}


@dataclass(frozen=True)
class Pairwise(OwnModels):
    """Pairs of neighbours average their models; the model to test is the mean of all models."""

    locking = "pair"

    graph: Literal["ring", "complete", "exponential"] = "ring"

    def start(self, server: ServerState) -> State:
        # apart from `shared.cohort.buffers`, which may hold results that have not arrived
        return {"buffers": server.shared.cohort.buffers.clone()}

    def pull(self, server: ServerState, slot: int) -> None:
        server.read[slot] = server.version
        if server.has_buffers:
            server.shared.cohort.buffers[slot] = server.policy_state["buffers"][slot]

    def partner(self, server: ServerState, slot: int, unit: int) -> int | None:
        """Return a neighbour that is alive, drawn by (seed, slot, unit); None if there is none."""
        neighbours = [other for other in GRAPHS[self.graph](slot, server.n) if server.alive_mask[other]]
        if not neighbours:
            return None
        return neighbours[int(numpy_generator(server.seed, "neighbour", slot, unit).integers(len(neighbours)))]

    def average(self, server: ServerState, arrival: Arrival) -> None:
        """Average the models and buffers of a worker and its partner."""
        slot, partner = arrival.slot, self.partner(server, arrival.slot, arrival.unit)
        buffers = server.policy_state["buffers"]
        if server.has_buffers:
            buffers[slot] = server.shared.cohort.buffers[slot]
        if partner is not None:
            mine, theirs = server.models[slot], server.models[partner]
            theirs.copy_(mine.add_(theirs).mul_(0.5))
            if server.has_buffers and server.buffers == "average":
                buffers[[slot, partner]] = buffers[[slot, partner]].mean(0)
        server.increment_version()

    def publish(self, server: ServerState) -> None:
        slots = server.alive.tolist()
        if not slots:
            raise ExperimentError("policy: all workers have left (clock.departures); no model remains")
        server.global_row.copy_(server.replicas[slots].mean(0))
        if server.has_buffers and server.buffers != "frozen":
            server.shared.server.buffers.copy_(server.policy_state["buffers"][slots].mean(0))


@policy("ad_psgd")
@dataclass(frozen=True)
class ADPSGD(Pairwise):
    """AD-PSGD: a worker averages its model with a random neighbour's, then steps along its gradient.

    Lian et al. 2018.

    Args:
        graph: "ring", "complete", or "exponential" (neighbours at distances 1, 2, 4, ...).

    >>> ADPSGD().locking  # a race locks both workers of a pair
    'pair'
    """

    def take(self, server: ServerState, arrival: Arrival) -> None:
        self.average(server, arrival)
        server.step_replica(arrival.slot, server.rows[arrival.slot])


@policy("gossip")
@dataclass(frozen=True)
class Gossip(Pairwise):
    """Gossip SGD: a worker steps along its gradient, then averages its model with a random neighbour's.

    Boyd et al. 2006.

    Args:
        graph: "ring", "complete", or "exponential" (neighbours at distances 1, 2, 4, ...).

    >>> GRAPHS[Gossip(graph="exponential").graph](slot=0, n=8)  # neighbours of worker 0
    [1, 2, 4, 6, 7]
    """

    def take(self, server: ServerState, arrival: Arrival) -> None:
        server.step_replica(arrival.slot, server.rows[arrival.slot])
        self.average(server, arrival)
