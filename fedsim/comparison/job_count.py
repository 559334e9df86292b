"""How many runs of a comparison are done at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fedsim.comparison.grid import Grid, PlannedRun
from fedsim.config.experiment import Experiment
from fedsim.core.objects import names_in, why_unsendable
from fedsim.core.rows import Layout
from fedsim.errors import FedsimWarning
from fedsim.records.rows import canonical
from fedsim.runs.setup import task_of
from fedsim.system.devices import free_memory, resolve_device, usable_cores
from fedsim.system.precision import PRECISIONS

ONE_PROCESS_ENGINE = "serial"
POOL_SETTINGS = ("timeout", "batched", "worker_retries")  # that this engine does not have
JOB_BYTES = 0.6e9  # of a process: PyTorch, data and activations, generously
ROW_COPIES = 3  # of the cohort's rows: the rows, and the intermediate results of a rule


def default_jobs(grid: Grid, runs: Sequence[PlannedRun]) -> int:
    """Return the default number of runs at a time: one per core, as far as memory allows.

    On a CPU several runs in one process each are faster than one run in several processes, and the results are the
    same. One run at a time if the experiment sets its engine or uses a GPU.
    """
    on_gpu = any(resolve_device(run.experiment.device).type != "cpu" for run in runs)
    if not runs or on_gpu or grid.engine_chosen:
        return 1
    if reason := why_runs_unsendable(runs):
        warnings.warn(f"{reason}; one run at a time", FedsimWarning, stacklevel=2)
        return 1
    by_cores = usable_cores() // max(run.experiment.threads_per_process for run in runs)
    if min(by_cores, len(runs)) <= 1:
        return 1
    sizes = distinct(runs, lambda each: [each.resolved()["model"], each.cohort_size, each.precision])
    by_memory = 0.8 * free_memory() / max(job_bytes(run.experiment) for run in sizes)
    return max(1, int(min(len(runs), by_cores, by_memory)))  # the free memory may be infinite


def job_bytes(experiment: Experiment) -> float:
    """Return about how many bytes of memory a process needs for this experiment."""
    parameters = Layout.of(task_of(experiment, torch.device("cpu")).new_module()).d
    row_bytes = parameters * PRECISIONS[experiment.precision].rows.itemsize
    return JOB_BYTES + ROW_COPIES * experiment.cohort_size * row_bytes


def in_one_process(experiment: Experiment) -> Experiment:
    """Return the same experiment for one process; the parent process watches for hanging and repeats lost runs."""
    defaults = {key: Experiment.model_fields[key].default for key in POOL_SETTINGS}
    return experiment.model_copy(update={"engine": ONE_PROCESS_ENGINE, **defaults})


def why_runs_unsendable(runs: Iterable[PlannedRun]) -> str | None:
    """Return why the objects of these runs cannot be sent to other processes; None if they can be sent."""
    names = {name: name for run in runs for name in names_in(run.experiment.model_dump())}
    return why_unsendable(names.values())


def distinct(runs: Iterable[PlannedRun], key: Callable[[Experiment], Any]) -> Iterable[PlannedRun]:
    """Return one run for each different `key(experiment)`, a JSON value."""
    return {canonical(key(run.experiment)): run for run in runs}.values()
