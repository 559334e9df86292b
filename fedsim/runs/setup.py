"""From an experiment to an engine that is ready for the first round."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsim.asynchronous.server_state import GradientOnly
from fedsim.byzantine import Attackers
from fedsim.clients import as_algorithm
from fedsim.config.experiment import Experiment
from fedsim.config.validation import what_needs_rows
from fedsim.core.objects import names_in, own_copy, why_unsendable
from fedsim.core.randomness import preserve_random_state
from fedsim.core.rows import Layout
from fedsim.data import Shards, TensorData, label_counts, transforms_of_workers
from fedsim.data.sources import default_root, lacks_files
from fedsim.data.subsets import split_validation
from fedsim.engines import Engine, Schedule, TaskSpec
from fedsim.engines import engine as engines
from fedsim.engines.executor import Executor, MakeExecutor
from fedsim.engines.memory import buffer_bytes, explain_oom
from fedsim.engines.named import RACING
from fedsim.engines.pool.retry import Note, announce, retried
from fedsim.engines.schedule import Amount, DrawnAmount
from fedsim.engines.task import SharedState
from fedsim.errors import ExperimentError, FedsimWarning, show
from fedsim.rounds.participants import attackers_of, cohorts_of, server_samples, shards_of, workers_to_describe
from fedsim.rounds.simulation import Simulation
from fedsim.runs import checks
from fedsim.runs.session import Session
from fedsim.system.c_libraries import warn_if_threads_spin
from fedsim.system.devices import describe_device, shares_memory
from fedsim.system.precision import PRECISIONS

MOST_RACING = 32  # processes of a race by default; each takes a quarter of a gigabyte


@dataclass(frozen=True)
class PreparedRun:
    """The facts of a run that are known before its first round.

    Attributes:
        experiment: what is run.
        task: what all processes know of it.
        device: its description.
        how: the choices of the engine, such as the number of processes.
        parameters: of the model.
        train_samples, test_samples: of the data set, without those held out.
        validation_samples: held out of the training samples.
        sampled_workers: the workers that `label_counts` describes, of a virtual population; None: all of them.
        label_counts: samples of each class, int [workers, classes]; of one class if targets are no labels.
        byzantine: the Byzantine workers; empty if each round draws its own.
        row_bytes: size of one model or gradient.
        buffer_bytes: size of the buffers that a worker sends with its model; 0 unless buffers are averaged.
        done: rounds that a resumed run has finished before.
    """

    experiment: Experiment
    task: TaskSpec
    device: str
    how: dict[str, Any]
    parameters: int
    train_samples: int
    test_samples: int
    validation_samples: int
    sampled_workers: list[int] | None
    label_counts: np.ndarray
    byzantine: list[int]
    row_bytes: int
    buffer_bytes: int
    done: int = 0

    @property
    def shard_sizes(self) -> list[int]:
        """The number of samples of each worker that `label_counts` describes."""
        return self.label_counts.sum(1).tolist()

    @property
    def record_bytes(self) -> int:
        """The approximate size of the large files that the run writes."""
        experiment = self.experiment
        rows = experiment.records.model + len(experiment.records.updates) * experiment.cohort_size
        if experiment.checkpoint.every != 0:
            each = 1 if experiment.policy.bind().in_rounds else experiment.cohort_size
            if self.task.hook is not None and self.task.hook.keeps:
                each += self.how["ranks"]
            rows += (experiment.checkpoint.keep + 1) * each  # the oldest is removed after the newest is written
        return self.row_bytes * rows

    def facts(self) -> dict[str, Any]:
        """The facts for `environment.json`."""
        return {
            "device": self.device,
            "arithmetic": self.task.precision.facts(),
            **self.how,
            "parameters": self.parameters,
            "train_samples": self.train_samples,
            "test_samples": self.test_samples,
            **({"validation_samples": self.validation_samples} if self.validation_samples else {}),
            "smallest_shard": min(self.shard_sizes),
            "largest_shard": max(self.shard_sizes),
            **({} if self.sampled_workers is None else {"workers_looked_at": len(self.sampled_workers)}),
        }


@contextlib.contextmanager
def prepare(
    experiment: Experiment,
    session: Session,
    note: Note | None = None,
    on_setup: Callable[[str], object] = lambda step: None,
    *,
    scratch: str | None = None,
) -> Iterator[tuple[PreparedRun, Engine]]:
    """Prepare a run; a context manager that gives its facts and an engine of the session, and frees the engine's task.

    Args:
        experiment: what to run.
        session: owns the engine and the data.
        note: called for every process that is lost and replaced; see `RunFolder.event`.
        on_setup: called with the name of each step of the preparation.
        scratch: folder for temporary files; None: that of the system.

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
        preserve_random_state(device),
        session.engine(engine_name, processes, threads, experiment.timeout, device) as engine,
        contextlib.ExitStack() as stack,
    ):
        on_setup(f"making the model {show(experiment.model.name)}")
        task = replace(task_of(experiment, device), scratch_folder=scratch)
        stack.enter_context(_explained_oom(task, processes))
        checks.check_memory(experiment, engines.get(engine_name).target, task, processes, recorded=note is not None)

        task, train, test, validation, shards, worker_tests, sampled = _with_data(
            experiment, task, session, device, on_setup
        )
        described: Sequence[int] = range(len(shards)) if sampled is None else sampled

        on_setup(f"getting the engine {experiment.engine} ready for the first round")
        root = server_samples(experiment, train, worker_tests) if task.rule.accepts("root") else None
        shared = engine.allocate(task, experiment.cohort_size, train, test, shards, root, worker_tests, validation)
        how = _begin(experiment, engine, task, shared, note)
        shards_described = [shards.of(worker).numpy() for worker in described]
        prepared = PreparedRun(
            experiment=experiment,
            task=task,
            device=describe_device(device),
            how=how,
            parameters=len(shared.global_row),
            train_samples=len(train),
            test_samples=len(test),
            validation_samples=len(validation),
            sampled_workers=sampled,
            label_counts=_label_counts(train, shards_described, shared.classes),
            byzantine=sorted(task.byzantine.fixed),
            row_bytes=shared.global_row.nbytes,
            buffer_bytes=buffer_bytes(task, shared),
        )
        del shared  # the engine must be the last to hold its memory when it leaves the task
        yield prepared, engine


def _label_counts(train: TensorData, shards: Sequence[np.ndarray], classes: int) -> np.ndarray:
    if not train.has_labels:
        return np.array([[len(shard)] for shard in shards])
    return label_counts(train.targets.cpu().numpy(), shards, classes)


def check_run(experiment: Experiment) -> None:
    """Find the errors that a run would report before its first round. Data that is not here is not downloaded."""
    cpu, data = torch.device("cpu"), experiment.data
    task = task_of(experiment, cpu)
    if not lacks_files(data.dataset, data.root or default_root()):
        with Session() as session:
            _with_data(experiment, task, session, cpu, lambda step: None)


def _with_data(
    experiment: Experiment, task: TaskSpec, session: Session, device: torch.device, on_setup: Callable[[str], object]
) -> tuple[TaskSpec, TensorData, TensorData, TensorData, Shards, Shards | None, list[int] | None]:
    """Load and divide the data, and check it: task, train, test, validation, shards, worker tests, sampled workers."""
    data = experiment.data
    on_setup(f"loading the data set {show(data.dataset)}")
    train, test = session.data(data.dataset, data.root, data.params, device)
    checks.check_outputs_of_model(experiment, own_copy(task), train, test)  # calls objects that may keep what they see
    fewest = 1 if "worker" in experiment.partition.plug.takes else experiment.workers  # virtual shards may overlap
    train, validation = split_validation(train, data.validation, experiment.seed, fewest)

    on_setup(f"partitioning the data among {experiment.workers:,} workers")
    shards, worker_tests = shards_of(experiment, train)
    task = replace(task, byzantine=attackers_of(experiment, train, shards))
    sampled = workers_to_describe(shards, experiment.seed)
    sizes = {worker: shards.size(worker) for worker in (range(len(shards)) if sampled is None else sampled)}
    checks.check_local_work(experiment, task, train, sizes)
    cohorts_of(experiment, shards)  # raises an error if it needs sizes of shards that are not known
    return task, train, test, validation, shards, worker_tests, sampled


def task_of(experiment: Experiment, device: torch.device) -> TaskSpec:
    """The part of an experiment that every process needs. Raises ExperimentError if the model cannot be built."""
    local, chosen, aggregate, rule = experiment.local, experiment.partition, experiment.aggregate, experiment.pipeline
    weights = aggregate.weights or ("samples" if rule.needs_weights else "uniform")
    rows_for, ranked = what_needs_rows(experiment), engines.get(experiment.engine).target.traits.ranks
    by_hook = ranked and experiment.rounds_of_gradients > 0 and rows_for is None
    task = TaskSpec(
        seed=experiment.seed,
        rounds=experiment.rounds,
        gradient_rounds=experiment.rounds_of_gradients,
        model=experiment.model.bind(),
        learning_task=experiment.task.bind(),
        metrics=tuple(each.bind() for each in experiment.metrics),
        schedule=schedule_of(experiment),
        solver=GradientOnly() if _sends_gradients(experiment) else as_algorithm(local.bind()),
        in_rounds=experiment.policy.bind().in_rounds and experiment.mode != "race",
        rule=rule,
        weights=tuple(weights) if isinstance(weights, list) else weights,
        nonfinite="error" if aggregate.nonfinite == "stop" else aggregate.nonfinite,  # see `Rounds`
        attack=experiment.attack.bind(),
        byzantine=Attackers(frozenset(experiment.byzantine)),
        processors=tuple(processor.bind() for processor in experiment.processors),
        server=experiment.server.bind(),
        buffers=experiment.buffers,
        augment=tuple(augment.bind() for augment in experiment.data.augment),
        transforms=transforms_of_workers(experiment.workers, chosen.strategy, **chosen.params),
        device=device,
        precision=PRECISIONS[experiment.precision],
        cuda_graphs=experiment.cuda_graphs,
        width=experiment.batched.width,
        inner=experiment.distributed.inner,
        hook=experiment.distributed.hook.bind() if by_hook else None,
        rows_for=rows_for,
        local_lr=experiment.local_lr,
        clip_norm=experiment.local.clip_norm,
        local_schedule=experiment.local_schedule,
        server_schedule=experiment.server.schedule.schedule(experiment.rounds),
        single_steps=_sends_gradients(experiment),
        worker_state_memory=None if experiment.mode == "race" else experiment.worker_state_memory,
    )
    checks.check_model(experiment, task)
    task = replace(task, solver=task.solver.for_model(task.new_module()))
    checks.check_client_algorithm(experiment, task)
    return own_copy(task)


def schedule_of(experiment: Experiment) -> Schedule:
    """The local work of all workers and rounds."""
    local = experiment.local

    def amount(given: int | list[int] | dict[str, list[int]] | None) -> Amount | None:
        if isinstance(given, dict):
            uniform, choice = given.get("uniform"), given.get("choice", [])
            return DrawnAmount(range(uniform[0], uniform[1] + 1) if uniform else tuple(choice), experiment.seed)
        return tuple(given) if isinstance(given, list) else given

    return Schedule(local.batch_size, amount(local.epochs), amount(local.steps), local.drop_last, local.accumulate)


def _sends_gradients(experiment: Experiment) -> bool:
    """Whether workers send gradients to an asynchronous policy, and take no steps of their own."""
    policy = experiment.policy.bind()
    return not policy.in_rounds and policy.work == "gradient"


def finished_model(prepared: PreparedRun, engine: Engine) -> nn.Module:
    """The global model as a module of its own, on the CPU and in evaluation mode."""
    module = prepared.task.new_module()
    layout = Layout.of(module)
    layout.write(engine.shared.global_row, module)
    layout.write_buffers(engine.shared.global_buffers, module)
    return module.cpu().eval()


def engine_of(experiment: Experiment) -> str:
    """The name of the engine that runs an experiment; a race runs on the processes of another engine."""
    if experiment.mode != "race":
        return experiment.engine
    return engines.get(experiment.engine).target.traits.races_on or RACING  # a comparison may set engine = "serial"


def _begin(
    experiment: Experiment, engine: Engine, task: TaskSpec, shared: SharedState, note: Note | None
) -> dict[str, Any]:
    """Give the engine its task, again if it loses a process meanwhile; the engine's choices."""
    retried(
        lambda attempt: engine.begin(task, shared, _executor_of(experiment, task)),
        experiment.worker_retries,
        lambda loss, attempt: announce(loss, attempt, experiment.worker_retries, note),
        "its processes have been started",
    )
    how: dict[str, Any] = {}
    if experiment.mode == "race":
        how = {"engine": engine_of(experiment), "repeatable": False, "runs": experiment.race.runs}
    how |= engine.facts()
    if task.device.type == "cuda":
        how["cuda_graphs"] = engine.replayed()
    return how


def _executor_of(experiment: Experiment, task: TaskSpec) -> MakeExecutor:
    """What each process makes: a simulation of rounds, or an executor that a policy on the clock or a race uses."""
    if not task.in_rounds:
        return Executor
    data = experiment.data.model_copy(update={"dataset": ""})  # which may be an object that cannot be sent
    return partial(Simulation, experiment=experiment.model_copy(update={"data": data}))


@contextlib.contextmanager
def _explained_oom(task: TaskSpec, processes: int) -> Iterator[None]:
    """Turn an out-of-memory error of the device into an ExperimentError that suggests smaller settings."""
    try:
        with explain_oom(task, processes):
            yield
    except torch.OutOfMemoryError as error:
        raise ExperimentError(f"device = {show(str(task.device))}: {error}") from error


def processes_of(experiment: Experiment, device: torch.device) -> int:
    """The number of processes to start."""
    engine, most = engines.get(engine_of(experiment)).target, experiment.cohort_size
    if experiment.mode == "race" and device.type == "cpu":  # a worker that shares a process would race less
        default = min(most, MOST_RACING)
    else:
        default = engine.traits.default_processes(device, most, experiment.threads_per_process)
    given = experiment.processes if "processes" in engine.traits.settings(most) else None
    processes = min(most, given or default)
    # Data reaches the processes as tensors, whatever the data set is.
    reason = why_unsendable(names_in(experiment.model_dump(exclude={"data": {"dataset"}})))
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
