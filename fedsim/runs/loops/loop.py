"""Interface of the loops over a run's rounds, and the choice of the loop for an experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedsim.config.experiment import Experiment
from fedsim.core.snapshot import Snapshot
from fedsim.engines import Engine, RunTask, SpawnEngine
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.records.record import RoundRecord
from fedsim.runs.loops.clock_loop import ClockLoop
from fedsim.runs.loops.race_loop import RaceLoop
from fedsim.runs.loops.synchronous import SynchronousLoop


class Loop(Protocol):
    """Interface of loops, which run the rounds of a run on an engine that has begun the run's task.

    A round depends on earlier rounds only through `state`. A loop that resumes from a state continues with
    bit-identical results. Races are an exception, because they are not reproducible.
    """

    def run_round(self, round: int) -> RoundRecord:
        """Run one round, and return its record. Rounds are counted from 1 and must be run in order."""

    def state(self) -> Snapshot:
        """Return a snapshot of all state that the next round depends on."""

    def resume(self, state: Snapshot) -> None:
        """Restore a snapshot that the method `state` of a loop of the same experiment has returned."""

    def test_workers(self, round: int) -> dict[str, float]:
        """Test the models of single workers after `round`, and return the metrics by name.

        Return an empty dict if the experiment has no such tests.
        """

    def finish(self) -> None:
        """Complete the run after its last round. For example, a race writes its log."""


def loop_of(
    experiment: Experiment,
    task: RunTask,
    engine: Engine,
    keep_log: Callable[[bytes], object] | None = None,
    keep_results: Callable[[WorkerResults], object] | None = None,
) -> Loop:
    """Return the loop that runs the rounds of an experiment, according to its mode.

    Args:
        experiment: experiment to run.
        task: task of the run.
        engine: engine that has begun the task.
        keep_log: function that is called with the log of a race, as the content of a file; None to keep no log.
        keep_results: function that is called with the results of tests of single workers; None to keep none.
    """
    if isinstance(engine, SpawnEngine) and experiment.mode == "race":
        return RaceLoop(experiment, task, engine, keep_log)
    return SynchronousLoop(task, engine, keep_results) if experiment.in_rounds else ClockLoop(experiment, task, engine)
