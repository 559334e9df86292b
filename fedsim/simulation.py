"""The simulation itself. Read this first: everything else is a plug that takes rows and gives rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsim.asynchronous.pace import RoundClock
from fedsim.asynchronous.racing import simulate_race
from fedsim.asynchronous.simulation import simulate_on_clock
from fedsim.engines import Engine
from fedsim.engines import engine as engines
from fedsim.engines.spawn import SpawnEngine
from fedsim.experiment import Experiment
from fedsim.files import require_space
from fedsim.loading import load_experiment
from fedsim.preparation import Setting, finished_model, prepare
from fedsim.randomness import sample_cohort
from fedsim.records import RoundRecord, RunFolder
from fedsim.replay import kept_updates
from fedsim.report import draw_curve
from fedsim.scalarboard import ScalarBoard
from fedsim.stopwatch import Stopwatch
from fedsim.workshop import Workshop


def simulate(setting: Setting, engine: Engine) -> Iterator[RoundRecord]:
    """The rounds, one after another, on an engine that has begun."""
    experiment, schedule = setting.experiment, setting.schedule
    virtual = RoundClock.of(setting) if experiment.mode == "clock" else None
    for round in range(1, experiment.rounds + 1):
        cohort = sample_cohort(experiment.seed, round, experiment.workers, experiment.cohort_size).tolist()
        sync, clock = setting.task.sync_in(round), Stopwatch()
        with clock("pull_down"):
            engine.pull_down(cohort, round)
        if sync == "parameters":
            with clock("train"):
                engine.train(cohort, round)
            with clock("aggregate"):
                account = engine.aggregate(cohort, round)
        else:  # every step is a synchronisation, so the two cannot be told apart
            with clock("train"):
                account = engine.train_on_averaged_gradients(cohort, round)
        with clock("test"):
            test_loss, test_accuracy, attack_success = engine.test()
        sizes = [engine.memory.shards.size(worker) for worker in cohort]
        rows_sent = len(cohort) if sync == "parameters" else sum(map(schedule.steps_for, sizes))
        sent = rows_sent * setting.row_bytes + len(cohort) * setting.buffer_bytes
        samples = [schedule.samples_for(size) for size in sizes]
        if virtual:
            virtual.pass_round(cohort, sizes, in_step=sync == "gradients")
        yield RoundRecord(
            round=round,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            train_loss=engine.train_loss(samples),
            seconds=clock.seconds,
            cohort=cohort,
            coefficients=account.shares,
            excluded=account.excluded or [],
            attack_success=attack_success,
            bytes_up=sent,
            bytes_down=sent,
            samples=samples,
            virtual_seconds=virtual.now if virtual else None,
            asynchronous=None,
            race=None,
        )


def history_of(setting: Setting, engine: Engine, folder: RunFolder | None = None) -> Iterator[RoundRecord]:
    """The records of a run, in whatever mode it is; the log of a race goes to the folder, if there is one."""
    if isinstance(engine, SpawnEngine) and setting.experiment.mode == "race":
        return simulate_race(setting, engine, folder.race_log if folder else None)
    in_rounds = setting.experiment.policy.bind().in_rounds
    return simulate(setting, engine) if in_rounds else simulate_on_clock(setting, engine)


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
        WorkerError: a worker failed, or the process that ran it.
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
            require_space(folder.path, setting.record_bytes, "what this run keeps")
            folder.begin(experiment, **setting.facts())
            folder.partition(setting.label_counts, setting.byzantine, setting.looked_at, experiment.workers)
        if on_start:
            on_start(setting)
        for record in history_of(setting, engine, folder):
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
        model = finished_model(setting, engine)
        global_row = engine.memory.global_row.cpu().clone()
        if folder and experiment.records.model:  # first, since nothing else holds what it holds
            folder.model(model)
        if folder and experiment.records.curve:
            folder.curve(draw_curve(history, experiment.name))
    return Result(experiment, history, model, global_row, folder.path if folder else None)
