"""Several runs at once: processes that carry out one run after another, and the parent's watch over them.

A job is one process with a workshop of its own. Its parent sends it a run, and gets a message for every round; it
waits on the pipes AND on the processes, so that a death is noticed at once and costs no more than the run in hand.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedsim.comparison.grid import PlannedRun
from fedsim.engines.barrier import NOBODY, ROUND, WORKER, Board, Silence
from fedsim.engines.crew import START_TIMEOUT, Seat, whereabouts
from fedsim.errors import FedsimError, FedsimWarning, SettingWarning, WorkerError, one_line, plural
from fedsim.experiment import Experiment
from fedsim.preparation import Setting
from fedsim.records import RoundRecord
from fedsim.runs.running import run
from fedsim.system.limits import lines_of, require_files
from fedsim.system.messages import Channel
from fedsim.system.processes import (
    GRACE,
    Child,
    begin_as_child,
    how_it_ended,
    how_its_start_ended,
    interrupts_held,
    require_importable_main,
)
from fedsim.workshop import Workshop

INSTEAD = "jobs=1 with engine=serial, which start none"

Work = tuple[PlannedRun, Experiment, Path]  # a run, the experiment that is run for it, and its folder
OnRound = Callable[[PlannedRun, RoundRecord], object]
OnEnd = Callable[[PlannedRun, "str | None"], object]
OnAgain = Callable[[PlannedRun], object]


def attempt(
    experiment: Experiment,
    folder: Path,
    workshop: Workshop,
    on_round: Callable[[RoundRecord], object],
    on_start: Callable[[Setting], object] | None = None,
) -> str | None:
    """Run an experiment, or go on with it; None, or why it failed: one line, and further ones with the details."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SettingWarning)  # a comparison shows them once, before its first run
            run(experiment, folder, resume=True, on_start=on_start, on_round=on_round, workshop=workshop)
    except FedsimError as error:
        return str(error)
    except Exception as error:  # of a plug, or of fedsim itself: this run's failure alone
        return lines_of(error)
    return None


def run_here(work: Iterable[Work], on_round: OnRound, on_end: OnEnd) -> None:
    """Carry out runs one after another in this process."""
    with Workshop() as workshop:
        for planned, experiment, folder in work:
            on_end(planned, attempt(experiment, folder, workshop, functools.partial(on_round, planned)))


def run_in_jobs(work: Iterable[Work], count: int, on_round: OnRound, on_end: OnEnd, on_again: OnAgain) -> None:
    """Carry out runs in `count` processes, each with one run at a time.

    A process that dies is replaced by another, and so is one that gives no sign of life for as long as its run's
    `timeout` says; watching over a crew of its own is one. Where `on_worker_failure` is "retry", the run that it had in
    hand is done again, `worker_retries` times at most, after `on_again` has been told; else it has failed.
    Raises WorkerError where processes cannot be started at all.
    """
    require_importable_main(INSTEAD)
    require_files(count, INSTEAD)
    waiting, losses = deque(work), Counter[str]()
    with Jobs() as jobs:
        while waiting or jobs.busy:
            jobs.grow(min(count, len(waiting) + len(jobs.busy)))
            for job in jobs.idle[: len(waiting)]:
                job.begin(*waiting.popleft())
            for job, kind, content in jobs.messages():
                if kind == "round":
                    on_round(job.planned, content)
                    continue
                planned, *_ = one = job.end()
                losses[planned.id] += kind == "lost"
                if kind == "lost" and losses[planned.id] <= _retries(planned.experiment):
                    often = f"{losses[planned.id]} of at most {plural(_retries(planned.experiment), 'time')}"
                    line = f"{planned.id}: {content}; the run is done again ({often})"
                    warnings.warn(line, FedsimWarning, stacklevel=2)
                    on_again(planned)
                    waiting.appendleft(one)
                elif kind == "lost" and losses[planned.id] > 1:
                    on_end(planned, f"{content}; the run has been tried {plural(losses[planned.id], 'time')}")
                else:
                    on_end(planned, content)


def _retries(experiment: Experiment) -> int:
    """How often a run is done again at most whose process was lost."""
    return experiment.worker_retries if experiment.on_worker_failure == "retry" else 0


class Jobs:
    """The processes of a comparison; all are gone when the `with` block ends, at once where an exception ends it."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def grow(self, count: int) -> None:
        """Start processes until there are `count`, those that have died aside."""
        self._jobs = [job for job in self._jobs if job.alive]
        while len(self._jobs) < count:
            with interrupts_held():  # children inherit that: Ctrl-C is the parent's business
                self._jobs.append(Job())

    @property
    def idle(self) -> list[Job]:
        return [job for job in self._jobs if job.alive and job.planned is None]

    @property
    def busy(self) -> list[Job]:
        return [job for job in self._jobs if job.planned is not None]

    def messages(self) -> Iterator[tuple[Job, str, Any]]:
        """Wait a moment, and say what has come: ("round", record), ("end", why it failed or None) or ("lost", why)."""
        interval = min(job.look_interval for job in self._jobs)
        wait([item for job in self._jobs for item in job.waitables], timeout=interval)
        for job in self._jobs:
            for kind, content in job.messages():
                if job.cannot_start:
                    raise WorkerError(f"no run can begin: {content}")
                yield job, kind, content

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with interrupts_held():  # half closed would be worse than late
            for job in self._jobs:
                job.dismiss()
            deadline = time.monotonic() + (GRACE if kind is None else 0.0)
            for job in self._jobs:
                job.close(deadline)


class Job:
    """One process that carries out one run after another. Start it with Ctrl-C held."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self.alive = True
        self._board = Board(1)
        self.started = False
        self._exitcode: int | None = None
        self._limit = START_TIMEOUT  # seconds of silence that are borne; infinite while it prepares or is idle
        self._silence = Silence(self._board, 0, self._limit)
        self._child = Child(_serve, self._board, name="fedsim-job", daemon=False)

    @property
    def look_interval(self) -> float:
        """Seconds after which `messages` is to be asked again at the latest."""
        return self._silence.interval

    @property
    def waitables(self) -> list[Any]:
        return [self._child.pipe, self._child.sentinel] if self.alive else []

    @property
    def planned(self) -> PlannedRun | None:
        """The run that it has in hand."""
        return None if self._work is None else self._work[0]

    @property
    def cannot_start(self) -> bool:
        """Whether it ended by itself before it started, as any other job would; see `how_its_start_ended`."""
        return not self.started and (self._exitcode or 0) > 0

    def begin(self, planned: PlannedRun, experiment: Experiment, folder: Path) -> None:
        """Send it a run, as soon as it has started: a process that does not read yet would block this one."""
        self._work, self._timeout = (planned, experiment, folder), planned.experiment.timeout
        if self.started:
            self._send()

    def _send(self) -> None:
        assert self._work is not None
        with contextlib.suppress(OSError):  # it is dead, which will be noticed
            self._child.pipe.send(self._work[1:])

    def end(self) -> Work:
        """What it had in hand."""
        work, self._work = self._work, None
        assert work is not None
        return work

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What it has said; its death, or its silence, is the end of its run too."""
        if not self.alive:
            return
        dead = self._child.exitcode is not None  # looked at first, so that what it said before is still heard
        try:
            while self._child.pipe.poll():
                kind, content = self._child.pipe.receive().load()
                self._heard(kind)
                if kind in ("round", "end"):
                    yield kind, content
        except (EOFError, OSError):
            self._child.wait(GRACE)
            dead = True
        if dead or self._silence.too_long():
            yield from self._give_up(dead)

    def _heard(self, kind: str) -> None:
        if kind == "started":
            self.started = True
            if self._work is not None:
                self._send()
        self._limit = self._timeout if kind in ("begun", "round") else math.inf
        self._silence = Silence(self._board, 0, self._limit)

    def _give_up(self, dead: bool) -> Iterator[tuple[str, Any]]:
        """Say how it ended, or end it because it hangs."""
        killed = self._child.exitcode == -signal.SIGKILL
        hint = "; if memory ran out, try fewer jobs" if killed else ""
        if dead and self.started:
            how = f", {whereabouts(self._board, 0)}, {how_it_ended(self._child.exitcode)}"
        elif dead:
            how = f" {how_its_start_ended(self._child.exitcode, INSTEAD)}"
        else:
            how = f", {whereabouts(self._board, 0)}, gave no sign of life for {self._limit:g} s"
        self._exitcode = self._child.exitcode
        self.close(0.0)
        if self.planned is not None:
            yield "lost", f"its process{how}{hint}"

    def dismiss(self) -> None:
        """Let it go, once it has ended what it does."""
        if self.alive:
            self._child.dismiss()

    def close(self, deadline: float) -> None:
        """Wait until it is gone; kill it where it has not gone by then, a time of `time.monotonic`."""
        if self.alive:
            self.alive = False
            self._child.close(deadline)


def _serve(pipe: Connection, board: Board) -> None:
    """The life of a job."""
    begin_as_child()
    Seat.watched = board
    channel = Channel(pipe)
    with Workshop() as workshop, contextlib.suppress(EOFError, OSError):  # of the pipe: the parent is gone
        channel.send(("started", None))
        while (message := channel.receive()) is not None:
            board.write(0, WORKER, NOBODY)
            board.write(0, ROUND, 0)
            try:
                experiment, folder = message.load()
            except Exception as error:  # it refers to what cannot be imported here
                failure: str | None = f"{one_line(error)}\n{traceback.format_exc()}"
            else:
                failure = attempt(
                    experiment,
                    folder,
                    workshop,
                    on_start=lambda setting: channel.send(("begun", None)),
                    on_round=lambda record: channel.send(("round", record)),
                )
            channel.send(("end", failure))
