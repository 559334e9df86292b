"""The stored updates of some rounds (`records.updates`), for `fedsim replay`."""

from __future__ import annotations

from fedsim.callbacks.callback import Callback, CurrentRun
from fedsim.records.record import RoundRecord


class KeptUpdates(Callback):
    """Writes the inputs of the rule; all ranks take part."""

    def __init__(self, run: CurrentRun) -> None:
        self._run = run

    def on_round(self, record: RoundRecord) -> None:
        run = self._run
        if run.recorded and record.cohort and record.round in run.experiment.records.updates:
            updates = run.rounds.kept_updates(record)
            if run.folder:
                run.folder.updates(record.round, updates)
