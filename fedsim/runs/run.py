"""Running one experiment: `fedsim.run`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedsim.clients.train_function import TrainFunction
from fedsim.config.experiment import Experiment
from fedsim.config.load import load_experiment
from fedsim.config.validation import warnings_about
from fedsim.core.plotting import encode
from fedsim.engines import engine as engines
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.errors import ExperimentError, SettingWarning, StopRun, plural
from fedsim.records.early_stopping import EarlyStopping, divergence, stop_reason
from fedsim.records.formatting import score_text
from fedsim.records.numbers import round_rows, to_frame
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import RunFolder
from fedsim.records.worker_results import draw_workers, newest_table, read_csv
from fedsim.runs.divergence import rounds_of
from fedsim.runs.loops.loop import Loop, loop_of
from fedsim.runs.notebook import NotebookDisplay, display_of
from fedsim.runs.recovery import recovering
from fedsim.runs.result_html import result_html
from fedsim.runs.resume import ResumeState, choices_of
from fedsim.runs.rule_replay import kept_updates
from fedsim.runs.run_loggers import ID, RunLoggers, logged_run
from fedsim.runs.session import Session
from fedsim.runs.setup import PreparedRun, finished_model, prepare
from fedsim.runs.terminal import Display
from fedsim.runs.text_table import draw_curve
from fedsim.system.files import require_space

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        experiment: the resolved experiment.
        history: one record per round.
        model: the global model, on the CPU, in evaluation mode.
        global_row: its parameters as one row [d], on the CPU.
        folder: the run folder; None without one.
        stopped: why the run ended before its last round (the table `stop`, `StopRun`, or
            divergence); None if it did not.

    >>> result = run(rounds=1, workers=2, model="logistic", engine="serial", local={"steps": 1})
    >>> len(result.history), result.global_row.shape
    (1, torch.Size([7850]))
    """

    experiment: Experiment
    history: list[RoundRecord]
    model: nn.Module
    global_row: Tensor
    folder: Path | None
    stopped: str | None = None

    @property
    def test_accuracy(self) -> float | None:
        """Accuracy after the last round; None of a task without accuracy."""
        return self.history[-1].test_accuracy

    @property
    def test_loss(self) -> float | None:
        """Loss after the last round."""
        return self.history[-1].test_loss

    def to_dataframe(self) -> DataFrame:
        """The numbers of each round as a pandas data frame with one row per round.

        The columns are `round`, `test_accuracy`, `test_loss`, `train_loss`, and the other numbers that the records
        hold, under the names that `stop.metric` and `--by` use: `metrics.top_k`, `seconds.train`, `bytes_up`. NaN
        stands for a number that a round does not have. Raises MissingPackageError without pandas.
        """
        return to_frame(round_rows(self.history), "Result.to_dataframe")

    def __repr__(self) -> str:
        seconds = sum(record.total_seconds or 0.0 for record in self.history)
        where = f", in {self.folder}" if self.folder else ""
        return (
            f"Result({self.experiment.name}: {score_text(self.history[-1])} after "
            f"{plural(len(self.history), 'round')} in {seconds:.1f} s{where})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return result_html(self)


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    on_setup: Callable[[str], object] | None = None,
    on_start: Callable[[PreparedRun], object] | None = None,
    on_round: Callable[[RoundRecord], object] | None = None,
    session: Session | None = None,
    progress: bool | None = None,
    allow_imports: bool = False,
    **changes: Any,
) -> Result:
    """Run an experiment.

        fedsim.run(rounds=3, model="2nn", local={"lr": 0.1})
        fedsim.run("experiment.toml", "folder", rounds=3)

    Args:
        experiment: an Experiment, tables (keys may be dotted: {"local.lr": 0.1}), the path of a TOML or YAML file, the
            name of an experiment that comes with fedsim, or None for the default experiment. A name may be the object
            itself, as a class for the model; see docs/how-to/own-plugs.md.
        out: a new or empty folder for the records; None: no records are written.
        resume: continue the interrupted run of this experiment in `out`, with bitwise the same results, or a finished
            one for more rounds. If `out` is new, the run starts.
        on_setup: called with the name of each step before the first round, such as "loading the data set mnist".
        on_start: called with the `PreparedRun` before the first round.
        on_round: called with the `RoundRecord` of each round, after it is on record. If it raises `StopRun`, the run
            ends after this round; any other exception ends it without a result. Of several ranks, the first decides.
        session: the engine and the data that this run shares with other runs; None: it has its own.
        progress: print a line for each round, as the command line does. None: show a bar and a curve in a notebook,
            nothing elsewhere.
        allow_imports: whether a file may name anything that can be imported; see `load_experiment`.
        changes: keys of the experiment to change. A table changes only the keys that it has.

    Raises:
        ExperimentError: the experiment cannot be run.
        DataError: its data is missing.
        RecordError: the folder holds something else, or cannot be written.
        WorkerError: a worker failed, or processes were lost more often than `worker_retries` allows.
    """
    try:
        experiment = load_experiment(experiment, allow_imports=allow_imports, **changes)
    except ExperimentError as error:
        raise error.with_traceback(None) from error.__cause__  # frames within fedsim are of no help
    if resume and out is None:
        raise ExperimentError("resume = True: needs `out`, the folder of the run to resume")
    host = engines.get(experiment.engine).target
    display = display_of(experiment, None if out is None else Path(out), progress if host.is_main() else False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(display)
        stack.enter_context(host.joined(experiment.resolved()))
        folder = RunFolder(Path(out), resume=resume) if out is not None and host.is_main() else None
        if folder:
            stack.enter_context(folder)
        past = ResumeState(folder, experiment)
        display.announce()
        session = session or stack.enter_context(Session())
        note = folder.event if folder else None

        def setup(step: str) -> None:
            display.setup(step)
            if on_setup:
                on_setup(step)

        ended = stop_reason(past.records, experiment.stop)  # in an earlier session, perhaps after the last checkpoint
        experiment_here, scratch = past.with_earlier_choices(experiment), str(folder.path) if folder else None
        try:
            prepared, engine = stack.enter_context(prepare(experiment_here, session, note, setup, scratch=scratch))
        except ExperimentError as error:
            raise error.with_traceback(None) from error.__cause__
        results: list[WorkerResults] = []
        loop = loop_of(prepared, engine, folder.race_log if folder else None, results.append)
        loop = recovering(loop, prepared, engine, note)
        run_round = rounds_of(loop, experiment, engine)
        prepared = replace(prepared, done=past.restore(loop, engine) if resume else 0)
        history, loggers = past.records, None
        if folder and (table := newest_table(folder.path, prepared.done)):
            results.append(read_csv(table))
        stopped = stop_reason(history, experiment.stop)
        if stopped and not any(name.startswith("global_worker_") for name in history[-1].metrics):
            history[-1] = _with_tests_of_workers(history[-1], loop)  # `stop` has changed
            if folder and (tests := _tests_after(prepared.done, results)):
                folder.workers(tests)
        if host.is_main() and experiment.records.all_loggers:
            logged = logged_run(experiment, folder, prepared.done)
            loggers = stack.enter_context(RunLoggers(experiment, logged))
        if folder:
            _write_first_files(folder, experiment, prepared, history, **({ID: logged.id} if loggers else {}))
        for line in warnings_about(experiment) if host.is_main() else ():
            warnings.warn(line, SettingWarning, stacklevel=2)
        display.start(prepared)
        if on_start:
            on_start(prepared)
        stopping = EarlyStopping(experiment.stop)
        for record in history:
            stopping.update(record)
        if ended:
            display.stopped(f"this run is finished: {ended}")
        for round in range(prepared.done + 1, experiment.rounds + 1):
            if stopped:
                break
            record = run_round(round)
            history.append(record)
            if experiment.stop.active:
                evaluated = _tests_after(round, results) or not experiment.data.worker_test
                if record.cohort and evaluated and not stopping.has_best:
                    by_function = isinstance(experiment.client_algorithm, TrainFunction)
                    stopping.require_number(record, by_function=by_function)
                stopped = engine.broadcast(stopping.update(record))
            stopped = divergence(record) or stopped
            if out is not None and round in experiment.records.updates and record.cohort:  # all ranks take part
                kept = kept_updates(prepared, engine, record)
                if folder:
                    folder.updates(round, kept)
            if stopped and not _tests_after(round, results):
                history[-1] = record = _with_tests_of_workers(record, loop)
            _show_and_write(record, _tests_after(round, results), display, folder, loggers)
            asked = engine.broadcast(_stop_asked(on_round, record))  # one rank decides for all
            stopped = stopped or asked
            if (
                record.diverged is None
                and out is not None
                and engine.broadcast(
                    past.checkpoints.due(round, round if stopped else experiment.rounds, paused=asked is not None)
                )
            ):
                if folder:
                    folder.settle()
                past.checkpoints.write(round, loop.state, way=choices_of(prepared))
        if stopped and not ended:
            display.stopped(f"stopped after round {len(history)} of {experiment.rounds}: {stopped}")
            if folder:
                folder.event("stopped", round=len(history), reason=stopped)
        loop.finish()
        model = finished_model(prepared, engine)
        if folder:
            _write_last_files(folder, experiment, history, model, results)
        global_row = engine.shared.global_row.cpu().clone()
        del loop, run_round  # the engine must be the last to hold its memory when it leaves the task
    result = Result(experiment, history, model, global_row, folder.path if folder else None, stopped)
    display.finish(history[-1])
    return result


def _tests_after(round: int, results: Sequence[WorkerResults]) -> WorkerResults | None:
    """The tests of single workers after a round; None if there are none."""
    return results[-1] if results and results[-1].round == round else None


def _show_and_write(
    record: RoundRecord,
    tests: WorkerResults | None,
    display: Display | NotebookDisplay,
    folder: RunFolder | None,
    loggers: RunLoggers | None,
) -> None:
    """Write the record of a round, and the tests of single workers after it, to the files of the run; print them."""
    if folder and tests:
        folder.workers(tests)
    if folder:
        folder.round(record)
    if loggers:
        loggers.round(record)
    display.round(record)
    if tests:
        display.workers(tests)


def _stop_asked(on_round: Callable[[RoundRecord], object] | None, record: RoundRecord) -> str | None:
    """Call `on_round`; why it ends the run, None if it does not."""
    try:
        if on_round:
            on_round(record)
    except StopRun as stop:
        return str(stop) or "on_round raised StopRun"
    return None


def _with_tests_of_workers(record: RoundRecord, loop: Loop) -> RoundRecord:
    """The record of the round with which the run ends, with the tests of single workers if they are evaluated."""
    return replace(record, metrics=record.metrics | loop.test_workers(record.round))


def _write_first_files(
    folder: RunFolder, experiment: Experiment, prepared: PreparedRun, history: Sequence[RoundRecord], **facts: Any
) -> None:
    """Write the files of a run before its first round, or before the rounds of a resumed run."""
    require_space(folder.path, prepared.record_bytes, "what this run keeps")
    folder.begin(experiment, history, **prepared.facts(), **facts)
    folder.partition(prepared.label_counts, prepared.byzantine, prepared.sampled_workers, experiment.workers)


def _write_last_files(
    folder: RunFolder,
    experiment: Experiment,
    history: Sequence[RoundRecord],
    model: nn.Module,
    results: Sequence[WorkerResults],
) -> None:
    """Write the files of a finished run."""
    records = experiment.records
    folder.settle()
    if records.model:
        folder.model(model)
    figures = {}
    if records.curve and records.figures:
        figures["curve"] = draw_curve(history, experiment.name)
    if results and records.figures:
        figures["workers"] = draw_workers(results[-1], experiment.name)
    for name, figure in figures.items():
        for format in records.figures:
            folder.figure(name, encode(figure, format), format)
