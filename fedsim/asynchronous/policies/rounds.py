"""The synchronous loop under its name as a policy, so that it can stand beside the others in a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server import Server


@policy("sync")
@dataclass(frozen=True)
class Synchronous(Policy):
    """No asynchrony: round by round, as without a clock. On the clock, a round lasts as long as its slowest member.

    With sync = "gradients", every step does.
    """

    in_rounds = True

    def take(self, server: Server, arrival: Arrival) -> None:
        raise AssertionError("in rounds nothing arrives by itself")
