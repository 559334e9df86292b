"""What a single run shows on the terminal; `comparison/display.py` has what a comparison does."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from fedsim.asynchronous.racing import caveat
from fedsim.errors import plural
from fedsim.experiment import Experiment
from fedsim.intervals import fixed
from fedsim.notices import SlowStepNotice
from fedsim.preparation import Setting
from fedsim.records import RoundRecord
from fedsim.report import columns_of, headline, table_header, table_line
from fedsim.runs.checkpoints import Checkpoints

BAR = "{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} rounds, {remaining} left{postfix}"


class ProgressBar(tqdm):
    """A progress bar that starts no thread: each round moves it."""

    monitor_interval = 0


ProgressBar.set_lock(threading.RLock())  # tqdm's own is also a semaphore, which a killed process leaves behind


def progress_bar(rounds: int, *, quiet: bool) -> ProgressBar:
    """A bar over so many rounds with the time left, on stderr; disabled unless somebody is watching."""
    watched = not quiet and sys.stderr.isatty()
    return ProgressBar(total=rounds, bar_format=BAR, smoothing=0.05, leave=False, miniters=1, disable=not watched)


class Display:
    """What a run shows: a headline, a line of a table per round, and a progress bar where somebody is watching.

    A context manager around the run.

    Args:
        experiment: that is run.
        folder: of the records, if there is one.
        quiet: whether it shows nothing.
    """

    def __init__(self, experiment: Experiment, folder: Path | None, *, quiet: bool) -> None:
        self._experiment, self._folder, self._quiet = experiment, folder, quiet
        self._done = self._before = 0  # rounds; and of those, before this time
        self._virtual_seconds: float | None = None
        self._begun = time.perf_counter()
        self._notice = SlowStepNotice(self._print)
        self._bar = progress_bar(experiment.rounds, quiet=quiet)

    def setup(self, step: str) -> None:
        """Before the first round: what is being done now."""
        if not self._quiet:
            self._notice.begin(step)

    def start(self, setting: Setting) -> None:
        self._notice.end()
        self._print(headline(setting))
        if setting.done:
            self._done = self._before = setting.done
            self._print(f"continuing after round {setting.done} of {self._bar.total}")
        self._columns = columns_of(setting.experiment)
        self._print(table_header(self._columns))
        self._started = time.perf_counter()
        self._bar.reset()
        self._bar.n = self._bar.last_print_n = self._bar.initial = setting.done  # the time left counts the others alone

    def round(self, record: RoundRecord) -> None:
        self._done, self._virtual_seconds = record["round"], record["virtual_seconds"]
        self._bar.set_postfix_str(f"accuracy {fixed(record['test_accuracy'])}", refresh=False)
        self._bar.update()
        self._print(table_line(self._columns, record))

    def finish(self, accuracy: float) -> None:
        """Say what the run came to."""
        seconds = time.perf_counter() - self._started
        virtual = "" if self._virtual_seconds is None else f" and {self._virtual_seconds:.1f} virtual seconds"
        now = f", {self._bar.total - self._before} of them in this session," if self._before else ""
        rounds = plural(self._bar.total, "round")
        self._print(
            f"final test accuracy {fixed(accuracy)} after {rounds}{virtual}{now} in {seconds:.1f} s "
            f"(and {self._started - self._begun:.1f} s to start)"
        )

    def _leave(self) -> None:
        """Say what an unfinished run has left behind."""
        if self._done and self._folder:
            with contextlib.suppress(OSError):  # that stdout is closed may be what ended it
                rounds = f"{self._done} of {plural(self._bar.total, 'round')}"
                saved = Checkpoints(Path(self._folder), None, 0).rounds()
                start = f"continue after round {max(saved)}" if saved else "there is no checkpoint yet; start again"
                self._print(f"{rounds} are in {self._folder}; {start} with --resume {self._folder}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            with ProgressBar.external_write_mode():
                print(line, flush=True)

    def __enter__(self) -> Display:
        if self._experiment.mode == "race":
            self._print(caveat(self._experiment.race.runs))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._notice.end()
        self._bar.close()
        if kind is not None:
            self._leave()
