"""Do the runs of a comparison one by one in this process, or several at once in child processes.

The loss of a process costs one run; the others continue. A `ProcessPool` cannot give that, because its processes carry
out one call together and the first failure ends them all. Nor can `concurrent.futures.ProcessPoolExecutor`: the death
of one process breaks the executor and all its pending calls.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.comparison.grid import PlannedRun
from fedsim.config.experiment import Experiment
from fedsim.engines.pool.barrier import AbortedError, HeartbeatTable
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.pool.worker_process import START_TIMEOUT, WorkerProcess
from fedsim.errors import FedsimError, FedsimWarning, SettingWarning, WorkerError, one_line, plural
from fedsim.records.record import RoundRecord
from fedsim.runs.run import run
from fedsim.runs.session import Session
from fedsim.runs.setup import PreparedRun
from fedsim.system.child_process import GRACE, init_child_process, require_importable_main, signals_deferred
from fedsim.system.limits import format_failure, require_files
from fedsim.system.messages import Channel

HEARTBEAT_SECONDS = 1.0  # between heartbeats while a run is prepared
INSTEAD = "jobs=1 with engine=serial, which start none"
OnRound = Callable[[PlannedRun, RoundRecord], object]
OnEnd = Callable[[PlannedRun, "str | None"], object]  # with the reason if the run failed
OnRetry = Callable[[PlannedRun], object]


class Work(NamedTuple):
    """A run, the experiment that a job executes for it, and the folder of its records."""

    run: PlannedRun
    experiment: Experiment
    folder: Path


def run_here(work: Iterable[Work], on_round: OnRound, on_end: OnEnd) -> None:
    """Do the runs one after another in this process."""
    with Session() as session:
        for planned, experiment, folder in work:
            on_end(planned, attempt(experiment, folder, session, partial(on_round, planned)))


def run_in_jobs(work: Iterable[Work], count: int, on_round: OnRound, on_end: OnEnd, on_retry: OnRetry) -> None:
    """Do the runs in at most `count` processes, each of which does one run at a time.

    A process that dies, or gives no sign of life for the `timeout` of its run, is replaced. Its run is repeated up to
    `worker_retries` times; then the run has failed.

    Raises WorkerError if processes cannot be started.
    """
    require_importable_main(INSTEAD)
    require_files(count, INSTEAD)
    waiting, losses, jobs, grace = deque(work), Counter[str](), list[Job](), 0.0
    try:
        while busy := _assign(waiting, jobs, count):
            sources: list[Any] = [source for job in busy for source in (job.pipe, job.sentinel)]
            wait(sources, timeout=min(job.look_interval for job in busy))
            for job in busy:
                for kind, each, content in job.events():
                    if kind == "round":
                        on_round(each.run, content)
                    elif kind == "end":
                        on_end(each.run, content)
                    else:
                        _close(jobs, [job], 0.0)
                        losses[each.run.id] += 1
                        tries = losses[each.run.id]
                        if _retry(each.run, tries, content):
                            on_retry(each.run)
                            waiting.appendleft(each)
                        else:
                            note = f"; the run has been tried {tries} times" if tries > 1 else ""
                            on_end(each.run, content + note)
        grace = GRACE
    finally:
        _close(jobs, list(jobs), grace)


def attempt(
    experiment: Experiment,
    folder: Path,
    session: Session,
    on_round: Callable[[RoundRecord], object],
    on_start: Callable[[PreparedRun], object] | None = None,
) -> str | None:
    """Run or resume an experiment; return None, or the reason of the failure: one line, then details."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SettingWarning)  # a comparison shows each once, before its first run
            run(
                experiment,
                folder,
                resume=True,
                on_start=on_start,
                on_round=on_round,
                session=session,
                progress=False,
            )
    except FedsimError as error:
        return str(error)
    except Exception as error:  # of a plug or of fedsim: only this run has failed
        return format_failure(error)
    return None


def _assign(waiting: deque[Work], jobs: list[Job], count: int) -> list[Job]:
    """Give the waiting runs to idle jobs, then to new ones; return the jobs that have a run."""
    for job in jobs:
        if job.work is None and waiting:
            job.begin(waiting.popleft())
    while waiting and len(jobs) < count:
        with signals_deferred():  # child processes inherit the blocked signals: only the parent handles Ctrl-C
            jobs.append(Job(waiting.popleft()))
    return [job for job in jobs if job.work is not None]


def _retry(run: PlannedRun, losses: int, reason: str) -> bool:
    """Whether a run whose process was lost is repeated; warns if it is."""
    retries = run.experiment.worker_retries
    if losses <= retries:
        often = f"{losses} of at most {plural(retries, 'time')}"
        warnings.warn(f"{run.id}: {reason}; the run is done again ({often})", FedsimWarning, stacklevel=3)
    return losses <= retries


def _close(jobs: list[Job], closed: Sequence[Job], grace: float) -> None:
    """End these jobs and remove them from the list; kill the processes that are still there after `grace` seconds."""
    with signals_deferred():
        for job in closed:
            job.dismiss()
        deadline = time.monotonic() + grace
        for job in closed:
            jobs.remove(job)
            job.close(deadline)


class Job(WorkerProcess):
    """A process that does one run after another. Create it inside `signals_deferred`."""

    def __init__(self, work: Work) -> None:
        self.work: Work | None = work  # sent when the process has started: before, it does not read its pipe
        table = HeartbeatTable(1)
        super().__init__(_serve, table, table=table, instead=INSTEAD, name="fedsim-job", daemon=False)

    def begin(self, work: Work) -> None:
        """Send a run to the process."""
        self.work = work
        self.expect_heartbeats(START_TIMEOUT)
        with contextlib.suppress(OSError):  # the process is dead; `events` says so
            self.pipe.send((work.experiment, work.folder))

    def events(self) -> Iterator[tuple[str, Work, Any]]:
        """Yield ("round", work, record), ("end", work, None or error) or ("lost", work, reason).

        Raises WorkerError if the process could not start, as no other could.
        """
        work = self.work
        assert work is not None
        dead = self.exitcode is not None  # read first: what the process sent before its death still counts
        try:
            while self.pipe.poll() and (message := self.pipe.receive()):
                kind, content = message.load()
                if kind == "started":
                    self.started = True
                    self.begin(work)
                    continue
                self.expect_heartbeats(math.inf if kind == "end" else work.run.experiment.timeout)
                if kind == "end":
                    self.work = None
                if kind != "prepared":
                    yield kind, work, content
                if kind == "end":
                    return
        except (EOFError, OSError):
            dead = True
        if dead or self.is_silent():
            reason = self._reason_of_loss(dead)
            if self.failed_at_start:
                raise WorkerError(f"no run can begin: {reason}")
            yield "lost", work, reason

    def _reason_of_loss(self, dead: bool) -> str:
        reason = self.describe_death() if dead else self.describe_silence()
        where = f", {self._table.activity(0)}," if self.started else ""
        hint = "; if memory ran out, try fewer jobs" if self.exitcode == -signal.SIGKILL else ""
        return f"its process{where} {reason}{hint}"


def _serve(pipe: Connection, table: HeartbeatTable) -> None:
    """The main function of the process of a job."""
    init_child_process()
    ProcessContext.monitored = table
    channel = Channel(pipe)
    with Session() as session, contextlib.suppress(EOFError, OSError):  # of the pipe: the parent has ended
        channel.send(("started", None))
        while (message := channel.receive()) is not None:
            table.begin_work(0)
            try:
                experiment, folder = message.load()
            except Exception as error:  # the experiment names something that cannot be imported here
                channel.send(("end", f"{one_line(error)}\n{traceback.format_exc()}"))
                continue
            on_round = lambda record: channel.send(("round", record))  # noqa: E731
            with _heartbeats_until_prepared(table, channel) as prepared:
                reason = attempt(experiment, folder, session, on_round, prepared)
            channel.send(("end", reason))


@contextlib.contextmanager
def _heartbeats_until_prepared(table: HeartbeatTable, channel: Channel) -> Iterator[Callable[[object], None]]:
    """Send heartbeats from a thread until the callback is called, since preparing a run may take any time.

    The rounds send their own heartbeats.
    """
    is_prepared = threading.Event()

    def send_heartbeats() -> None:
        with contextlib.suppress(AbortedError):
            while not is_prepared.wait(HEARTBEAT_SECONDS):
                table.heartbeat(0)

    def end(_: object) -> None:
        is_prepared.set()
        channel.send(("prepared", None))

    threading.Thread(target=send_heartbeats, name="fedsim-preparing", daemon=True).start()
    try:
        yield end
    finally:
        is_prepared.set()
