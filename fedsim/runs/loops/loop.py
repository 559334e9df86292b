"""Base class of the loops over a run's rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from fedsim.core.snapshot import Snapshot
from fedsim.records.record import RoundRecord
from fedsim.records.worker_results import WorkerResults


class Loop(ABC):
    """Base class of the objects that run an experiment round by round.

    A run that is resumed from a saved state continues with bit-identical results, except in races.

    Attributes:
        tests: latest results of tests of individual workers; None if there are none.
    """

    tests: WorkerResults | None = None

    def prepare(self) -> None:  # noqa: B027  # may do nothing
        """Prepare the engine's processes. Called before the first round, and after processes were replaced."""

    @abstractmethod
    def run_round(self, round: int) -> RoundRecord:
        """Run one round, counted from 1, and return its record. Rounds must be run in order."""

    @abstractmethod
    def state(self) -> Snapshot:
        """Return a snapshot of everything that the next round needs."""

    @abstractmethod
    def resume(self, state: Snapshot) -> None:
        """Restore a snapshot that the method `state` returned for the same experiment."""

    def test_workers(self, round: int) -> WorkerResults | None:  # noqa: B027  # may do nothing
        """Test the models of individual workers after `round`. Returns None if the experiment has no such tests."""

    def take_combination(self) -> dict[str, Tensor]:
        """Return the inputs of the rule's last combination in a round of `records.updates`, only once; {} if none.

        Only asynchronous policies combine vectors.
        """
        return {}

    def finish(self) -> None:  # noqa: B027  # may do nothing
        """Do what remains after the last round. For example, a race writes its log."""
