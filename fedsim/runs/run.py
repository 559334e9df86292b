"""Running one experiment: `fedsim.run`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.callbacks.callback import Callback, CurrentRun, FunctionCallback, UserCallbacks
from fedsim.callbacks.checkpoints import Checkpoints
from fedsim.callbacks.early_stopping import FinalWorkerTests, StopEarly
from fedsim.callbacks.loggers import Loggers
from fedsim.callbacks.notebook import display_of
from fedsim.callbacks.painter import Painter
from fedsim.callbacks.records import KeptUpdates, Recorder
from fedsim.config.experiment import Experiment
from fedsim.config.load import load_experiment
from fedsim.config.validation import warnings_about, warnings_about_objects
from fedsim.core.randomness import sole_use_of_generators
from fedsim.data.sources import data_loaded_once
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, FedsimError, SettingWarning
from fedsim.records.early_stopping import stop_reason
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import RunFolder
from fedsim.records.worker_results import newest_table, read_csv
from fedsim.runs.facts import RunFacts
from fedsim.runs.launch import under_launcher, warn_of_copies
from fedsim.runs.result import Result
from fedsim.runs.resume import ResumeState
from fedsim.runs.rounds import prepared_rounds
from fedsim.runs.session import Session
from fedsim.system.limits import without_inner_frames


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    on_setup: Callable[[str], object] | None = None,
    on_start: Callable[[RunFacts], object] | None = None,
    on_round: Callable[[RoundRecord], object] | None = None,
    session: Session | None = None,
    progress: bool | None = None,
    allow_imports: bool = False,
    **changes: Any,
) -> Result:
    """Run an experiment, and return its result.

        fedsim.run(rounds=3, model="2nn", local={"lr": 0.1})
        fedsim.run("experiment.toml", "folder", rounds=3)

    Args:
        experiment: Experiment, dict of settings (keys may be dotted: {"local.lr": 0.1}), path of a TOML or YAML file,
            name of an experiment that comes with fedsim, or None for the default experiment. Wherever a setting names a
            component, it may also be the object itself, such as a model class; see docs/how-to/own-components.md.
        out: new or empty folder for the records; None to write no records.
        resume: whether to continue the run of this experiment in `out`: an interrupted run, or a finished run for more
            rounds. The results are bit-identical to those of an uninterrupted run, except in races. If `out` is new,
            the run starts from round 1.
        callbacks: objects whose methods are called before the first round, after each round, and at the end; see
            `fedsim.Callback`.
        on_setup: function that is called with the name of each step before the first round, such as "loading the data
            set mnist".
        on_start: function that is called with the `RunFacts` before the first round.
        on_round: function that is called with each round's `RoundRecord`, after the record is written. If the function
            raises `StopRun`, the run ends after this round. Any other exception ends the run without a result. With
            several ranks, only rank 0 decides.
        session: session that shares its engine and data with other runs; None for an engine and data of this run only.
        progress: whether to print a line for each round, as the command line does. None shows a progress bar and a
            curve in a notebook, and nothing elsewhere.
        allow_imports: whether an experiment file may use any importable object; see `load_experiment`.
        changes: settings of the experiment to change. A dict changes only the keys that it contains.

    Raises:
        ExperimentError: the experiment is invalid, cannot be run on this machine, or another thread runs an experiment.
        DataError: the data is missing or invalid.
        RecordError: the folder has other content, or cannot be written.
        WorkerError: a worker failed, or processes were lost more often than `process_retries` allows.
    """
    users = UserCallbacks([FunctionCallback(on_setup, on_start, on_round), *callbacks])
    try:
        with sole_use_of_generators(for_run=True), data_loaded_once(), contextlib.ExitStack() as stack:
            experiment = under_launcher(load_experiment(experiment, allow_imports=allow_imports, **changes))
            warn_of_copies(experiment.engine)
            current, callbacks = _prepared(stack, experiment, out, resume, users, session, progress)
            lines = warnings_about(experiment)
            if out is not None and experiment.checkpoint.every != 0:
                lines += warnings_about_objects(experiment, resumed=current.facts.done > 0)
            for line in lines if _is_main(experiment) else ():
                warnings.warn(line, SettingWarning, stacklevel=2)
            for callback in callbacks:
                callback.on_start(current)
            for round in range(len(current.history) + 1, experiment.rounds + 1):
                if current.stopped:
                    break
                current.history.append(current.rounds.run_round(round))
                for callback in callbacks:
                    reason = callback.on_round(current.history[-1])  # a callback may have replaced the record
                    current.stopped = current.stopped or reason
            result = _result(current)
            for callback in callbacks:
                callback.on_end(result)
            return result
    except (FedsimError, KeyboardInterrupt) as error:
        raise without_inner_frames(error) from error.__cause__


def _prepared(
    stack: contextlib.ExitStack,
    experiment: Experiment,
    out: str | Path | None,
    resume: bool,
    users: UserCallbacks,
    session: Session | None,
    progress: bool | None,
) -> tuple[CurrentRun, list[Callback]]:
    """Prepare a run for its next round. Returns the run and its callbacks.

    Args:
        stack: receives everything that must be closed at the end of the run.
        experiment: experiment to run.
        out: folder for the records; None to write no records.
        resume: whether to continue the run in `out`.
        session: session with the engine and data to use; None for an engine and data of this run only.
        progress: whether to print a line for each round; None shows a progress bar in notebooks only.
        users: callbacks that the user has passed to `run`.
    """
    if resume and out is None:
        raise ExperimentError("resume = True: needs `out`; set it to the folder of the run to resume")
    is_main, path = _is_main(experiment), None if out is None else Path(out)
    display = display_of(experiment, path, progress if is_main else False)
    stack.enter_context(display)
    stack.enter_context(engines.get(experiment.engine).target.joined(experiment.resolved()))
    folder = stack.enter_context(RunFolder(path, resume=resume)) if path is not None and is_main else None
    painter = stack.enter_context(Painter() if folder else contextlib.nullcontext(Painter()))
    past = ResumeState(folder, experiment)
    display.announce()

    def on_setup(step: str) -> None:
        display.on_setup(step)
        users.on_setup(step)

    current = CurrentRun(
        experiment,
        stack.enter_context(
            prepared_rounds(
                past.with_earlier_width(experiment),
                session or stack.enter_context(Session()),
                folder.event if folder else None,
                on_setup,
                scratch=str(folder.path) if folder else None,
                keep_log=folder.race_log if folder else None,
            )
        ),
        folder=folder,
        recorded=path is not None,
        ended=stop_reason(past.records, experiment.stop),  # an earlier session may have ended the run
    )
    rounds = current.rounds
    done = past.restore(rounds) if resume else 0
    rounds.facts = replace(rounds.facts, done=done)
    current.history = past.records
    current.stopped = stop_reason(past.records, experiment.stop)
    if folder and (table := newest_table(folder.path, done)):
        rounds.tests = read_csv(table)
    callbacks: list[Callback] = [StopEarly(current), KeptUpdates(current), FinalWorkerTests(current)]
    loggers = stack.enter_context(Loggers(experiment, folder, done)) if is_main else None
    if folder and loggers:
        callbacks += [Recorder(current, folder, loggers.facts, painter)]
    if loggers:
        callbacks += [loggers]
    return current, [*callbacks, display, users, Checkpoints(current, past.checkpoints)]


def _is_main(experiment: Experiment) -> bool:
    """Whether this process writes the records of the run."""
    return engines.get(experiment.engine).target.is_main()


def _result(run: CurrentRun) -> Result:
    run.rounds.loop.finish()
    folder = run.folder.path if run.folder else None
    return Result(run.experiment, run.history, run.model(), run.rounds.global_row, folder, run.stopped)
