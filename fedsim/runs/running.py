"""A run, from the description of an experiment to its result and its records."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsim.consistency import warnings_about
from fedsim.display import Display
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, SettingWarning, plural
from fedsim.experiment import Experiment
from fedsim.intervals import fixed
from fedsim.loading import load_experiment
from fedsim.plotting import encode
from fedsim.preparation import Setting, finished_model, prepare
from fedsim.records import RoundRecord, RunFolder
from fedsim.report import draw_curve
from fedsim.runs.recovery import recovering
from fedsim.runs.replay import kept_updates
from fedsim.runs.resuming import Past, way_of
from fedsim.runs.scalarboard import ScalarBoard
from fedsim.simulation import loop_of
from fedsim.system.files import require_space
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

    def __repr__(self) -> str:
        seconds = sum(sum(record["seconds"].values()) for record in self.history)
        where = f", in {self.folder}" if self.folder else ""
        return (
            f"Result({self.experiment.name}: test accuracy {fixed(self.test_accuracy)} after "
            f"{plural(len(self.history), 'round')} in {seconds:.1f} s{where})"
        )


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    on_setup: Callable[[str], object] | None = None,
    on_start: Callable[[Setting], object] | None = None,
    on_round: Callable[[RoundRecord], object] | None = None,
    workshop: Workshop | None = None,
    progress: bool = False,
    allow_imports: bool = False,
    **changes: Any,
) -> Result:
    """Run an experiment.

        fedsim.run(rounds=3, model="2nn", local={"lr": 0.1})
        fedsim.run("experiment.toml", "folder", rounds=3)

    Args:
        experiment: an Experiment, tables (keys may be dotted: {"local.lr": 0.1}), the path of a TOML file, the name of
            an experiment that comes with fedsim, or None for the default experiment. A name may be the object itself,
            as a class for the model; see docs/extending.md.
        out: a new or empty folder for the records; none are kept where it is left out.
        resume: where `out` holds a run of this experiment that was broken off, go on with it, to the bits that it would
            have come to; or with one that has ended, where `rounds` are more now.
        on_setup: called with what is being done before the first round, such as "loading the data set mnist".
        on_start, on_round: called with the Setting before the first round, and with each round's record after it.
        workshop: what this run shares with those before and after it; one of its own where it is left out.
        progress: whether to print a line for each round, as the command line does.
        allow_imports: whether a TOML file may name whatever can be imported; see `load_experiment`.
        changes: keys of the experiment, set in the experiment given. A table changes the keys that it has.

    Raises:
        ExperimentError: the experiment cannot be run as described.
        DataError: its data is missing.
        RecordError: the folder holds something else, or cannot be written.
        WorkerError: a worker failed; or its process was lost, more often than the experiment bears.
    """
    experiment = load_experiment(experiment, allow_imports=allow_imports, **changes)
    if resume and out is None:
        raise ExperimentError("resume = True: needs `out`, the folder of the run that is to be gone on with")
    host = engines.get(experiment.engine).target
    display = Display(experiment, None if out is None else Path(out), quiet=not (progress and host.leads()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(display)
        stack.enter_context(host.among_peers(experiment.resolved()))
        folder = RunFolder(Path(out), resume=resume) if out is not None and host.leads() else None
        if folder:
            stack.enter_context(folder)
        past = Past(folder, experiment)
        workshop = workshop or stack.enter_context(Workshop())
        note = folder.event if folder else None

        def setup(step: str) -> None:
            display.setup(step)
            if on_setup:
                on_setup(step)

        setting, engine = stack.enter_context(prepare(past.as_before(experiment), workshop, note, setup))
        loop = loop_of(setting, engine, folder.race_log if folder else None)
        loop = recovering(loop, setting, engine, note)
        setting = replace(setting, done=past.restore(loop, engine) if resume else 0)
        books = stack.enter_context(Books(experiment, setting, folder))
        history = past.records
        books.begin(history)
        for line in warnings_about(experiment) if host.leads() else ():
            warnings.warn(line, SettingWarning, stacklevel=2)
        display.start(setting)
        if on_start:
            on_start(setting)
        for round in range(setting.done + 1, experiment.rounds + 1):
            record = loop.play(round)
            history.append(record)
            if out is not None and round in experiment.records.updates:  # which all ranks have a part in
                books.updates(round, kept_updates(setting, engine, record))
            books.round(record)
            display.round(record)
            if on_round:
                on_round(record)
            if out is not None and engine.agree(past.checkpoints.due(round, experiment.rounds)):
                books.settle()
                past.checkpoints.write(round, loop.state, way=way_of(setting))
        loop.finish()
        model = finished_model(setting, engine)
        books.end(history, model)
        global_row = engine.memory.global_row.cpu().clone()
        del loop  # so that the engine, as it leaves, is the last to hold its memory
    result = Result(experiment, history, model, global_row, folder.path if folder else None)
    display.finish(result.test_accuracy)
    return result


class Books(contextlib.ExitStack):
    """Where the records of a run go: its folder, and TensorBoard; or nowhere, where there is no folder."""

    def __init__(self, experiment: Experiment, setting: Setting, folder: RunFolder | None) -> None:
        super().__init__()
        self._experiment, self._setting, self._folder = experiment, setting, folder
        wanted = folder is not None and experiment.records.tensorboard
        board = ScalarBoard(folder.path, experiment.resolved(), after=setting.done) if folder and wanted else None
        self._board = self.enter_context(board) if board else None

    def begin(self, history: Sequence[RoundRecord]) -> None:
        """Before the first round, or where the records go on that there are."""
        setting = self._setting
        if self._folder:
            require_space(self._folder.path, setting.record_bytes, "what this run keeps")
            self._folder.begin(self._experiment, history, **setting.facts())
            of_some = setting.looked_at, self._experiment.workers
            self._folder.partition(setting.label_counts, setting.byzantine, *of_some)

    def updates(self, round: int, kept: dict[str, Tensor]) -> None:
        """What the rule was given in a round."""
        if self._folder:
            self._folder.updates(round, kept)

    def round(self, record: RoundRecord) -> None:
        """After every round."""
        if self._folder:
            self._folder.round(record)
        if self._board:
            self._board.round(record)

    def settle(self) -> None:
        """Flush the recorded rounds: before a checkpoint, which is useless without them, and at the end of the run."""
        if self._folder:
            self._folder.settle()

    def end(self, history: Sequence[RoundRecord], model: nn.Module) -> None:
        """After the last round."""
        self.settle()
        if self._folder and self._experiment.records.model:
            self._folder.model(model)
        records = self._experiment.records
        if self._folder and records.curve and records.figures:
            figure = draw_curve(history, self._experiment.name)
            for format in records.figures:
                self._folder.curve(encode(figure, format), format)
