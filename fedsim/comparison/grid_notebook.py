"""What a comparison shows in a Jupyter notebook: a progress bar over the rounds of all runs, then its results."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.comparison.grid_terminal import Callback, GridDisplay
from fedsim.comparison.results import RunResult
from fedsim.errors import plural
from fedsim.records.on_paper import draw_curves, draw_heatmap
from fedsim.records.record import RoundRecord
from fedsim.runs.notebook import PLAIN, CellOutput, figure_html, in_notebook, progress_html, text_html

if TYPE_CHECKING:
    from fedsim.comparison.runner import Comparison


class NotebookGridDisplay(Callback):
    """Shows the bar, and the runs that failed, in the output of a cell; a context manager around the comparison."""

    def __init__(self) -> None:
        self._cell = CellOutput()
        self._lines: list[str] = []
        self._done: dict[str, int] = {}  # rounds of each run
        self._ended = self._runs = self._rounds = 0

    def on_start(self, grid: Grid, todo: Sequence[PlannedRun], jobs: int) -> None:
        self._lines = [f"{grid.name}: {plural(len(grid.runs), 'run')} ({grid.shape}), {jobs} at a time"]
        self._lines += [f"left out: {line}" for line in grid.left_out]
        self._runs, self._rounds = len(todo), sum(run.experiment.rounds for run in todo)
        self._show()

    def on_round(self, run: PlannedRun, record: RoundRecord) -> None:
        self._done[run.id] = record.round
        if self._cell.due:
            self._show()

    def on_retry(self, run: PlannedRun) -> None:
        self._done[run.id] = 0

    def on_end(self, run: RunResult) -> None:
        self._ended += 1
        self._rounds += self._done.get(run.id, 0) - run.experiment.rounds  # those that it will not do
        if run.error is not None:
            self._lines.append(f"{run.id}: failed: {run.error}")
        if self._cell.due:
            self._show()

    def _show(self) -> None:
        bar = progress_html(sum(self._done.values()), self._rounds, f"{self._ended} of {plural(self._runs, 'run')}")
        self._cell.show(text_html("\n".join(self._lines)) + bar)

    def __enter__(self) -> NotebookGridDisplay:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._lines:
            self._show()


def display_of(folder: Path | None, progress: bool | None) -> GridDisplay | NotebookGridDisplay:
    """What a comparison shows: lines if `progress` is true; if it is None, a bar in a notebook, else nothing."""
    if progress is None and in_notebook():
        return NotebookGridDisplay()
    return GridDisplay(folder, quiet=not progress)


def comparison_html(comparison: Comparison) -> str:
    """The answer, the table with the best in bold, and the picture of a comparison, as a notebook shows it."""
    grid, runs = comparison.grid, comparison.runs
    lines = [html.escape(line) for line in comparison.table.splitlines()]
    table = "\n".join(f"<b>{line}</b>" if "  *  " in line else line for line in lines)
    picture = draw_heatmap(grid, runs) or draw_curves(grid, runs)
    shown = figure_html(picture, f"comparison {grid.name}") if picture else ""
    return f'<h4>{html.escape(grid.name)}</h4><pre style="{PLAIN}">{table}</pre>{shown}'
