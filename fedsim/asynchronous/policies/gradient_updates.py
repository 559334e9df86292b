"""Policies in which workers send gradients, and the server takes SGD steps on the global model when they arrive.

The global model W is stored as one flat parameter vector, the global row.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from fedsim.asynchronous.policies.buffer import collect, new_buffer
from fedsim.asynchronous.policies.policy import Locking, Policy, StateScope, policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.clients import State
from fedsim.core.numbers import Example, FractionBelowOne, NonNegativeFloat, NonNegativeInt, PositiveInt
from fedsim.errors import ExperimentError


@policy("hogwild")
@dataclass(frozen=True)
class Hogwild(Policy):
    """Hogwild: each arriving gradient immediately changes the global model, without any lock. Recht et al. 2011.

    In a race, processes change the same global model at the same time, and may overwrite each other's changes. On the
    virtual clock, nothing is overwritten, but gradients are stale because of the delays.

    Args:
        momentum: "private": each worker has its own momentum buffer; "shared": all workers share one. See
            `local.momentum`.

    >>> Hogwild().locking, Hogwild(momentum="shared").state_scope
    ('nothing', frozenset({'shared'}))
    """

    locking: ClassVar[Locking] = "nothing"

    momentum: Literal["private", "shared"] = "private"

    @property
    def state_scope(self) -> StateScope:
        return frozenset([self.momentum])

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        server.step(server.rows[arrival.slot], arrival.slot if self.momentum == "private" else None)
        server.mix_buffers([arrival.slot])


@policy("locked")
@dataclass(frozen=True)
class Locked(Hogwild):
    """Asynchronous SGD with a lock: workers lock the global model while they read or change it, so no update is lost.

    On the virtual clock, the results are the same as those of `hogwild`.

    >>> Locked().locking
    'server'
    """

    locking: ClassVar[Locking] = "server"


@policy("asgd")
@dataclass(frozen=True)
class ASGD(Policy):
    """Asynchronous SGD (Downpour): W -= lr g when a worker's gradient g arrives. Dean et al. 2012.

    Args:
        n_fetch: number of steps from one read of the global model W to the next. In between, a worker takes its steps
            on its own copy of W.
        n_push: number of steps after which a worker sends the sum of its gradients.

    >>> [ASGD(n_fetch=2, n_push=3).traffic(unit) for unit in range(4)]  # (sent, received) of each step
    [(0, 1), (0, 0), (1, 1), (0, 0)]
    """

    sends_results = False

    n_fetch: PositiveInt = 1
    n_push: PositiveInt = 1

    @property
    def needs_replicas(self) -> bool:
        return self.n_fetch > 1

    @property
    def state_scope(self) -> StateScope:
        return frozenset(["shared", "private"] if self.needs_replicas else ["shared"])

    def start(self, server: AsyncServer) -> State:
        return {"unsent": torch.zeros_like(server.worker_rows)} if self.n_push > 1 else {}

    def pull(self, server: AsyncServer, slot: int) -> None:
        if server.units[slot] % self.n_fetch == 0:
            server.pull(slot)

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        slot, unit = arrival.slot, arrival.unit
        gradient = server.rows[slot]
        if (unit + 1) % self.n_fetch:
            server.step_replica(slot, gradient.clone())
        if self.n_push > 1:
            gradient = server.policy_state["unsent"][slot].add_(gradient)
        if (unit + 1) % self.n_push == 0:
            if server.admit(arrival, gradient):
                server.step(gradient)
                server.mix_buffers([slot])
            if self.n_push > 1:
                gradient.zero_()

    def traffic(self, unit: int) -> tuple[int, int]:
        return int((unit + 1) % self.n_push == 0), int(unit % self.n_fetch == 0)


@policy("staleness_aware")
@dataclass(frozen=True)
class StalenessAware(Policy):
    """Staleness-aware SGD: W -= lr / max(1, tau) g for a gradient g with staleness tau. Zhang et al. 2016.

    Args:
        softsync: n in the paper's n-softsync, from 1 to the number of workers. Each step uses the mean of
            floor(workers / n) gradients, each divided by max(1, tau). None: one step per gradient.

    >>> StalenessAware(softsync=5).check(n_workers=4)
    Traceback (most recent call last):
    fedsim.errors.ExperimentError: policy.softsync = 5: must be at most 4, the number of concurrent workers (cohort)
    """

    softsync: PositiveInt | None = None

    def check(self, n_workers: int) -> None:
        if self.softsync is not None and self.softsync > n_workers:
            raise ExperimentError(
                f"policy.softsync = {self.softsync}: must be at most {n_workers}, the number of concurrent workers "
                "(cohort)"
            )

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return (n_workers // (self.softsync or n_workers),)

    def start(self, server: AsyncServer) -> State:
        return new_buffer(server, self.sizes(server.n)[0], server.global_row.dtype)

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        needed = self.sizes(server.n)[0]
        total = collect(server, server.rows[arrival.slot], 1 / max(1, arrival.staleness), needed, arrival)
        server.mix_buffers([arrival.slot])
        if total is not None:
            server.step(total)

    def buffered(self, server: AsyncServer) -> int:
        return int(server.policy_state["count"])


@policy("dc_asgd")
@dataclass(frozen=True)
class DelayCompensated(Policy):
    """Delay-compensated ASGD: the server takes a step along g + lam g*g*(W - W_read). Zheng et al. 2017.

    The worker has read the global model W_read, and computed the gradient g there. W is the global model when g
    arrives.

    Args:
        lam: strength of the compensation, at least 0. 0 is `asgd`.
        adaptive: whether lam is divided elementwise by sqrt(v + 1e-7), where each worker's running mean square is
            v = m v + (1 - m) g*g (DC-ASGD-a). Otherwise lam is constant (DC-ASGD-c).
        m: decay rate of v, 0 <= m < 1. Only used with `adaptive`.

    >>> DelayCompensated(m=0.5)
    Traceback (most recent call last):
    fedsim.errors.ExperimentError: policy.m = 0.5: is only used with policy.adaptive = true; set this or remove policy.m
    """

    lam: NonNegativeFloat = 0.04
    adaptive: bool = False
    m: FractionBelowOne = 0.95

    def __post_init__(self) -> None:
        if not self.adaptive and self.m != DelayCompensated.m:
            raise ExperimentError(
                f"policy.m = {self.m:g}: is only used with policy.adaptive = true; set this or remove policy.m"
            )

    @property
    def needs_replicas(self) -> bool:
        return True

    def start(self, server: AsyncServer) -> State:
        return {"mean_square": torch.zeros_like(server.worker_rows)} if self.adaptive else {}

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        slot = arrival.slot
        gradient, square = server.rows[slot], server.rows[slot].square()
        correction = (server.global_row - server.replicas[slot]).mul_(square)
        if self.adaptive:
            mean_square = server.policy_state["mean_square"][slot].mul_(self.m).add_(square, alpha=1 - self.m)
            correction.div_(mean_square.add(1e-7).sqrt_())
        server.step(gradient.add_(correction, alpha=self.lam))
        server.mix_buffers([slot])


@policy("ssp")
@dataclass(frozen=True)
class StaleSynchronous(Policy):
    """Stale synchronous parallel: `asgd`, but workers more than s steps ahead of the slowest worker wait for it.

    Ho et al. 2013. The gradients of waiting workers are buffered. Before the next worker reads the global model, the
    server takes one step along the mean of the buffered gradients. With s = 0 the steps are the same as with
    `sync = "gradients"`.

    Args:
        s: maximum number of steps that a worker may be ahead. 0 is synchronous SGD, "inf" is `asgd`.

    >>> StaleSynchronous(s="inf")
    StaleSynchronous(s='inf')
    """

    s: NonNegativeInt | Literal["inf"] = 3

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return {0: (n_workers,), "inf": (1,)}.get(self.s, (1, n_workers))

    def start(self, server: AsyncServer) -> State:
        counts = {name: torch.zeros(server.n, dtype=torch.int64) for name in ("clocks", "buffered")}
        return {**counts, "slowest": torch.zeros(1, dtype=torch.int64)}  # the smallest clock of the alive workers

    def may_start(self, server: AsyncServer, slot: int) -> bool:
        if self.s == "inf":
            return True
        return bool(server.policy_state["clocks"].numpy()[slot] - server.policy_state["slowest"].numpy()[0] <= self.s)

    def pull(self, server: AsyncServer, slot: int) -> None:
        self._apply(server)
        server.pull(slot)

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        slot, clocks = arrival.slot, server.policy_state["clocks"].numpy()
        clocks[slot] = arrival.unit + 1
        server.policy_state["buffered"].numpy()[slot] = 1
        if arrival.unit == server.policy_state["slowest"].numpy()[0]:
            self._find_slowest(server)
        if self.may_start(server, slot):
            self._apply(server)

    def on_exclusion(self, server: AsyncServer, slot: int) -> None:
        server.policy_state["clocks"].numpy()[slot] = server.units[slot]
        self._find_slowest(server)

    def on_departure(self, server: AsyncServer) -> None:
        self._find_slowest(server)

    def _find_slowest(self, server: AsyncServer) -> None:
        if len(alive := server.alive):
            server.policy_state["slowest"][0] = int(server.policy_state["clocks"].numpy()[alive].min())

    def buffered(self, server: AsyncServer) -> int:
        return int(server.policy_state["buffered"].sum())

    def _apply(self, server: AsyncServer) -> None:
        buffered = server.policy_state["buffered"].numpy()
        slots = buffered.nonzero()[0].tolist()
        if slots:
            server.step(server.combine_gradients(slots))
            server.mix_buffers(slots)
            buffered[:] = 0


class FirstK(Policy):
    """Base class for policies in which the server takes each step along the mean of the first k gradients to arrive.

    A worker whose gradient has arrived waits until the server has taken the step.
    """

    @abstractmethod
    def needed(self, n_workers: int) -> int:
        """Return k, the number of gradients per step, if `n_workers` workers train at the same time."""

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return (self.needed(n_workers),)

    def start(self, server: AsyncServer) -> State:
        return {"arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: AsyncServer, slot: int) -> bool:
        return not server.policy_state["arrived"].numpy()[slot]

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        arrived = server.policy_state["arrived"].numpy()
        arrived[arrival.slot] = 1
        if self.buffered(server) == self.needed(server.n):
            slots = arrived.nonzero()[0].tolist()
            server.step(server.combine_gradients(slots))
            server.mix_buffers(slots, share=1.0)
            arrived[:] = 0

    def buffered(self, server: AsyncServer) -> int:
        return int(server.policy_state["arrived"].numpy().sum())

    def arrivals_needed(self, server: AsyncServer) -> int | None:
        return self.needed(server.n) - self.buffered(server) if self.cancels else None


@policy("k_async")
@dataclass(frozen=True)
class KAsync(FirstK):
    """K-async SGD: each step uses the mean of the next k gradients. Dutta et al. 2018.

    The other workers continue their work.

    Args:
        k: number of gradients per step. 1 is `asgd`.

    >>> KAsync(k=2).needed(n_workers=5)
    2
    """

    k: Annotated[PositiveInt, Example(2)]

    def needed(self, n_workers: int) -> int:
        return self.k

    def check(self, n_workers: int) -> None:
        if self.k > n_workers:
            raise ExperimentError(
                f"policy.k = {self.k}: must be at most {n_workers}, the number of concurrent workers (cohort)"
            )


@policy("k_sync")
@dataclass(frozen=True)
class KSync(KAsync):
    """K-sync SGD: each step uses the mean of the first k gradients and cancels the other workers' work.

    Dutta et al. 2018. If the durations of n workers are exponentially distributed with rate mu, a step takes
    (H_n - H_(n-k)) / mu on average, where H_n = 1 + 1/2 + ... + 1/n.

    Args:
        k: number of gradients per step.

    >>> KSync(k=2).cancels, KAsync(k=2).cancels
    (True, False)
    """

    cancels = True


@policy("backup_workers")
@dataclass(frozen=True)
class Backup(FirstK):
    """Synchronous SGD with backup workers: a step does not wait for the slowest workers, and cancels their work.

    Chen et al. 2016. With n workers, each step uses the mean of the first n - backups gradients.

    Args:
        backups: number of workers that a step does not wait for.

    >>> Backup(backups=2).needed(n_workers=10)
    8
    """

    cancels = True

    backups: NonNegativeInt = 1

    def needed(self, n_workers: int) -> int:
        return n_workers - self.backups

    def check(self, n_workers: int) -> None:
        if self.backups >= n_workers:
            raise ExperimentError(
                f"policy.backups = {self.backups}: must be less than {n_workers}, the number of concurrent workers "
                "(cohort)"
            )
