"""Running one experiment: `fedsim.run`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim.callbacks.callback import Callback, FunctionCallback, UserCallbacks
from fedsim.callbacks.early_stopping import FinalWorkerTests, StopEarly
from fedsim.callbacks.loggers import Loggers
from fedsim.callbacks.notebook import display_of
from fedsim.callbacks.painter import Painter
from fedsim.callbacks.records import Checkpoints, KeptUpdates, Recorder
from fedsim.config.experiment import Experiment, ExperimentKeys, Unpack
from fedsim.config.load import load_experiment, with_data
from fedsim.config.validation import warnings_about, warnings_about_objects
from fedsim.core.randomness import sole_use_of_generators
from fedsim.data.sources import data_loaded_once
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, FedsimError, SettingWarning, show
from fedsim.records.early_stopping import stop_reason
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import RunFolder
from fedsim.records.worker_results import newest_table, read_csv
from fedsim.runs.launch import under_launcher, warn_of_copies
from fedsim.runs.live_run import LiveRun
from fedsim.runs.metadata import RunMetadata
from fedsim.runs.result import Result
from fedsim.runs.resume import ResumeState
from fedsim.runs.session import Session
from fedsim.runs.setup import begun
from fedsim.system.files import user_path
from fedsim.system.limits import without_inner_frames


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    on_setup: Callable[[str], object] | None = None,
    on_start: Callable[[RunMetadata], object] | None = None,
    on_round: Callable[[RoundRecord], object] | None = None,
    session: Session | None = None,
    progress: bool | None = None,
    allow_imports: bool = False,
    **changes: Unpack[ExperimentKeys],
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
            the run starts from round 1. Other data is refused. It is compared by hashes, of tensors with more than
            256 MiB by those of every k-th row.
        callbacks: objects whose methods are called before the first round, after each round, and at the end; see
            `fedsim.Callback`.
        on_setup: function that is called with the name of each step before the first round, such as "loading the data
            set mnist".
        on_start: function that is called with the `RunMetadata` before the first round.
        on_round: function that is called with each round's `RoundRecord`, after the record is written. If the function
            raises `StopRun`, the run ends after this round. Any other exception ends the run without a result. With
            several ranks, only rank 0 decides.
        session: session that shares its engine and data with other runs; None for an engine and data of this run only.
        progress: whether to print a line for each round, as the command line does. None shows a progress bar and a
            curve in a notebook, and nothing elsewhere.
        allow_imports: whether an experiment file may use any importable object; see `load_experiment`.
        changes: settings of the experiment to change, which `fedsim.components("keys")` shows. A dict changes only the
            keys that it contains.

    Raises:
        ExperimentError: the experiment is invalid, cannot be run on this machine, or another thread runs an experiment.
        DataError: the data is missing or invalid.
        RecordError: the folder has other content, or cannot be written.
        WorkerError: a worker failed, or processes were lost more often than `max_restarts` allows.
    """
    users = UserCallbacks(FunctionCallback(on_setup, on_start, on_round), callbacks)
    try:
        with sole_use_of_generators(for_run=True), data_loaded_once(), contextlib.ExitStack() as stack:
            experiment = with_data(under_launcher(load_experiment(experiment, allow_imports=allow_imports, **changes)))
            warn_of_copies(experiment.engine)
            live, callbacks = stack.enter_context(live_run(experiment, out, resume, users, session, progress))
            lines = warnings_about(live.experiment)
            if live.recorded and experiment.checkpoint.every != 0:
                lines += warnings_about_objects(live.experiment, resumed=live.metadata.done > 0)
            for line in lines if _is_main(experiment) else ():
                warnings.warn(line, SettingWarning, stacklevel=2)
            for callback in callbacks:
                callback.on_start(live)
            for round in range(len(live.history) + 1, experiment.rounds + 1):
                if live.stopped:
                    break
                live.history.append(live.run_round(round))
                for callback in callbacks:
                    reason = callback.on_round(live.history[-1])  # a callback may have replaced the record
                    live.stopped = live.stopped or reason
            result = live.result()
            for callback in callbacks:
                callback.on_end(result)
            return result
    except (FedsimError, KeyboardInterrupt) as error:
        raise without_inner_frames(error) from error.__cause__


@contextlib.contextmanager
def live_run(
    experiment: Experiment,
    out: str | Path | None,
    resume: bool,
    users: UserCallbacks,
    session: Session | None,
    progress: bool | None,
) -> Iterator[tuple[LiveRun, list[Callback]]]:
    """Return a context manager that prepares a run for its next round, and yields the run and its callbacks.

    Args:
        experiment: experiment to run.
        out: folder for the records; None to write no records.
        resume: whether to continue the run in `out`.
        users: callbacks that the user has passed to `run`.
        session: session with the engine and data to use; None for an engine and data of this run only.
        progress: whether to print a line for each round; None shows a progress bar in notebooks only.
    """
    if not isinstance(out, (str, os.PathLike, type(None))):
        raise ExperimentError(
            f"out = {show(out)}: must be the path of a folder; pass settings as one dict, and a function as "
            "on_round=..."
        )
    if resume and out is None:
        raise ExperimentError("resume = True: needs `out`; set it to the folder of the run to resume")
    is_main, path = _is_main(experiment), None if out is None else user_path(out)
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(display_of(experiment, path, progress if is_main else False))
        stack.enter_context(engines.get(experiment.engine).target.joined(experiment.resolved()))
        folder = stack.enter_context(RunFolder(path, resume=resume)) if path is not None and is_main else None
        painter = Painter(experiment.records.figures if folder else [], display.on_drawing)
        if experiment.records.curve:
            stack.enter_context(painter)
        past = ResumeState(folder, experiment)
        experiment = past.experiment
        display.announce()

        def on_setup(step: str) -> None:
            display.on_setup(step)
            users.on_setup(step)

        session = session or stack.enter_context(Session())
        task, engine = stack.enter_context(begun(past.as_before(), session, folder, on_setup))
        run = LiveRun(experiment, task, engine, folder, recorded=out is not None)
        stack.callback(run.release)
        run.ended = stop_reason(past.records, *experiment.stopping)  # an earlier session may have ended the run
        done = past.restore(run) if resume else 0
        run.metadata, run.history = replace(run.metadata, done=done), past.records
        run.stopped = stop_reason(past.records, *experiment.stopping)
        if folder and (table := newest_table(folder.path, done)):
            run.loop.tests = read_csv(table)
        loggers = [stack.enter_context(Loggers(experiment, folder, done))] if is_main else []
        recorder = [Recorder(run, folder, loggers[0].metadata, painter)] if folder else []
        first, last = [StopEarly(run), KeptUpdates(run), FinalWorkerTests(run)], Checkpoints(run, past.checkpoints)
        yield run, [*first, *recorder, *loggers, display, users, last]


def _is_main(experiment: Experiment) -> bool:
    """Whether this process writes the records of the run."""
    return engines.get(experiment.engine).target.is_main()
