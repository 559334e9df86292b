"""Callbacks that write the records of a run to its folder, and the figure of its accuracy and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedsim.callbacks.callback import Callback, CurrentRun
from fedsim.callbacks.painter import Painter
from fedsim.core.plotting import line_style, prepare_axes
from fedsim.errors import plural
from fedsim.records.formatting import score_text
from fedsim.records.record import RoundRecord, score_in
from fedsim.records.run_folder import RunFolder
from fedsim.records.worker_results import draw_workers
from fedsim.system.files import require_space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsim.runs.result import Result


class Recorder(Callback):
    """Callback that writes the records of a run to its folder.

    `facts` are stored with the software versions and the facts about the machine.
    """

    def __init__(self, run: CurrentRun, folder: RunFolder, facts: Mapping[str, Any], painter: Painter) -> None:
        self._run, self._folder, self._facts, self._painter = run, folder, facts, painter

    def on_start(self, run: CurrentRun) -> None:
        facts, experiment = run.facts, run.experiment
        require_space(self._folder.path, facts.record_bytes, "what this run keeps")
        self._folder.begin(experiment, run.history, **facts.for_record(), **self._facts)
        self._folder.partition(facts.label_counts, facts.byzantine, facts.sampled_workers, experiment.workers)

    def on_round(self, record: RoundRecord) -> None:
        if tests := self._run.rounds.tests_after(record.round):
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
        if tests := self._run.rounds.tests:
            drawings["workers"] = partial(draw_workers, tests, result.experiment.name)
        for name, content in self._painter.files(drawings, records.figures).items():
            folder.write(name, content)


class KeptUpdates(Callback):
    """Callback that stores the workers' updates in chosen rounds, for the command `fedsim replay`."""

    def __init__(self, run: CurrentRun) -> None:
        self._run = run

    def on_round(self, record: RoundRecord) -> None:
        run = self._run
        if run.recorded and record.cohort and record.round in run.experiment.records.updates:
            updates = run.rounds.kept_updates(record)
            if run.folder:
                run.folder.updates(record.round, updates)


def draw_curve(history: Sequence[RoundRecord], title: str) -> Figure:
    """Return a figure of accuracy and losses over the rounds and, if there is a virtual clock, over virtual time."""
    # Imported here because the import takes half a second. Not pyplot, which has global state.
    from matplotlib.figure import Figure

    def numbers(key: str) -> list[Any]:
        return [record[key] for record in history]

    rounds, times, score = numbers("round"), numbers("virtual_seconds"), score_in(history)
    timed = times[-1] is not None
    shown = [quantity for quantity in ("accuracy", "loss") if numbers(f"test_{quantity}")[-1] is not None]
    panels = len(shown) + timed
    figure = Figure(figsize=(max(6, (4.25 if panels < 3 else 4) * panels), 3.4), layout="constrained")
    figure.suptitle(f"{title}: {score_text(history[-1])} after {plural(rounds[-1], 'round')}", fontsize="medium")
    panels_of_figure = figure.subplots(1, panels, squeeze=False)[0]
    for axes, quantity in zip(panels_of_figure, shown, strict=False):
        for index, split in enumerate(("test", "train", "validation")):
            key = f"{split}_{quantity}"
            if key in history[-1] and (split != "validation" or numbers(key)[-1] is not None):
                axes.plot(rounds, numbers(key), **line_style(index, len(rounds)), label=split)
        prepare_axes(axes, whole_numbers=True)
        axes.set(xlabel="round", ylabel="loss" if quantity == "loss" else "test accuracy")
        if len(axes.lines) > 1:
            axes.legend(fontsize="small")
    if timed:
        axes = panels_of_figure[-1]
        axes.plot(times, numbers(score.key), **line_style(0, len(rounds)))
        prepare_axes(axes, whole_numbers=False)
        axes.set(xlabel="virtual seconds", ylabel=score.label.lower())
    for axes in panels_of_figure:
        if axes.get_ylabel() == "test accuracy":
            axes.set(ylim=(None, 1))
    return figure
