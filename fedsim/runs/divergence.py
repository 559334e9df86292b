"""The end of a run whose updates or global model are no longer finite (`aggregate.nonfinite = "stop"`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedsim.config.experiment import Experiment
from fedsim.engines import Engine, TaskSpec
from fedsim.engines.evaluation import EvaluationResult
from fedsim.engines.executor import Executor
from fedsim.errors import DivergedError
from fedsim.records.record import RoundRecord
from fedsim.runs.loops.loop import Loop


def rounds_of(loop: Loop, experiment: Experiment, task: TaskSpec, engine: Engine) -> Callable[[int], RoundRecord]:
    """The function that runs a round.

    If the experiment asks for it, a round that diverges has the tests of the global model before it; otherwise it
    raises DivergedError. Cost: a copy of the global row and buffers for each round of such an experiment, on their
    device.
    """
    return partial(_round_or_end, loop, task, engine) if experiment.aggregate.nonfinite == "stop" else loop.run_round


def _round_or_end(loop: Loop, task: TaskSpec, engine: Engine, round: int) -> RoundRecord:
    shared = engine.shared
    before = shared.global_row.clone(), shared.global_buffers.clone()
    try:
        return loop.run_round(round)
    except DivergedError as error:
        if not engine.backend.at_work:  # a pool closes if one of its processes raises an error
            engine.backend.replace_processes()
        shared.global_row.copy_(before[0])
        shared.global_buffers.copy_(before[1])
        engine.backend.run(Executor.test, round)
        return RoundRecord(round=round, diverged=error.what, **EvaluationResult.of(task, shared).fields())
