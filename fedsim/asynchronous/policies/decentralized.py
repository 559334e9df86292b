"""Policies in which each worker keeps its own model: elastic averaging, and averaging with neighbours on a graph.

The graph and its mixing matrix W are the setting `policy.topology`. `d_psgd` averages all models with the weights W.
`gossip` and `ad_psgd` average pairs: worker i contacts its neighbour j with probability W_ij / (1 - W_ii), so that W_ii
has no effect. If workers have left, or are not connected in this round, their weights count for the worker itself.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.asynchronous.policies.policy import Policy, StateScope, policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.clients import State
from fedsim.core.numbers import Fraction, PositiveInt
from fedsim.core.randomness import numpy_generator
from fedsim.core.rows import index_of
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


class Waiting(OwnModels):
    """Base class for policies in which workers may wait until all have arrived, and then exchange their models.

    The state `arrived` is 0 for a worker that has not arrived, 1 for one that has, and 2 if its result was excluded.
    """

    def start(self, server: AsyncServer) -> State:
        return {**super().start(server), "arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: AsyncServer, slot: int) -> bool:
        return not server.policy_state["arrived"].numpy()[slot]

    def on_departure(self, server: AsyncServer) -> None:
        self._exchange_if_complete(server)  # possibly the last worker that the others waited for

    def wait(self, server: AsyncServer, slot: int, *, excluded: bool = False) -> None:
        """Let the worker in `slot` wait for the other workers. The last one to arrive makes all exchange their models.

        `excluded` says whether the worker's result was excluded because of NaN or infinity.
        """
        server.policy_state["arrived"][slot] = 2 if excluded else 1
        self._exchange_if_complete(server)

    @abstractmethod
    def exchange(self, server: AsyncServer, slots: list[int], senders: list[int]) -> None:
        """Let the workers in `slots` exchange their models. The results of those not in `senders` are excluded."""

    def _exchange_if_complete(self, server: AsyncServer) -> None:
        arrived = server.policy_state["arrived"]
        if bool(arrived.any()) and bool(arrived[server.alive].all()):
            slots = server.alive.tolist()
            self.exchange(server, slots, [slot for slot in slots if arrived[slot] == 1])
            arrived.zero_()


@policy("easgd")
@dataclass(frozen=True)
class ElasticAveraging(Waiting):
    """Elastic averaging SGD: every `period` steps, worker i's model x_i and the global model W move towards each other.

    Zhang et al. 2015. This exchange computes e_i = alpha (x_i - W), x_i -= e_i, W += e_i. If all k workers exchange at
    the same time, `aggregate.rule` combines the e_i, and W moves by k times the result. An attack changes the e_i that
    a worker sends, but not its x_i. Unlike in the paper, the next gradient is computed at the new x_i, not at the old
    x_i.

    Args:
        alpha: strength of an exchange, from 0 to 1. None: 0.9 / workers, as in the paper.
        period: number of local steps between two exchanges.
        synchronous: whether all workers wait for each other, and then exchange with the same W.

    >>> ElasticAveraging(period=4).traffic(unit=3)  # the fourth step sends x_i and receives W
    (1, 1)
    """

    sends_results = False

    alpha: Fraction | None = None
    period: PositiveInt = 10
    synchronous: bool = False

    def pull(self, server: AsyncServer, slot: int) -> None:
        server.keep_model(slot)

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        slot = arrival.slot
        server.step_replica(slot, server.rows[slot])
        if (arrival.unit + 1) % self.period:
            return
        sent = server.rows[slot].copy_(self._elastic(server, [slot])[0])
        excluded = not server.admit(arrival, sent)
        if self.synchronous:
            self.wait(server, slot, excluded=excluded)
        else:
            self.exchange(server, [slot], [] if excluded else [slot])

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return (n_workers if self.synchronous else 1,)

    def traffic(self, unit: int) -> tuple[int, int]:
        exchanges = int((unit + 1) % self.period == 0)
        return exchanges, exchanges

    def exchange(self, server: AsyncServer, slots: list[int], senders: list[int]) -> None:
        index = index_of(slots, server.replicas.device)
        server.replicas[index] -= self._elastic(server, slots)
        if senders:
            sent = server.worker_rows[index_of(senders, server.replicas.device)]
            if server.combines:
                staleness = torch.tensor([server.staleness(slot) for slot in senders])
                server.global_row.add_(server.combine(sent, senders, staleness), alpha=len(senders))
            else:
                server.global_row.add_(sent.sum(0))
            server.mix_buffers(senders)
        if senders or self.synchronous:  # workers that wait are asked again after the next update
            server.increment_version()
        for slot in slots:
            server.read[slot] = server.version

    def _elastic(self, server: AsyncServer, slots: list[int]) -> Tensor:
        """Return the elastic differences e_i of the workers in `slots`, [k, d]."""
        alpha = 0.9 / server.n if self.alpha is None else self.alpha
        return (server.replicas[index_of(slots, server.replicas.device)] - server.global_row).mul_(alpha)


@policy("eamsgd")
@dataclass(frozen=True)
class ElasticAveragingMomentum(ElasticAveraging):
    """Elastic averaging with momentum: the policy `easgd`, but each worker keeps a momentum buffer.

    Zhang et al. 2015, with `local.momentum = 0.99` and `local.nesterov = true`.

    >>> ElasticAveragingMomentum.needs_momentum
    True
    """

    needs_momentum = True


class Decentralized(OwnModels):
    """Base class for policies without a server, whose workers average their models with neighbours on a graph.

    The global model, which is tested, is the mean of the models of all workers, except those that attack by sending
    other models than their own. `aggregate.rule` combines the models that a worker receives: worker i moves by the
    result of the rule for the differences x_j - x_i of its neighbours' models and 0 for its own, with the weights of W.
    Each round records their consensus distance,
    the root of the mean of |x_i - mean|^2 over the workers (Kong et al. 2021).
    """

    uses_topology = True

    def start(self, server: AsyncServer) -> State:
        # A copy, since `worker_buffers` may contain results that have not arrived yet.
        return {**super().start(server), "buffers": server.worker_buffers.clone()}

    def pull(self, server: AsyncServer, slot: int) -> None:
        server.read[slot] = server.version
        if server.has_buffers:
            server.worker_buffers[slot] = server.policy_state["buffers"][slot]

    def publish(self, server: AsyncServer) -> None:
        slots = server.tested.tolist()
        if not slots:
            honest = "honest " * bool(len(server.alive))
            raise ExperimentError(
                f"policy: all {honest}workers have left (clock.departures), so no model remains to test; keep at least "
                f"one {honest}worker"
            )
        server.global_row.copy_(server.replicas[slots].mean(0))
        if server.has_buffers and server.buffers != "frozen":
            server.global_buffers.copy_(server.policy_state["buffers"][slots].mean(0))

    def numbers(self, server: AsyncServer) -> dict[str, float]:
        wide = server.worker_buffers.dtype
        squares = [(server.replicas[slot] - server.global_row).to(wide).square().sum() for slot in server.tested]
        return {"consensus_distance": math.sqrt(torch.stack(squares).mean())}


@dataclass(frozen=True)
class Pairwise(Decentralized):
    """Base class for policies in which a worker averages its model with the model of a random neighbour."""

    locking = "pair"

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return (2,)

    def partner(self, server: AsyncServer, slot: int, unit: int) -> int | None:
        """Draw a random neighbour of a worker from the neighbours that still take part in the run.

        Neighbour j is drawn with a probability in proportion to W_ij, where i is the worker.

        Args:
            server: state of the run, with the seed and the mixing matrix W.
            slot: number of the worker.
            unit: number of steps that the worker has started before, on which the draw depends too.

        Returns the number of the neighbour, or None if no neighbour takes part any more.
        """
        slots, weights = server.neighbours(slot)
        if not len(slots):
            return None
        probabilities = None if (weights == weights[0]).all() else weights / weights.sum()
        return int(numpy_generator(server.seed, "neighbour", slot, unit).choice(slots, p=probabilities))

    def average(self, server: AsyncServer, arrival: Arrival) -> None:
        """Replace the models of a worker and its partner by their average."""
        slot, partner = arrival.slot, self.partner(server, arrival.slot, arrival.unit)
        buffers = server.policy_state["buffers"]
        if server.has_buffers:
            buffers[slot] = server.worker_buffers[slot]
        if partner is not None:
            own_model, partner_model = server.models[slot], server.models[partner]
            if server.mixes:
                moment, old, half = (slot, arrival.unit), server.replicas, np.full(2, 0.5)
                moves = server.mix(old, slot, [partner], half, moment), server.mix(old, partner, [slot], half, moment)
                own_model += moves[0]
                partner_model += moves[1]
            else:
                partner_model.copy_(own_model.add_(partner_model).mul_(0.5))
            if server.has_buffers and server.buffers == "average":
                buffers[[slot, partner]] = buffers[[slot, partner]].mean(0)
        server.increment_version()


@policy("ad_psgd")
@dataclass(frozen=True)
class ADPSGD(Pairwise):
    """AD-PSGD: a worker averages its model with a random neighbour's model, then takes its gradient step.

    Lian et al. 2018. Worker i draws its neighbour j with probability W_ij / (1 - W_ii), where W is the mixing matrix of
    `policy.topology`. Neighbours with equal weights are equally likely.

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

    Boyd et al. 2006. Worker i draws its neighbour j with probability W_ij / (1 - W_ii), where W is the mixing matrix of
    `policy.topology`. Neighbours with equal weights are equally likely.

    >>> Gossip.uses_topology
    True
    """

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        server.step_replica(arrival.slot, server.rows[arrival.slot])
        self.average(server, arrival)


@policy("d_psgd")
@dataclass(frozen=True)
class DecentralizedSGD(Decentralized, Waiting):
    """D-PSGD: all workers take one step at the same time, and average their models with the mixing matrix W.

    Lian et al. 2017, Algorithm 1: x_i becomes the sum over j of W_ij x_j, minus the step along the gradient at the old
    x_i. W is the mixing matrix of `policy.topology`. In each step, a worker sends its model to all its neighbours, and
    waits for the slowest worker.

    >>> DecentralizedSGD().locking  # a race locks all models
    'server'
    """

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        self.wait(server, arrival.slot)

    def on_exclusion(self, server: AsyncServer, slot: int) -> None:
        self.wait(server, slot, excluded=True)  # only averages

    def moved(self, server: AsyncServer, slot: int, unit: int) -> tuple[int, int]:
        count = len(server.neighbours(slot)[0])
        return count, count

    def exchange(self, server: AsyncServer, slots: list[int], senders: list[int]) -> None:
        models, buffers = server.replicas, server.policy_state["buffers"]
        weights = torch.from_numpy(server.mixing_matrix()[np.ix_(slots, slots)]).fill_diagonal_(0)
        weights -= weights.sum(1).diag()  # W - I of the present workers
        old = models[slots]
        for slot in senders:
            server.step_replica(slot, server.rows[slot])  # may depend on the old model, as with weight decay
        if server.mixes:
            self._mix(server, slots, old)
        else:
            for block in column_blocks(models.shape[1], n=len(slots), device=models.device):
                models[slots, block] += weights.to(models) @ old[:, block]
        if server.has_buffers:
            buffers[senders] = server.worker_buffers[senders]
            if server.buffers == "average":
                buffers[slots] += weights.to(buffers) @ buffers[slots]
        server.increment_version()

    def _mix(self, server: AsyncServer, slots: list[int], old: Tensor) -> None:
        """Move the models of the workers in `slots`, which were `old` [k, d], by the rule."""
        before = torch.zeros_like(server.replicas)
        before[slots] = old
        for slot in slots:
            others, weights = server.neighbours(slot)
            of_all = np.append(weights, max(0.0, 1 - weights.sum()))
            server.replicas[slot] += server.mix(before, slot, others.tolist(), of_all, (server.version,))
