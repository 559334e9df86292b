"""Policies whose workers bring the gradient of one step, each of which moves the global row when it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server import Server
from fedsim.errors import ExperimentError
from fedsim.local import NonNegative, State

Decay = Annotated[float, Field(ge=0, lt=1)]


@policy("hogwild")
@dataclass(frozen=True)
class Hogwild(Policy):
    """Every gradient is a step of the shared row at once, without any lock. Recht et al. 2011.

    In a race, processes read and write one row in place, and may overwrite each other's steps; on the clock a step is
    taken as a whole, at a gradient that is as stale as the delays make it.

    momentum: each worker has its own ("private"), or there is one ("shared"); without local.momentum both are the same.
    """

    locking = "nothing"

    momentum: Literal["private", "shared"] = "private"

    @property
    def moments(self) -> frozenset[Literal["shared", "private"]]:
        return frozenset([self.momentum])

    def take(self, server: Server, arrival: Arrival) -> None:
        server.step(server.rows[arrival.slot], arrival.slot if self.momentum == "private" else None)
        server.mix_buffers([arrival.slot])


@policy("locked")
@dataclass(frozen=True)
class Locked(Hogwild):
    """As hogwild, with a lock around the reading of the row and around its writing: nothing is torn or lost.

    On the clock, where nothing ever is, the two are the same.
    """

    locking = "server"


@policy("asgd")
@dataclass(frozen=True)
class ASGD(Policy):
    """Downpour SGD: W -= lr g when a worker's g arrives, which then reads W. Dean et al. 2012.

    n_fetch: a worker reads W before every n_fetch-th step only, and in between steps its own replica.
    n_push: it sends the sum of the gradients of n_push steps.
    """

    n_fetch: PositiveInt = 1
    n_push: PositiveInt = 1

    @property
    def replicas(self) -> bool:
        return self.n_fetch > 1

    @property
    def moments(self) -> frozenset[Literal["shared", "private"]]:
        return frozenset(["shared", "private"] if self.replicas else ["shared"])

    def start(self, server: Server) -> State:
        return {"unsent": torch.zeros_like(server.memory.rows)} if self.n_push > 1 else {}

    def pull(self, server: Server, slot: int) -> None:
        if server.units[slot] % self.n_fetch == 0:
            server.pull(slot)

    def take(self, server: Server, arrival: Arrival) -> None:
        slot, unit = arrival.slot, arrival.unit
        gradient = server.rows[slot]
        if (unit + 1) % self.n_fetch:
            server.step_replica(slot, gradient.clone())
        if self.n_push > 1:
            gradient = server.remembered["unsent"][slot].add_(gradient)
        if (unit + 1) % self.n_push == 0:
            server.step(gradient)
            server.mix_buffers([slot])
            if self.n_push > 1:
                gradient.zero_()

    def traffic(self, unit: int) -> tuple[int, int]:
        return int((unit + 1) % self.n_push == 0), int(unit % self.n_fetch == 0)


@policy("staleness_aware")
@dataclass(frozen=True)
class StalenessAware(Policy):
    """W -= lr / max(1, tau) g for a gradient of staleness tau; n-softsync. Zhang et al. 2016.

    softsync: the n of n-softsync, from 1 to the number of workers: an update takes floor(workers / n) gradients, each
        divided by its own staleness, and their mean is the step. None: as many as workers, so that each gradient is
        a step.
    """

    softsync: PositiveInt | None = None

    def check(self, n_workers: int) -> None:
        if self.softsync is not None and self.softsync > n_workers:
            raise ExperimentError(f"policy.softsync = {self.softsync}: must be at most the {n_workers} workers at work")

    def start(self, server: Server) -> State:
        return {"sum": torch.zeros_like(server.global_row), "held": torch.zeros(1, dtype=torch.int64)}

    def take(self, server: Server, arrival: Arrival) -> None:
        total, held = server.remembered["sum"], server.remembered["held"]
        needed = server.n // (self.softsync or server.n)
        total.add_(server.rows[arrival.slot], alpha=1 / (max(1, arrival.staleness) * needed))
        held += 1
        server.mix_buffers([arrival.slot])
        if int(held) == needed:
            server.step(total)
            total.zero_()
            held.zero_()

    def held(self, server: Server) -> int:
        return int(server.remembered["held"])


@policy("dc_asgd")
@dataclass(frozen=True)
class DelayCompensated(Policy):
    """A step along g + lam g*g*(W - W_backup), W_backup the model that g is of. Zheng et al. 2017.

    lam: 0 is asgd.
    adaptive: divide lam by sqrt(mean square + 1e-7), element by element, with mean square = m (mean square) + (1 - m)
        g*g kept for each worker (DC-ASGD-a); without, lam is constant (DC-ASGD-c).
    """

    lam: NonNegative = 0.04
    adaptive: bool = False
    m: Decay = 0.95

    def __post_init__(self) -> None:
        if not self.adaptive and self.m != DelayCompensated.m:
            raise ExperimentError(f"policy.m = {self.m:g}: goes with policy.adaptive = true")

    @property
    def replicas(self) -> bool:
        return True

    def start(self, server: Server) -> State:
        return {"mean_square": torch.zeros_like(server.memory.rows)} if self.adaptive else {}

    def take(self, server: Server, arrival: Arrival) -> None:
        slot = arrival.slot
        gradient, square = server.rows[slot], server.rows[slot].square()
        correction = (server.global_row - server.replicas[slot]).mul_(square)
        if self.adaptive:
            mean_square = server.remembered["mean_square"][slot].mul_(self.m).add_(square, alpha=1 - self.m)
            correction.div_(mean_square.add(1e-7).sqrt_())
        server.step(gradient.add_(correction, alpha=self.lam))
        server.mix_buffers([slot])


@policy("ssp")
@dataclass(frozen=True)
class StaleSynchronous(Policy):
    """As asgd, but a worker may be at most s steps ahead of the slowest living one, or it waits. Ho et al. 2013.

    s: 0 is synchronous SGD, "inf" is asgd. A gradient whose worker has to wait takes effect together with those that
    come before anybody reads the row again, as one step along their mean: so with s = 0 every step is what it is with
    sync = "gradients".
    """

    s: NonNegativeInt | Literal["inf"] = 3

    def start(self, server: Server) -> State:
        counts = {name: torch.zeros(server.n, dtype=torch.int64) for name in ("clocks", "waiting")}
        return {**counts, "slowest": torch.zeros(1, dtype=torch.int64)}  # the least clock of the living

    def may_start(self, server: Server, slot: int) -> bool:
        if self.s == "inf":
            return True
        return bool(server.remembered["clocks"].numpy()[slot] - server.remembered["slowest"].numpy()[0] <= self.s)

    def pull(self, server: Server, slot: int) -> None:
        self._apply(server)
        server.pull(slot)

    def take(self, server: Server, arrival: Arrival) -> None:
        slot, clocks = arrival.slot, server.remembered["clocks"].numpy()
        clocks[slot] = arrival.unit + 1
        server.remembered["waiting"].numpy()[slot] = 1
        if arrival.unit == server.remembered["slowest"].numpy()[0]:
            self._find_slowest(server)
        if self.may_start(server, slot):
            self._apply(server)

    def left(self, server: Server) -> None:
        self._find_slowest(server)

    def _find_slowest(self, server: Server) -> None:
        if len(alive := server.alive):
            server.remembered["slowest"][0] = int(server.remembered["clocks"].numpy()[alive].min())

    def held(self, server: Server) -> int:
        return int(server.remembered["waiting"].sum())

    def _apply(self, server: Server) -> None:
        waiting = server.remembered["waiting"].numpy()
        slots = waiting.nonzero()[0].tolist()
        if slots:
            server.step(server.mean(slots))
            server.mix_buffers(slots)
            waiting[:] = 0
