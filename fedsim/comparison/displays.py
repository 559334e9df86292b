"""Progress displays for comparisons in a terminal or a Jupyter notebook."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedsim.callbacks.display import DRAWING, print_line, progress_bar
from fedsim.comparison.plan import ComparisonPlan, PlannedRun
from fedsim.core.notebook import CellOutput, in_notebook, progress_html, text_html
from fedsim.core.status_line import status_line
from fedsim.errors import plural
from fedsim.records.formatting import score_text
from fedsim.records.reader import Run
from fedsim.records.record import RoundRecord


class Callback:
    """Base class for callbacks that follow a comparison. Override the methods that you need."""

    def on_start(self, plan: ComparisonPlan, todo: Sequence[PlannedRun], jobs: int) -> None:
        """Called before the first run. `todo` lists the runs to execute, and `jobs` of them run at the same time."""

    def on_round(self, run: PlannedRun, record: RoundRecord) -> None:
        """Called after each round of a run."""

    def on_retry(self, run: PlannedRun) -> None:
        """Called before a run starts again because its process died or hung."""

    def on_end(self, run: Run) -> None:
        """Called after each run, whether the run finished or failed."""

    def on_drawing(self) -> None:
        """Called if drawing the figures takes longer than a second."""


class ComparisonDisplay(Callback):
    """Shows the progress of a comparison in the terminal: one line per run, and a progress bar.

    Use it as a context manager around the comparison.

    Args:
        folder: folder of the records, or None if the records are not kept.
        quiet: print nothing.
    """

    def __init__(self, folder: Path | None = None, *, quiet: bool = False) -> None:
        self._folder, self._quiet = folder, quiet
        self._bar = progress_bar(0, quiet=True)  # until the number of rounds is known
        self._checking = contextlib.ExitStack()
        self._total = self._ended = self._failed = 0
        self._done = Counter[str]()  # rounds of each run

    def on_start(self, plan: ComparisonPlan, todo: Sequence[PlannedRun], jobs: int) -> None:
        self._checking.close()
        self._begun, self._total = time.perf_counter(), len(todo)
        self._planned = {run.id: run.experiment.rounds for run in todo}
        self._rounds = sum(self._planned.values())
        lines = [f"{plan.name}: {plural(len(plan.runs), 'run')} ({plan.shape}), {jobs} at a time"]
        self._start([*lines, *(f"left out: {line}" for line in plan.left_out)], len(plan.runs) - self._total)

    def on_round(self, run: PlannedRun, record: RoundRecord) -> None:
        self._done[run.id] += 1
        self._update()

    def on_retry(self, run: PlannedRun) -> None:
        self._done[run.id] = 0

    def on_end(self, run: Run) -> None:
        self._rounds += self._done[run.id] - self._planned[run.id]  # a failed or stopped run skips rounds
        self._ended += 1
        self._failed += run.error is not None
        self._end(run)

    def on_drawing(self) -> None:
        self._print(DRAWING)

    def _start(self, lines: list[str], finished: int) -> None:
        """Print `lines`, say how many runs were finished before, and create the progress bar."""
        self._bar = progress_bar(self._rounds, quiet=self._quiet)
        self._print("\n".join([*lines, *([f"{finished} of them already finished"] if finished else [])]))

    def _update(self) -> None:
        self._bar.set_postfix_str(f"{self._ended} of {self._total} runs", refresh=False)
        self._bar.update(self._done.total() - self._bar.n)

    def _end(self, run: Run) -> None:
        self._bar.total = self._rounds
        score = f"{score_text(run.history[-1]).removeprefix('test ')}, {run.seconds:.1f} s" if run.error is None else ""
        self._seconds = time.perf_counter() - self._begun
        number = f"{self._ended:>{len(str(self._total))}}/{self._total}"
        self._print(f"[{number}] {run.id}: {score or f'failed: {run.error}'}")

    def _print(self, line: str) -> None:
        print_line(line, quiet=self._quiet)

    def __enter__(self) -> ComparisonDisplay:
        if not self._quiet:
            self._checking.enter_context(status_line("checking the runs"))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._checking.close()
        self._bar.close()
        if kind is None and self._total:
            self._print(f"{plural(self._total, 'run')} in {self._seconds:.1f} s\n")
        elif kind is not None and self._total and self._folder:
            done = f"{self._ended - self._failed} of {plural(self._total, 'run')}"
            with contextlib.suppress(OSError):  # the comparison may have ended because stdout is closed
                self._print(f"{done} are finished in {self._folder}; repeat the command with --out {self._folder}")


class NotebookComparisonDisplay(ComparisonDisplay):
    """Shows the progress of a comparison in a notebook: a progress bar, and a list of failed runs.

    Use it as a context manager around the comparison.
    """

    def _start(self, lines: list[str], finished: int) -> None:
        self._cell, self._lines = CellOutput(), lines
        self._show()

    def _update(self) -> None:
        if self._cell.due:
            self._show()

    def _end(self, run: Run) -> None:
        if run.error is not None:
            self._lines.append(f"{run.id}: failed: {run.error}")
        self._update()

    def _show(self) -> None:
        bar = progress_html(self._done.total(), self._rounds, f"{self._ended} of {plural(self._total, 'run')}")
        self._cell.show(text_html("\n".join(self._lines)) + bar)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._total or kind is None:
            self._show()


def display_of(folder: Path | None, progress: bool | None) -> ComparisonDisplay:
    """Return the object that shows the progress of a comparison.

    Args:
        folder: folder of the records, or None if the records are not kept.
        progress: True prints a line for each run, False prints nothing. None shows a progress bar in notebooks only.
    """
    if progress is None and in_notebook():
        return NotebookComparisonDisplay()
    return ComparisonDisplay(folder, quiet=not progress)
