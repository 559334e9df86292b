"""Policies that update the global row when the first k gradients are there: Chen et al. 2016, Dutta et al. 2018."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from pydantic import NonNegativeInt, PositiveInt

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server import Server
from fedsim.errors import ExperimentError
from fedsim.local import State


class Fastest(Policy):
    """A step along the mean of the first `needed` gradients; whoever has brought one waits for that."""

    @abstractmethod
    def needed(self, n_workers: int) -> int:
        """How many of so many workers an update waits for."""

    def start(self, server: Server) -> State:
        return {"arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: Server, slot: int) -> bool:
        return not server.remembered["arrived"].numpy()[slot]

    def take(self, server: Server, arrival: Arrival) -> None:
        arrived = server.remembered["arrived"].numpy()
        arrived[arrival.slot] = 1
        if self.held(server) == self.needed(server.n):
            slots = arrived.nonzero()[0].tolist()
            server.step(server.mean(slots))
            server.mix_buffers(slots, share=1.0)
            arrived[:] = 0

    def held(self, server: Server) -> int:
        return int(server.remembered["arrived"].numpy().sum())


class FastestK(Fastest):
    """With k given as such."""

    k: int

    def needed(self, n_workers: int) -> int:
        return self.k

    def check(self, n_workers: int) -> None:
        if self.k > n_workers:
            raise ExperimentError(f"policy.k = {self.k}: must be at most the {n_workers} workers at work")


class Cancelling(Fastest):
    """Whatever is under way at an update is given up, and begun anew with the new model."""

    cancels = True

    def wanted(self, server: Server) -> int:
        return self.needed(server.n) - self.held(server)


@policy("k_sync")
@dataclass(frozen=True)
class KSync(Cancelling, FastestK):
    """An update takes the first k gradients of a round, and the others are given up. Dutta et al. 2018.

    With n workers whose times are exponential of rate mu, an update takes (H_n - H_(n-k)) / mu on average.
    """

    k: PositiveInt


@policy("backup")
@dataclass(frozen=True)
class Backup(Cancelling):
    """Backup workers: an update takes the gradients of all but the `backups` slowest, which are given up. Chen 2016."""

    backups: NonNegativeInt = 1

    def needed(self, n_workers: int) -> int:
        return n_workers - self.backups

    def check(self, n_workers: int) -> None:
        if self.backups >= n_workers:
            raise ExperimentError(
                f"policy.backups = {self.backups}: must be fewer than the {n_workers} workers at work"
            )


@policy("k_async")
@dataclass(frozen=True)
class KAsync(FastestK):
    """An update takes the next k gradients, whatever they are of; the others go on with their work. Dutta et al. 2018.

    k = 1 is asgd.
    """

    k: PositiveInt
