"""A run, from the description of an experiment to its result and its records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsim.engines import engine as engines
from fedsim.experiment import Experiment
from fedsim.loading import load_experiment
from fedsim.preparation import Setting, finished_model, prepare
from fedsim.records import RoundRecord, RunFolder
from fedsim.recovery import recovering
from fedsim.replay import kept_updates
from fedsim.report import draw_curve
from fedsim.scalarboard import ScalarBoard
from fedsim.simulation import loop_of
from fedsim.workshop import Workshop


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        experiment: as resolved.
        history: one record per round.
        model: the global model, on the CPU, in evaluation mode.
        global_row: its parameters as one row [d], on the CPU.
        folder: the run folder, if one was asked for.
    """

    experiment: Experiment
    history: list[RoundRecord]
    model: nn.Module
    global_row: Tensor
    folder: Path | None

    @property
    def test_accuracy(self) -> float:
        """Accuracy after the last round."""
        return self.history[-1]["test_accuracy"]


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    on_start: Callable[[Setting], object] | None = None,
    on_round: Callable[[RoundRecord], object] | None = None,
    workshop: Workshop | None = None,
) -> Result:
    """Run an experiment.

    Args:
        experiment: an Experiment, nested tables, the path of a TOML file, or None for the default experiment.
        out: a new or empty folder for the records; none are kept where it is left out.
        on_start, on_round: called with the Setting before the first round, and with each round's record after it.
        workshop: what this run shares with those before and after it; one of its own where it is left out.

    Raises:
        ExperimentError: the experiment cannot be run as described.
        DataError: its data is missing.
        RecordError: the folder holds something already, or cannot be written.
        WorkerError: a worker failed; or its process was lost, more often than the experiment bears.
    """
    experiment = load_experiment(experiment)
    history: list[RoundRecord] = []
    host = engines.get(experiment.engine).target
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.among_peers(experiment.resolved()))
        folder = stack.enter_context(RunFolder(Path(out))) if out is not None and host.leads() else None
        board = stack.enter_context(ScalarBoard(folder.path)) if folder and experiment.records.tensorboard else None
        workshop = workshop or stack.enter_context(Workshop())
        setting, engine = stack.enter_context(prepare(experiment, workshop))
        if folder:
            folder.begin(experiment, **setting.facts())
            folder.partition(setting.label_counts, setting.byzantine, setting.looked_at, experiment.workers)
        if on_start:
            on_start(setting)
        loop = loop_of(setting, engine, folder.race_log if folder else None)
        loop = recovering(loop, setting, engine, folder.event if folder else None)
        for round in range(1, experiment.rounds + 1):
            record = loop.play(round)
            history.append(record)
            kept = None
            if out is not None and record["round"] in experiment.records.updates:
                kept = kept_updates(setting, engine, record)  # which all ranks have a part in, if there are several
            if folder:
                if kept:
                    folder.updates(record["round"], kept)
                folder.round(record)
            if board:
                board.round(record)
            if on_round:
                on_round(record)
        loop.finish()
        model = finished_model(setting, engine)
        global_row = engine.memory.global_row.cpu().clone()
        if folder and experiment.records.curve:
            folder.curve(draw_curve(history, experiment.name))
        if folder and experiment.records.model:
            folder.model(model)
    return Result(experiment, history, model, global_row, folder.path if folder else None)
