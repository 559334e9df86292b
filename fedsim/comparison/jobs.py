"""Execute the runs of a comparison, one by one in this process or several at a time in jobs.

A job is a `ProcessPool` with a single process, so a process that dies costs one run and the other runs continue.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

import torch

from fedsim.comparison.plan import ComparisonPlan, PlannedRun, distinct
from fedsim.config.experiment import Experiment
from fedsim.core.objects import names_in, why_unsendable
from fedsim.core.randomness import sole_use_of_generators
from fedsim.errors import ExperimentError, FedsimError, FedsimWarning, ProcessLostError, SettingWarning, WorkerError
from fedsim.processes.child_process import GRACE, signals_deferred
from fedsim.processes.process_context import AbortedError, ProcessContext
from fedsim.processes.process_pool import START_TIMEOUT, ProcessPool, close_pools, wait_for
from fedsim.processes.retry import announce, last_error
from fedsim.records.record import RoundRecord
from fedsim.runs.launch import ignoring_launcher
from fedsim.runs.metadata import RunMetadata
from fedsim.runs.run import run
from fedsim.runs.session import Session
from fedsim.runs.setup import task_of
from fedsim.system.devices import free_memory, resolve_device, usable_cores
from fedsim.system.limits import format_failure, require_files

JOB_BYTES = 0.6e9  # generous estimate of the memory of a process: PyTorch, data and activations
ROW_COPIES = 3  # copies of the cohort's rows in memory, including the intermediate results of a rule
HEARTBEAT_SECONDS = 1.0  # interval of the heartbeats while a run is prepared
INSTEAD = "jobs=1 with engine=serial, which start no processes"
OnRound = Callable[[PlannedRun, RoundRecord], object]
OnEnd = Callable[[PlannedRun, "str | None"], object]  # second argument: reason of the failure, or None
OnRetry = Callable[[PlannedRun], object]


class Job(NamedTuple):
    """One run to execute.

    Attributes are the run as it was planned, the experiment with the settings to use, and the folder of the records.
    """

    run: PlannedRun
    experiment: Experiment
    folder: Path


def default_jobs(plan: ComparisonPlan, runs: Sequence[PlannedRun]) -> int:
    """Return how many runs to execute at the same time: one per CPU core, or fewer if memory is short.

    Returns 1 if an experiment uses a GPU or sets its engine.
    """
    on_gpu = any(resolve_device(run.experiment.device).type != "cpu" for run in runs)
    if not runs or on_gpu or plan.engine_chosen:
        return 1
    if reason := why_runs_unsendable(runs):
        warnings.warn(f"{reason}; runs are executed one at a time", FedsimWarning, stacklevel=2)
        return 1
    by_cores = usable_cores() // max(run.experiment.threads_per_process for run in runs)
    if min(by_cores, len(runs)) <= 1:
        return 1
    sizes = distinct(
        runs,
        lambda experiment: [
            experiment.resolved()["model"],
            experiment.largest_cohort,
            experiment.precision,
            experiment.stores_updates is None,
        ],
    )
    by_memory = 0.8 * free_memory() / max(job_bytes(run.experiment) for run in sizes)
    return max(1, int(min(len(runs), by_cores, by_memory)))  # the free memory may be infinite


def job_bytes(experiment: Experiment) -> float:
    """Return an estimate of the memory in bytes that a process needs for this experiment."""
    task = task_of(experiment, torch.device("cpu"))
    return JOB_BYTES + ROW_COPIES * (1 if task.streams else experiment.largest_cohort) * task.row_bytes


def why_runs_unsendable(runs: Iterable[PlannedRun]) -> str | None:
    """Return an error message if the settings of these runs cannot be sent to other processes, otherwise None."""
    names = {name: name for run in runs for name in names_in(run.experiment.model_dump())}
    return why_unsendable(names.values())


def run_here(planned_runs: Iterable[Job], session: Session, on_round: OnRound, on_end: OnEnd) -> None:
    """Execute the runs one after another in this process and session. See `run_in_jobs` for the other arguments."""
    with sole_use_of_generators(for_run=True):
        for planned, experiment, folder in planned_runs:
            on_end(planned, attempt(experiment, folder, session, partial(on_round, planned)))


def run_in_jobs(planned_runs: Iterable[Job], count: int, on_round: OnRound, on_end: OnEnd, on_retry: OnRetry) -> None:
    """Execute the runs in at most `count` processes, each of which executes one run at a time.

    A run is repeated if its process dies or no longer responds. After `max_restarts` repetitions, it counts as
    failed.

    Args:
        planned_runs: the runs to execute.
        count: maximum number of processes.
        on_round: called after each round with the run and the record of the round.
        on_end: called after each run with the run and an error message, or None if the run succeeded.
        on_retry: called with a run before it is repeated.

    Raises WorkerError if processes cannot be started.
    """
    require_files(count, INSTEAD)
    planned_runs = list(planned_runs)
    threads = 1 if all(job.experiment.threads_per_process == 1 for job in planned_runs) else None
    new_pool = partial(ProcessPool, 1, threads, START_TIMEOUT, instead=INSTEAD, called="its process", daemon=False)
    waiting, grace = deque((job, 1) for job in planned_runs), 0.0  # pairs of a run and the number of its attempt
    pools, busy = list[ProcessPool](), dict[ProcessPool, tuple[Job, int]]()
    try:
        while waiting or busy:
            while len(pools) < min(count, len(waiting) + len(busy)):
                with signals_deferred():  # so that an interrupt cannot lose a pool that `finally` must close
                    pools.append(new_pool())
            for pool in pools:
                if pool not in busy and waiting:
                    busy[pool] = job, _ = waiting.popleft()
                    pool.begin(_job, job.experiment, job.folder, on_message=partial(_hear, pool, job.run, on_round))
            ready = wait_for(busy)
            for pool, (job, number) in list(busy.items()):
                try:
                    results = pool.poll(ready)
                except (ExperimentError, WorkerError) as error:
                    pools.remove(pool)
                    pool.close()
                    if not (pool.has_started or isinstance(error, ProcessLostError)):
                        raise WorkerError(f"no run can start: {error}") from None
                    results = [_reason_of_failure(job.run, number, error)]
                if results is None:
                    continue
                del busy[pool]
                if results == [None] and not pool.at_work:  # the process was lost, so the run is repeated
                    waiting.appendleft((job, number + 1))
                    on_retry(job.run)
                else:
                    on_end(job.run, results[0])
        grace = GRACE
    finally:
        close_pools(pools, grace)


def attempt(
    experiment: Experiment,
    folder: Path,
    session: Session,
    on_round: Callable[[RoundRecord], object],
    on_start: Callable[[RunMetadata], object] | None = None,
) -> str | None:
    """Execute a run, or continue it if its folder contains an earlier part. See `fedsim.run` for the arguments.

    Returns None if the run succeeds, otherwise an error message.
    """
    try:
        with warnings.catch_warnings(), ignoring_launcher():
            warnings.simplefilter("ignore", SettingWarning)  # shown once before the first run of the comparison
            run(experiment, folder, resume=True, on_start=on_start, on_round=on_round, session=session, progress=False)
    except FedsimError as error:
        return str(error)
    except Exception as error:  # a bug in a component or in fedsim fails this run only
        return format_failure(error)
    return None


def _hear(pool: ProcessPool, planned: PlannedRun, on_round: OnRound, record: RoundRecord | None) -> None:
    """Handle a message from a run's process: the record of a round, or None when the first round is about to start."""
    pool.expect_heartbeats(planned.experiment.process_timeout)
    if record is not None:
        on_round(planned, record)


def _reason_of_failure(planned: PlannedRun, number: int, error: FedsimError) -> str | None:
    """Return why a run failed, or None (with a warning) if the run will be repeated because its process died.

    Args:
        planned: the run.
        number: how often the run has been tried.
        error: the error that ended the last try.
    """
    if not isinstance(error, ProcessLostError):
        return str(error)
    if "SIGKILL" in error.why:
        line = f"{error}; if memory ran out, try fewer jobs"
        error = ProcessLostError(line, error.why, error.process, error.worker)
    retries = planned.experiment.max_restarts
    if last := last_error(error, number, retries, "the run has been tried"):
        return str(last)
    announce(error, number, retries, run=f"{planned.id}: ", then=", and the run is repeated")
    return None


def _job(process: ProcessContext, experiment: Experiment, folder: Path) -> str | None:
    """Execute a run in a separate process. Return None if the run succeeds, otherwise an error message."""
    ProcessContext.monitored = process.table
    process.table.begin_work(0)
    if "session" not in process.state:
        process.state["session"] = Session()
        Finalize(None, process.state["session"].close, exitpriority=0)  # runs before its engine's processes are ended
    is_prepared = threading.Event()

    def send_heartbeats() -> None:
        """Tell the parent process at regular intervals that this process is alive, until the first round starts."""
        with contextlib.suppress(AbortedError):
            while not is_prepared.wait(HEARTBEAT_SECONDS):
                process.heartbeat()

    def on_start(_: object) -> None:
        is_prepared.set()
        process.send(None)

    threading.Thread(target=send_heartbeats, name="fedsim-preparing", daemon=True).start()
    try:
        return attempt(experiment, folder, process.state["session"], process.send, on_start)
    finally:
        is_prepared.set()
