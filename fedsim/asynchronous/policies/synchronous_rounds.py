"""The synchronous loop under the name of a policy, so that it can be compared with asynchronous ones."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server_state import ServerState


@policy("sync")
@dataclass(frozen=True)
class Synchronous(Policy):
    """No asynchrony: the synchronous loop. On the clock, a round takes as long as its slowest worker.

    With `sync = "gradients"`, each step takes as long as its slowest worker.

    >>> Synchronous().in_rounds
    True
    """

    in_rounds = True

    def take(self, server: ServerState, arrival: Arrival) -> None:
        raise AssertionError("the synchronous loop has no arrivals")
