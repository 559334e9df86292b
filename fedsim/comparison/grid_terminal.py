"""The terminal output of a comparison: a progress bar over the rounds of all runs, and a line for each finished run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from fedsim.callbacks.display import ProgressBar, progress_bar
from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.comparison.results import RunResult
from fedsim.errors import plural
from fedsim.records.formatting import score_text
from fedsim.records.record import RoundRecord


class Callback:
    """What a comparison calls as it proceeds; override the methods of interest."""

    def on_start(self, grid: Grid, todo: Sequence[PlannedRun], jobs: int) -> None:
        """Before the first run; `todo` are the runs that are not finished yet, `jobs` of which run at a time."""

    def on_round(self, run: PlannedRun, record: RoundRecord) -> None:
        """After each round of a run."""

    def on_retry(self, run: PlannedRun) -> None:
        """Before a run starts again because its process was lost."""

    def on_end(self, run: RunResult) -> None:
        """After a run: finished or failed."""


class GridDisplay(Callback):
    """Prints a line per run on stdout, and draws a progress bar on stderr if stderr is a terminal.

    A context manager around the comparison.

    Args:
        folder: of the records; None if they are not kept.
        quiet: print and draw nothing.
    """

    def __init__(self, folder: Path | None, *, quiet: bool) -> None:
        self._folder, self._quiet = folder, quiet
        self._bar = progress_bar(0, quiet=True)  # until the number of rounds is known
        self._total = self._ended = self._failed = 0

    def on_start(self, grid: Grid, todo: Sequence[PlannedRun], jobs: int) -> None:
        self._begun = time.perf_counter()
        self._total = len(todo)
        self._remaining = {run.id: run.experiment.rounds for run in todo}
        self._bar = progress_bar(sum(self._remaining.values()), quiet=self._quiet)
        self._print(f"{grid.name}: {plural(len(grid.runs), 'run')} ({grid.shape}), {jobs} at a time")
        for line in grid.left_out:
            self._print(f"left out: {line}")
        if len(todo) < len(grid.runs):
            self._print(f"{len(grid.runs) - len(todo)} of them already finished")

    def on_round(self, run: PlannedRun, record: RoundRecord) -> None:
        self._remaining[run.id] -= 1
        self._bar.set_postfix_str(f"{self._ended} of {self._total} runs", refresh=False)
        self._bar.update()

    def on_retry(self, run: PlannedRun) -> None:
        self._bar.update(self._remaining[run.id] - run.experiment.rounds)
        self._remaining[run.id] = run.experiment.rounds

    def on_end(self, run: RunResult) -> None:
        self._bar.total -= self._remaining.pop(run.id)  # rounds that a run which failed or stopped early will not do
        self._ended += 1
        self._failed += run.error is not None
        score = f"{score_text(run.history[-1]).removeprefix('test ')}, {run.seconds:.1f} s" if run.error is None else ""
        self._seconds = time.perf_counter() - self._begun
        number = f"{self._ended:>{len(str(self._total))}}/{self._total}"
        self._print(f"[{number}] {run.id}: {score or f'failed: {run.error}'}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            with ProgressBar.external_write_mode():
                print(line, flush=True)

    def __enter__(self) -> GridDisplay:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.close()
        if kind is None and self._total:
            self._print(f"{plural(self._total, 'run')} in {self._seconds:.1f} s\n")
        elif kind is not None and self._ended and self._folder:
            done = self._ended - self._failed
            with contextlib.suppress(OSError):  # the comparison may have ended because stdout is closed
                self._print(f"{done} of {self._total} runs are in {self._folder}; continue with --out {self._folder}")
