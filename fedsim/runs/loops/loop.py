"""What the loops of all modes have in common."""

from __future__ import annotations

from typing import Protocol

from fedsim.core.snapshot import Snapshot
from fedsim.records.record import RoundRecord


class Loop(Protocol):
    """The rounds of a run, on an engine that has begun.

    A round depends on the rounds before through `state` alone: a loop that resumes from a state continues as the first
    loop would have, to the bit.
    """

    def run_round(self, round: int) -> RoundRecord:
        """Run one round, counted from 1; rounds are run in order."""

    def state(self) -> Snapshot:
        """The state that the next round depends on."""

    def resume(self, state: Snapshot) -> None:
        """Continue from the state of a loop of the same experiment."""

    def finish(self) -> None:
        """Do what is due after the last round."""
