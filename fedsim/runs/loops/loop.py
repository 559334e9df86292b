"""Interface of the loops over a run's rounds, and the choice of the loop for an experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedsim.config.experiment import Experiment
from fedsim.core.snapshot import Snapshot
from fedsim.engines import Engine, RunTask, SpawnEngine
from fedsim.records.record import RoundRecord
from fedsim.records.worker_results import WorkerResults
from fedsim.runs.loops.clock_loop import ClockLoop
from fedsim.runs.loops.race_loop import RaceLoop
from fedsim.runs.loops.synchronous import SynchronousLoop


class Loop(Protocol):
    """Interface of the objects that run an experiment round by round.

    A run that is resumed from a saved state continues with bit-identical results, except in races.
    """

    def prepare(self) -> None:
        """Prepare the engine's processes. Called before the first round, and after processes were replaced."""

    def run_round(self, round: int) -> RoundRecord:
        """Run one round, counted from 1, and return its record. Rounds must be run in order."""

    def state(self) -> Snapshot:
        """Return a snapshot of everything that the next round needs."""

    def resume(self, state: Snapshot) -> None:
        """Restore a snapshot that the method `state` returned for the same experiment."""

    def test_workers(self, round: int) -> dict[str, float]:
        """Test the models of individual workers after `round`, and return the metrics by name.

        The dict is empty if the experiment has no such tests.
        """

    def finish(self) -> None:
        """Do what remains after the last round. For example, a race writes its log."""


def loop_of(
    experiment: Experiment,
    task: RunTask,
    engine: Engine,
    keep_log: Callable[[bytes], object] | None = None,
    keep_results: Callable[[WorkerResults], object] | None = None,
) -> Loop:
    """Return the object that runs the rounds of an experiment.

    Args:
        experiment: experiment to run.
        task: description of the run.
        engine: engine that is ready for the first round.
        keep_log: function that receives the contents of a race's log file; None to keep no log.
        keep_results: function that receives the results of tests of individual workers; None to keep none.
    """
    if isinstance(engine, SpawnEngine) and experiment.mode == "race":
        return RaceLoop(experiment, task, engine, keep_log)
    return SynchronousLoop(task, engine, keep_results) if experiment.in_rounds else ClockLoop(experiment, task, engine)
