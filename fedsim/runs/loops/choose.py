"""Which loop an experiment runs in."""

from __future__ import annotations

from collections.abc import Callable

from fedsim.engines import Engine, SpawnEngine
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.runs.loops.clock_loop import ClockLoop
from fedsim.runs.loops.loop import Loop
from fedsim.runs.loops.race_loop import RaceLoop
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import PreparedRun


def loop_of(
    prepared: PreparedRun,
    engine: Engine,
    keep_log: Callable[[bytes], object] | None = None,
    keep_results: Callable[[WorkerResults], object] | None = None,
) -> Loop:
    """The loop of a run.

    Args:
        keep_log: is given the log of a race.
        keep_results: is given the tests of single workers.
    """
    if isinstance(engine, SpawnEngine) and prepared.experiment.mode == "race":
        return RaceLoop(prepared, engine, keep_log)
    in_rounds = prepared.experiment.policy.bind().in_rounds
    return SynchronousLoop(prepared, engine, keep_results) if in_rounds else ClockLoop(prepared, engine)
