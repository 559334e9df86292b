"""The end of a run whose updates or global model are no longer finite (`aggregate.nonfinite = "stop"`)."""

from __future__ import annotations

from fedsim.config.experiment import Experiment
from fedsim.engines import Engine
from fedsim.errors import DivergedError
from fedsim.records.record import RoundRecord
from fedsim.runs.loops.loop import Loop


class LastFiniteModel:
    """Runs rounds; a round that diverges has the tests of the global model before it, if the experiment asks for that.

    Cost: a copy of the global row and buffers for each round of such an experiment, on their device.
    """

    def __init__(self, experiment: Experiment, engine: Engine) -> None:
        self._stops, self._engine = experiment.aggregate.nonfinite == "stop", engine

    def run_round(self, loop: Loop, round: int) -> RoundRecord:
        """Run one round. Raises DivergedError if it diverges and the experiment does not ask for an end of the run."""
        if not self._stops:
            return loop.run_round(round)
        engine, shared = self._engine, self._engine.shared
        before = shared.global_row.clone(), shared.global_buffers.clone()
        try:
            return loop.run_round(round)
        except DivergedError as error:
            if not engine.at_work:  # a pool closes if one of its processes raises an error
                engine.replace_processes()
            shared.global_row.copy_(before[0])
            shared.global_buffers.copy_(before[1])
            return RoundRecord(round=round, diverged=error.what, **engine.test(round).fields())
