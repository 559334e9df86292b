"""What a comparison shows as it goes: one bar over the rounds of all runs, and a line for each run that ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.display import ProgressBar, progress_bar
from fedsim.errors import plural
from fedsim.intervals import fixed
from fedsim.records import RoundRecord


class Watcher:
    """Is told what happens in a comparison; this one does nothing about it."""

    def again(self, run: PlannedRun) -> None:
        """Where a run begins once more, since its process was lost."""

    def start(self, grid: Grid, todo: Sequence[PlannedRun], jobs: int) -> None:
        """Before the first run: the runs that are still to be done, and how many at once."""

    def round(self, run: PlannedRun, record: RoundRecord) -> None:
        """After every round of a run."""

    def end(self, run: PlannedRun, history: Sequence[RoundRecord], error: str | None) -> None:
        """After a run, with why it failed if it did."""


class GridDisplay(Watcher):
    """Lines on stdout, unless quiet; the bar on stderr, where somebody is watching.

    A context manager around the comparison, whose records go to `folder`, if they are kept.
    """

    def __init__(self, folder: Path | None, *, quiet: bool) -> None:
        self._folder, self._quiet = folder, quiet
        self._bar: ProgressBar | None = None
        self._total = self._ended = self._failed = 0

    def start(self, grid: Grid, todo: Sequence[PlannedRun], jobs: int) -> None:
        self._begun = time.perf_counter()
        self._total = len(todo)
        self._rounds = {run.id: run.experiment.rounds for run in todo}  # that are still to come
        rounds = sum(self._rounds.values())
        self._bar = progress_bar(rounds, quiet=self._quiet)
        axes = " x ".join(f"{len(values)} {key}" for key, values in grid.axes.items())
        self._print(f"{grid.name}: {plural(len(grid.runs), 'run')} ({axes}), {jobs} at a time")
        if len(todo) < len(grid.runs):
            self._print(f"{len(grid.runs) - len(todo)} of them already finished")

    def round(self, run: PlannedRun, record: RoundRecord) -> None:
        assert self._bar is not None
        self._rounds[run.id] -= 1
        self._bar.set_postfix_str(f"{self._ended} of {self._total} runs", refresh=False)
        self._bar.update()

    def again(self, run: PlannedRun) -> None:
        assert self._bar is not None
        self._bar.update(self._rounds[run.id] - run.experiment.rounds)
        self._rounds[run.id] = run.experiment.rounds

    def end(self, run: PlannedRun, history: Sequence[RoundRecord], error: str | None) -> None:
        assert self._bar is not None
        self._bar.total -= self._rounds.pop(run.id)  # the rounds that a failed run will not do
        self._ended += 1
        if error is None:
            seconds = sum(sum(record["seconds"].values()) for record in history)
            what = f"accuracy {fixed(history[-1]['test_accuracy'])}, {seconds:.1f} s"
        else:
            self._failed += 1
            what = f"failed: {error.strip().partition(chr(10))[0]}"
        self._seconds = time.perf_counter() - self._begun
        self._print(f"[{self._ended:>{len(str(self._total))}}/{self._total}] {run.id}: {what}")

    def _finish(self) -> None:
        """Say how long it took."""
        if self._total:
            self._print(f"{plural(self._total, 'run')} in {self._seconds:.1f} s\n")

    def _leave(self) -> None:
        """Say what an unfinished comparison has left behind."""
        if self._ended and self._folder:
            done = self._ended - self._failed
            with contextlib.suppress(OSError):  # that stdout is closed may be what ended it
                self._print(f"{done} of {self._total} runs are in {self._folder}; continue with --out {self._folder}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            with ProgressBar.external_write_mode():
                print(line, flush=True)

    def __enter__(self) -> GridDisplay:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            self._finish()
        else:
            self._leave()
