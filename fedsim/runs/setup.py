"""Preparation of a run: from an experiment to an engine that is ready for the first round."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.asynchronous.server_state import GradientOnly
from fedsim.byzantine import Attackers
from fedsim.clients import as_algorithm
from fedsim.config.engines import RACING, traits_of
from fedsim.config.experiment import Experiment
from fedsim.config.schema import OWN
from fedsim.core.learning_task import class_weights_of
from fedsim.core.objects import names_in, own_copy, why_unsendable
from fedsim.core.randomness import preserve_random_state
from fedsim.core.rows import ColumnSpans, Layout
from fedsim.data import Shards, TensorData
from fedsim.data.drawn_tests import strata_of
from fedsim.data.formats.images import lacks_files
from fedsim.data.sources import default_root
from fedsim.data.subsets import split_validation
from fedsim.engines import Engine, RunTask
from fedsim.engines import engine as engines
from fedsim.errors import WORKER_NAMES, DataError, ExperimentError, FedsimWarning, show, workers_named
from fedsim.privacy import Releases
from fedsim.processes.retry import STARTED, retried
from fedsim.records.run_folder import RunFolder
from fedsim.rounds.cohorts import sampler_of
from fedsim.rounds.participants import (
    attackers_of,
    global_tests,
    names_of_workers,
    releases_of,
    server_samples,
    shards_of,
    tests_of_owners,
    workers_to_describe,
)
from fedsim.runs import checks
from fedsim.runs.session import Session
from fedsim.system.c_libraries import warn_if_threads_spin
from fedsim.system.devices import shares_memory
from fedsim.system.global_settings import run_settings
from fedsim.system.precision import PRECISIONS, full_precision, without_recurrent_advice
from fedsim.training.memory import explain_oom
from fedsim.training.task import Fragment

MOST_RACING = 32  # default maximum of a race's processes; each needs about 250 MB of memory


@contextlib.contextmanager
def begun(
    experiment: Experiment,
    session: Session,
    folder: RunFolder | None = None,
    on_setup: Callable[[str], object] = lambda step: None,
) -> Iterator[tuple[RunTask, Engine]]:
    """Return a context manager that prepares a run, yields (task, engine), and frees the run's memory at the end.

    Args:
        experiment: experiment to run.
        session: session with the engine and the data.
        folder: writer of the run's records; None to record nothing.
        on_setup: function that is called with the name of each step of the preparation.

    Raises:
        ExperimentError, DataError: the experiment cannot be run on this machine.
    """
    device = engines.get(experiment.engine).target.device_for(experiment.device)
    PRECISIONS[experiment.precision].require(device)
    engine_name, processes = engine_of(experiment), processes_of(experiment, device)
    threads = experiment.threads_per_process
    warn_if_threads_spin(threads)
    on_setup(f"starting the engine {experiment.engine}")  # its processes start while the data loads
    with (
        run_settings(threads),  # the user's modules may have changed settings when they were imported
        preserve_random_state(device),
        without_recurrent_advice(device),
        workers_named(),
        session.engine(
            engine_name, device, processes, threads, experiment.process_timeout, experiment.start_method
        ) as engine,
    ):
        engine.prepare(device)
        on_setup(f"making the model {show(experiment.model.name)}")
        task = replace(task_of(experiment, device), scratch_folder=str(folder.path) if folder else None)
        try:
            with explain_oom(task, processes):
                checks.check_memory(type(engine), task, processes, recorded=folder is not None)
                with full_precision(device):
                    task = _begin(engine, experiment, task, session, folder, on_setup)
                yield task, engine
        except torch.OutOfMemoryError as error:
            raise ExperimentError(f"device = {show(str(task.device))}: {error}") from error


def _begin(
    engine: Engine,
    experiment: Experiment,
    task: RunTask,
    session: Session,
    folder: RunFolder | None,
    on_setup: Callable[[str], object],
) -> RunTask:
    """Load the data of a run, and let the engine begin its task. Returns the task with its Byzantine workers.

    If a process dies, the engine begins again, up to `max_restarts` times. Only the engine keeps references to the
    tensors, so that it can free them.
    """
    task, *data = _with_data(experiment, task, session, task.device, on_setup)
    on_setup(f"getting the engine {experiment.engine} ready for the first round")
    shared, note = engine.allocate(task, *data), folder.event if folder else None
    retried(lambda: engine.begin(task, shared), experiment.max_restarts, STARTED, note)
    return task


def check_run(experiment: Experiment, session: Session, *, to_run: bool) -> RunTask:
    """Return the description of a run. Raise an error if the experiment cannot be run.

    Args:
        experiment: experiment to check.
        session: session that keeps the data for the next check.
        to_run: whether to use the device of the run, and to download missing data. Otherwise, a CPU is used, and the
            checks that need missing data are skipped.
    """
    device, data = torch.device("cpu"), experiment.data
    if to_run:
        device = engines.get(experiment.engine).target.device_for(experiment.device)
    task = task_of(experiment, device)
    if to_run or not lacks_files(data.name, data.root or default_root(), **data.params):
        with preserve_random_state(device), full_precision(device), without_recurrent_advice(device), workers_named():
            task, *_ = _with_data(experiment, task, session, device, lambda step: None)
    return task


def releases_before(experiment: Experiment) -> Releases | None:
    """Return the noisy sums that a run of an experiment releases in each round, or None without privacy.

    Data is only loaded if several workers, or a worker and the server, may hold the same sample.
    """
    may_overlap = "worker" in experiment.partition.registration.takes or experiment.rule.accepts("root")
    if experiment.protects != "sample" or not may_overlap:
        return experiment.releases(holders=1)
    cpu = torch.device("cpu")
    with Session() as session, workers_named():
        _, _, _, shards, root, *_ = _with_data(experiment, task_of(experiment, cpu), session, cpu, lambda step: None)
    return releases_of(experiment, shards, root)


def _with_data(
    experiment: Experiment, task: RunTask, session: Session, device: torch.device, on_setup: Callable[[str], object]
) -> tuple[RunTask, TensorData, TensorData, Shards, np.ndarray, Shards | None, TensorData, TensorData]:
    """Load the data of a run, divide it among the workers, and check it.

    Returns (task with its Byzantine workers and the names of workers, training samples, test samples, shards, indices
    of the server's samples, local test samples of the workers, validation samples, data set of the workers' own test
    samples). Later error messages show the workers' names, until the block of `workers_named` ends.
    """
    data = experiment.data
    on_setup(f"loading the data set {show(data.name)}")
    source = data.source(experiment.partition)
    train, test = session.data(*source, device)
    drawn = train.drawn_by is not None or data.validation_fraction or data.local_test_fraction not in (0, OWN)
    if data.split_by is not None and not drawn:
        raise DataError(
            f"data.split_by = {show(data.split_by)}: has no effect, because the data has its own test samples; omit it"
        )
    strata = strata_of(train, **source[2])
    checked = own_copy(task)  # the checks call user objects, which may change their state
    train, test = checks.with_numbers(checked, train, test)
    checks.check_outputs_of_model(checked, train, test, data.name)
    classes = max(train.classes, test.classes)
    # virtual shards may overlap
    fewest = 1 if "worker" in experiment.partition.registration.takes else experiment.workers
    train, validation, index_of = split_validation(train, data.validation_fraction, experiment.seed, fewest, strata)
    strata = strata if index_of is None else strata.take(index_of >= 0)

    on_setup(f"partitioning the data among {experiment.workers:,} workers")
    shards, worker_tests = shards_of(experiment, train, index_of, strata)
    task = replace(task, worker_names=names_of_workers(experiment, train, test, shards))
    WORKER_NAMES.set(task.worker_names)
    checks.warn_of_held_out_classes(experiment, train, validation, shards, worker_tests)
    weights = class_weights_of(task.learning_task, lambda: _trained_targets(train, shards), classes)
    checks.check_sample_gradients(replace(checked, class_weights=weights), train)
    task = replace(task, byzantine=attackers_of(experiment, train, shards), class_weights=weights)
    sampled = workers_to_describe(shards, experiment.seed)
    sizes = {worker: shards.size(worker) for worker in (range(len(shards)) if sampled is None else sampled)}
    root = server_samples(experiment, train, worker_tests) if experiment.rule.accepts("root") else np.zeros(0, int)
    checks.check_local_work(task, sizes)
    checks.check_smallest_batch(task, train, {**sizes, len(shards): len(root)} if len(root) else sizes)
    sampler_of(experiment, shards)  # raises an error if it needs sizes of shards that are not known
    releases = releases_of(experiment, shards, root)  # raises an error if epsilon cannot be computed
    if (owned := tests_of_owners(experiment, train, test, shards)) is not None:
        by_owner, found = owned
        train = replace(train, assumed=(*train.assumed, found))
        worker_tests = by_owner if data.local_test_fraction == OWN else worker_tests
    own_tests, test = test, global_tests(test)
    if releases and releases.holders > 1 and experiment.privacy.target_epsilon is not None:
        private = task_of(experiment.with_noise(releases), device)
        task = replace(task, experiment=private.experiment, algorithm=private.algorithm)
    return task, train, test, shards, root, worker_tests, validation, own_tests


def _trained_targets(train: TensorData, shards: Shards) -> Tensor:
    """Return the targets of the workers' samples, or of all training samples if not all shards are stored."""
    return train.sample_targets[shards.together(np.arange(len(shards)))[0] if shards.listed else slice(None)]


def task_of(experiment: Experiment, device: torch.device, *, weights: bool = True) -> RunTask:
    """Return a description of the run of an experiment on `device`.

    With weights=False, the file `model.weights` is not needed, and the model is initialized at random.

    Raises ExperimentError if the model cannot be built or does not fit the client algorithm.
    """
    local_experiment = experiment.with_noise(experiment.releases(holders=1)).own()
    if not weights:
        model = local_experiment.model.model_copy(update={"weights": None})
        local_experiment = local_experiment.model_copy(update={"model": model})
    algorithm = GradientOnly() if local_experiment.sends_gradients else as_algorithm(local_experiment.local.component)
    task = RunTask(local_experiment, device, algorithm, Attackers(frozenset(experiment.byzantine)))
    module = checks.checked_model(task)
    task = replace(task, algorithm=algorithm.for_model(module))
    layout = Layout.of(module)
    sent = task.algorithm.fragments(layout)
    fragments = [
        Fragment(
            ColumnSpans.of_entries(entries),
            tuple(tuple(entry.shape) for entry in entries),
            f"fragment_{number}." if len(sent) > 1 else "",
        )
        for number, entries in enumerate(sent)
    ]
    task = replace(task, fragments=tuple(fragments)).with_streaming(layout.d)
    checks.check_client_algorithm(task, layout)
    checks.check_privacy(task, layout)
    return task


def engine_of(experiment: Experiment) -> str:
    """Return the name of the engine that runs an experiment."""
    if experiment.mode != "race":
        return experiment.engine
    return traits_of(experiment.engine).races_on or RACING  # a comparison may set engine = "serial"


def processes_of(experiment: Experiment, device: torch.device) -> int:
    """Return the number of processes that the experiment uses on `device`.

    Raises ExperimentError if this number of processes is impossible.
    """
    engine, most = engines.get(engine_of(experiment)).target, experiment.cohort_size
    if experiment.mode == "race" and device.type == "cpu":  # workers in one process would not race with each other
        default = min(most, MOST_RACING)
    else:
        default = engine.traits.default_processes(device, most, experiment.threads_per_process)
    requested = experiment.processes if "processes" in engine.traits.settings(most) else None
    processes = min(most, requested or default)
    # The dataset object need not be sendable, because processes receive its samples as tensors.
    reason = why_unsendable(names_in(experiment.model_dump(exclude={"data": {"name"}})))
    if reason and engine.traits.may_lose_processes(processes):
        if not engine.traits.chooses:
            raise ExperimentError(f"engine = {show(experiment.engine)}: {reason}; use engine=serial")
        if processes > 1:
            warnings.warn(f"{reason}; the run uses one process", FedsimWarning, stacklevel=2)
        return 1
    if processes > 1 and not shares_memory(device):
        raise ExperimentError(
            f'engine = "{experiment.engine}": processes cannot share memory of the device {device}; use processes=1'
        )
    return processes
