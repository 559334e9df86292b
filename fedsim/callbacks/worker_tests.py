"""The tests of single workers after the round with which a run ends early."""

from __future__ import annotations

from dataclasses import replace

from fedsim.callbacks.callback import Callback, CurrentRun
from fedsim.records.record import RoundRecord


class FinalWorkerTests(Callback):
    """Adds the tests to the last record if the run ends before the round in which they are due."""

    def __init__(self, run: CurrentRun) -> None:
        self._run = run

    def on_start(self, run: CurrentRun) -> None:
        """Test the workers of a resumed run that ends at once, because `stop` has changed."""
        if run.stopped and not any(name.startswith("global_worker_") for name in run.history[-1].metrics):
            self._test(run.history[-1])
            if run.folder and (tests := run.rounds.tests_after(run.history[-1].round)):
                run.folder.workers(tests)

    def on_round(self, record: RoundRecord) -> None:
        if self._run.stopped and not self._run.rounds.tests_after(record.round):
            self._test(record)

    def _test(self, record: RoundRecord) -> None:
        figures = self._run.rounds.test_workers(record.round)
        self._run.history[-1] = replace(record, metrics=record.metrics | figures)
