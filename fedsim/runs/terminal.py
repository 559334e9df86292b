"""The output of a single run on the terminal; `comparison/grid_terminal.py` has that of a comparison."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from fedsim.config.experiment import Experiment
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.errors import plural
from fedsim.records.formatting import score_text
from fedsim.records.record import Metric, RoundRecord
from fedsim.records.worker_results import workers_line
from fedsim.runs.checkpoints import Checkpoints
from fedsim.runs.loops.race_loop import caveat
from fedsim.runs.setup import PreparedRun
from fedsim.runs.text_table import announcement, columns_of, headline, table_header, table_line

BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} rounds, {remaining} left{postfix}"


class ProgressBar(tqdm):
    """A progress bar that starts no thread: each round moves it."""

    monitor_interval = 0


ProgressBar.set_lock(threading.RLock())  # tqdm's own lock has a semaphore, which a killed process leaves behind


def progress_bar(rounds: int, *, quiet: bool) -> ProgressBar:
    """A bar over so many rounds with the time left, on stderr; disabled if stderr is no terminal."""
    watched = not quiet and sys.stderr.isatty()
    return ProgressBar(total=rounds, bar_format=BAR, smoothing=0.05, leave=False, miniters=1, disable=not watched)


class Display:
    """Prints what is run, a line of a table per round, and a progress bar; a context manager around the run.

    Args:
        experiment: what is run.
        folder: of the records; None without one.
        quiet: print nothing.
    """

    def __init__(self, experiment: Experiment, folder: Path | None, *, quiet: bool) -> None:
        self._experiment, self._folder, self._quiet = experiment, folder, quiet
        self._done = self._before = 0  # finished rounds, and those of earlier sessions
        self._virtual_seconds: float | None = None
        self._columns: list[Metric] = []  # known from the first record on
        self._begun = time.perf_counter()
        self._bar = progress_bar(experiment.rounds, quiet=quiet)

    def announce(self) -> None:
        """Print what is run, before the preparation, which may take long."""
        if self._experiment.mode == "race":
            self._print(caveat(self._experiment.race.runs))
        self._print(announcement(self._experiment))

    def setup(self, step: str) -> None:
        """Show the step of the preparation that begins."""
        self._bar.set_description(step)

    def start(self, prepared: PreparedRun) -> None:
        self._bar.set_description()
        self._print(headline(prepared))
        if prepared.done:
            self._done = self._before = prepared.done
            self._print(f"continuing after round {prepared.done} of {self._bar.total}")
        self._started = time.perf_counter()
        self._bar.reset()
        # The estimate of the time left must not count rounds of earlier sessions.
        self._bar.n = self._bar.last_print_n = self._bar.initial = prepared.done

    def round(self, record: RoundRecord) -> None:
        self._done, self._virtual_seconds = record["round"], record["virtual_seconds"]
        self._bar.set_postfix_str(score_text(record).removeprefix("test "), refresh=False)
        self._bar.update()
        if not self._columns:
            self._columns = columns_of(record)
            self._print(table_header(self._columns))
        self._print(table_line(self._columns, record))

    def workers(self, results: WorkerResults) -> None:
        """Print the accuracies on the workers' own test samples."""
        self._print(workers_line(results))

    def stopped(self, line: str) -> None:
        """Print that the run ends, or has ended, before its last round."""
        self._print(line)

    def finish(self, last: RoundRecord) -> None:
        """Print the final accuracy, or the loss of a task without accuracy, and the time."""
        seconds = time.perf_counter() - self._started
        virtual = "" if self._virtual_seconds is None else f" and {self._virtual_seconds:.1f} virtual seconds"
        now = f", {self._done - self._before} of them in this session," if self._before else ""
        rounds = plural(self._done, "round")
        self._print(
            f"final {score_text(last)} after {rounds}{virtual}{now} in {seconds:.1f} s "
            f"(and {self._started - self._begun:.1f} s to start)"
        )

    def _leave(self) -> None:
        """Print how to resume an unfinished run."""
        if self._done and self._folder:
            with contextlib.suppress(OSError):  # a closed stdout may be the reason
                rounds = f"{self._done} of {plural(self._bar.total, 'round')}"
                saved = Checkpoints(Path(self._folder), None, 0).rounds()
                start = f"continue after round {max(saved)}" if saved else "there is no checkpoint yet; start again"
                self._print(f"{rounds} are in {self._folder}; {start} with --resume {self._folder}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            with ProgressBar.external_write_mode():
                print(line, flush=True)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.close()
        if kind is not None:
            self._leave()
