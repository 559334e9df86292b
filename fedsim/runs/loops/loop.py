"""What the loops of all modes have in common, and which of them an experiment runs in."""

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
    """The rounds of a run, on an engine that has begun.

    A round depends on the rounds before through `state` alone: a loop that resumes from a state continues as the first
    loop would have, to the bit.
    """

    def run_round(self, round: int) -> RoundRecord:
        """Run one round, counted from 1; rounds are run in order."""

    def state(self) -> Snapshot:
        """Return the state that the next round depends on."""

    def resume(self, state: Snapshot) -> None:
        """Continue from the state of a loop of the same experiment."""

    def test_workers(self, round: int) -> dict[str, float]:
        """Test the models of single workers after a round, if workers are evaluated; figures of the results."""

    def finish(self) -> None:
        """Do what is due after the last round."""


def loop_of(
    experiment: Experiment,
    task: RunTask,
    engine: Engine,
    keep_log: Callable[[bytes], object] | None = None,
    keep_results: Callable[[WorkerResults], object] | None = None,
) -> Loop:
    """Return the loop of a run.

    Args:
        keep_log: is given the log of a race.
        keep_results: is given the tests of single workers.
    """
    if isinstance(engine, SpawnEngine) and experiment.mode == "race":
        return RaceLoop(experiment, task, engine, keep_log)
    return SynchronousLoop(task, engine, keep_results) if experiment.in_rounds else ClockLoop(experiment, task, engine)
