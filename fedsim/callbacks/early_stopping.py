"""Callbacks that end a run early: because of the table `stop`, or because the run diverges.

These callbacks test the models of single workers before the run ends.
"""

from __future__ import annotations

from dataclasses import replace

from fedsim.callbacks.callback import Callback
from fedsim.clients.adapters import TrainFunction
from fedsim.records.early_stopping import EarlyStopping, divergence
from fedsim.records.record import RoundRecord
from fedsim.runs.live_run import LiveRun


class StopEarly(Callback):
    """Callback that ends a run early if it diverges or if a criterion of the settings `stop` is met."""

    def __init__(self, run: LiveRun) -> None:
        self._run, self._stopping = run, EarlyStopping(*run.experiment.stopping)

    def on_start(self, run: LiveRun) -> None:
        for record in run.history:
            self._stopping.update(record)

    def on_round(self, record: RoundRecord) -> str | None:
        run, experiment, reason = self._run, self._run.experiment, None
        if experiment.stop.active:
            tested = run.tests_after(record.round) or not experiment.data.local_test_fraction
            if record.cohort and tested and not self._stopping.has_best:
                by_function = isinstance(experiment.local.component, TrainFunction)
                self._stopping.require_number(record, by_function=by_function)
            reason = run.engine.broadcast(self._stopping.update(record))
        return divergence(record) or reason


class FinalWorkerTests(Callback):
    """Callback that tests individual workers after the last round of a run, unless this round tests them anyway.

    Early stopping does not use these tests. They are removed from the records if the run is continued for more rounds,
    because a longer run would not have them.
    """

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def on_start(self, run: LiveRun) -> None:
        """Test individual workers if a resumed run has already ended. Otherwise, remove the table of earlier tests."""
        if not run.metadata.done or not self._is_extra(run.history[-1]):
            return
        if run.stopped or run.metadata.done == run.experiment.rounds:
            self._test(run.history[-1])
            if run.folder and (tests := run.tests_after(run.metadata.done)):
                run.folder.workers(tests)
        elif run.folder:
            run.folder.forget_workers(run.metadata.done)

    def on_round(self, record: RoundRecord) -> None:
        ends = self._run.stopped or record.round == self._run.experiment.rounds
        if ends and self._is_extra(record):
            self._test(record)

    def _is_extra(self, record: RoundRecord) -> bool:
        """Whether a test after this round would not take place in a longer run."""
        return record.round % self._run.experiment.worker_evaluation.every > 0 or record.diverged is not None

    def _test(self, record: RoundRecord) -> None:
        if tested := self._run.test_workers(record.round):
            metrics = record.metrics | tested.metrics()
            self._run.history[-1] = replace(record, **tested.means(), metrics=metrics)
