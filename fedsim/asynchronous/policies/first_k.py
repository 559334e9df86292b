"""Policies that step along the mean of the first k gradients: Chen et al. 2016, Dutta et al. 2018."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server_state import ServerState
from fedsim.clients import State
from fedsim.errors import ExperimentError


class FirstK(Policy):
    """A step along the mean of the first k gradients; a worker whose gradient is buffered waits for that step."""

    @abstractmethod
    def needed(self, n_workers: int) -> int:
        """Number of gradients of a step."""

    def start(self, server: ServerState) -> State:
        return {"arrived": torch.zeros(server.n, dtype=torch.int64)}

    def may_start(self, server: ServerState, slot: int) -> bool:
        return not server.policy_state["arrived"].numpy()[slot]

    def take(self, server: ServerState, arrival: Arrival) -> None:
        arrived = server.policy_state["arrived"].numpy()
        arrived[arrival.slot] = 1
        if self.buffered(server) == self.needed(server.n):
            slots = arrived.nonzero()[0].tolist()
            server.step(server.mean(slots))
            server.mix_buffers(slots, share=1.0)
            arrived[:] = 0

    def buffered(self, server: ServerState) -> int:
        return int(server.policy_state["arrived"].numpy().sum())

    def arrivals_needed(self, server: ServerState) -> int | None:
        return self.needed(server.n) - self.buffered(server) if self.cancels else None


@policy("k_async")
@dataclass(frozen=True)
class KAsync(FirstK):
    """K-async SGD: a step along the mean of the next k gradients; the other workers continue. Dutta et al. 2018.

    Args:
        k: gradients of a step; 1 is asgd.

    >>> KAsync(k=2).needed(n_workers=5)
    2
    """

    k: Annotated[PositiveInt, Field(examples=[2])]

    def needed(self, n_workers: int) -> int:
        return self.k

    def check(self, n_workers: int) -> None:
        if self.k > n_workers:
            raise ExperimentError(f"policy.k = {self.k}: must be at most {n_workers}, the workers at work")


@policy("k_sync")
@dataclass(frozen=True)
class KSync(KAsync):
    """K-sync SGD: a step along the mean of the first k gradients; it cancels the others. Dutta et al. 2018.

    With n workers whose times are exponential of rate mu, a step takes (H_n - H_(n-k)) / mu on average.

    Args:
        k: gradients of a step.

    >>> KSync(k=2).cancels, KAsync(k=2).cancels
    (True, False)
    """

    cancels = True


@policy("backup")
@dataclass(frozen=True)
class Backup(FirstK):
    """Backup workers: a step along the mean of all but the slowest gradients, which it cancels. Chen et al. 2016.

    Args:
        backups: number of workers whose gradients a step does not wait for.

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
                f"policy.backups = {self.backups}: must be less than {n_workers}, the workers at work"
            )
