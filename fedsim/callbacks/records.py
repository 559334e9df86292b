"""Callbacks that write the records and checkpoints of a run to its folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsim.callbacks.callback import Callback
from fedsim.callbacks.painter import Painter
from fedsim.engines import Engine, RunTask
from fedsim.records.checkpoints import CheckpointFolder, rounding_of
from fedsim.records.figures import draw_curve, draw_workers
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import RunFolder
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.runs.live_run import LiveRun
from fedsim.runs.result import Result
from fedsim.system.files import require_space
from fedsim.training.weights import weights_by_probability


class Recorder(Callback):
    """Callback that writes the records of a run to its folder.

    `metadata` is stored with the software versions and the metadata of the machine.
    """

    def __init__(self, run: LiveRun, folder: RunFolder, metadata: Mapping[str, Any], painter: Painter) -> None:
        self._run, self._folder, self._metadata, self._painter = run, folder, metadata, painter

    def on_start(self, run: LiveRun) -> None:
        metadata, experiment = run.metadata, run.experiment
        require_space(self._folder.path, metadata.record_bytes, "the folder of this run")
        self._folder.begin(experiment, run.history, **metadata.for_record(), **self._metadata)
        sampled, population = metadata.sampled_workers, experiment.workers
        self._folder.partition(metadata.label_counts, metadata.byzantine, sampled, population, metadata.worker_names)

    def on_round(self, record: RoundRecord) -> None:
        if tests := self._run.tests_after(record.round):
            self._folder.workers(tests)
        self._folder.round(record)

    def on_end(self, result: Result) -> None:
        folder, records = self._folder, result.experiment.records
        if result.stopped and not self._run.ended:
            folder.event("stopped", round=len(result.history), reason=result.stopped)
        folder.settle()
        if records.model:
            folder.model(result.model)
        drawings = {}
        if records.curve:
            drawings["curve"] = partial(draw_curve, result.history, result.experiment.name)
        if (tests := self._run.tests) and tests.workers:
            drawings["workers"] = partial(draw_workers, tests, result.experiment.name)
        for name, content in self._painter.files(drawings).items():
            folder.write(name, content)


class KeptUpdates(Callback):
    """Callback that stores the workers' updates in chosen rounds, for the command `fedsim replay`."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run

    def on_round(self, record: RoundRecord) -> None:
        run, wanted = self._run, self._run.experiment.records.updates
        if not run.recorded or not record.cohort or record.round not in wanted:
            return
        if run.experiment.in_rounds:
            updates = latest_updates(run.task, run.engine, record)
        else:
            updates = run.loop.take_combination()
        if run.folder and updates:
            run.folder.updates(record.round, updates)


def latest_updates(task: RunTask, engine: Engine, record: RoundRecord) -> dict[str, Tensor]:
    """Return the inputs of the aggregation rule in the latest round by name, such as the workers' updates [n, d].

    If the round aggregates gradients, the inputs are those of its last step, in which the workers with fewer samples
    may no longer take part. Ranks other than rank 0 return an empty dict.

    Args:
        task: description of the run.
        engine: engine that computes the run.
        record: record of the latest round.
    """
    gathered = engine.round_rows(record.cohort)
    if gathered is None:
        return {}
    (rows, losses), (context, last) = gathered, engine.run(SynchronousRounds.latest_aggregation, of="rounds")[0]
    byzantine, slots = task.byzantine.in_round(record.round), list(context.slots)
    updates = {
        "updates": rows[slots],
        "workers": torch.tensor(context.workers),
        "samples": torch.tensor(context.samples),
        "byzantine": torch.tensor([worker in byzantine for worker in context.workers]),
        "moment": torch.tensor(context.moment),
    }
    if last is not None:
        updates["last"] = torch.from_numpy(last)
    if task.experiment.rule.accepts("root"):
        updates["root"] = rows[-1]
    if task.experiment.rule.accepts("losses"):
        updates["losses"] = losses[slots]
    if task.experiment.weights == "inverse_probability":
        updates["cohort_weights"] = weights_by_probability(engine.shared, context.workers)
    return {name: tensor.cpu().clone() for name, tensor in updates.items()}


class Checkpoints(Callback):
    """Callback that writes checkpoints during a run. All ranks must use it."""

    def __init__(self, run: LiveRun, checkpoints: CheckpointFolder) -> None:
        self._run, self._checkpoints = run, checkpoints

    def on_start(self, run: LiveRun) -> None:
        if run.metadata.done and run.engine.broadcast(run.folder is not None and run.folder.rewritten):
            self._write(run.metadata.done)

    def on_round(self, record: RoundRecord) -> None:
        run, round = self._run, record.round
        if record.diverged is not None or not run.recorded:
            return
        last = round if run.stopped else run.experiment.rounds
        if run.engine.broadcast(self._checkpoints.due(round, last, paused=run.on_request)):
            self._write(round)

    def _write(self, round: int) -> None:
        """Write a checkpoint with the experiment, and hashes of records and data, so that changes are noticed."""
        run, metadata = self._run, dict[str, Any]()
        if run.folder:
            run.folder.settle()
            metadata = {"experiment": run.experiment.resolved(), "records": run.folder.digest}
            metadata["data"] = run.data_digests
        self._checkpoints.write(round, run.state, way=rounding_of(run.metadata.how), **metadata)
