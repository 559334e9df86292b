"""Jupyter notebook display of a run: a progress bar and a growing curve."""

from __future__ import annotations

from pathlib import Path

from fedsim.callbacks.display import Display
from fedsim.config.experiment import Experiment
from fedsim.core.notebook import CellOutput, figure_html, in_notebook, progress_html, text_html
from fedsim.errors import plural
from fedsim.records.figures import draw_curve
from fedsim.records.formatting import score_text
from fedsim.records.record import RoundRecord
from fedsim.runs.live_run import LiveRun


class NotebookDisplay(Display):
    """Shows a run in a notebook: a description, a progress bar and a curve.

    Use it as a context manager around the run.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment, None, quiet=True)
        self._cell, self._step = CellOutput(), ""
        self._history: list[RoundRecord] = []  # records of this session
        self._lines: list[str] = []

    def on_setup(self, step: str) -> None:
        self._step = step
        self._cell.show(self._page())

    def on_start(self, run: LiveRun) -> None:
        super().on_start(run)
        self._step = ""
        self._cell.show(self._page())

    def _print(self, line: str) -> None:
        self._lines.append(line)

    def _show_round(self, record: RoundRecord) -> None:
        self._history.append(record)
        if self._cell.due:
            self._cell.show(self._page(curve=True))

    def _page(self, *, curve: bool = False, bar: bool = True) -> str:
        score = f", {score_text(self._history[-1])}" if self._history else ""
        text = self._step or f"{self._done} of {plural(self._experiment.rounds, 'round')}{score}"
        parts = [text_html("\n".join(self._lines))] if self._lines else []
        parts += [progress_html(self._done, self._experiment.rounds, text)] if bar else []
        parts += [figure_html(draw_curve(self._history, self._experiment.name), "curves of the run")] if curve else []
        return "".join(parts)

    def __exit__(self, kind: object, *_: object) -> None:
        super().__exit__(kind)
        if self._last is not None or kind is not None:
            self._cell.show(self._page(curve=bool(self._history), bar=kind is not None))


def display_of(experiment: Experiment, folder: Path | None, progress: bool | None) -> Display:
    """Return the object that shows the progress of a run.

    Args:
        experiment: the experiment of the run.
        folder: folder of the run, or None.
        progress: True prints lines, False prints nothing, and None shows a bar and a curve in notebooks only.
    """
    if progress is None and in_notebook():
        return NotebookDisplay(experiment)
    return Display(experiment, folder, quiet=not progress)
