"""From an experiment to an engine that is ready for the first round."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.asynchronous.server import AsGradient
from fedsim.consistency import what_needs_rows
from fedsim.data import Shards, TensorData, label_counts, partition_shards, transforms_of_workers
from fedsim.engines import Engine, Schedule, SpawnEngine, Task
from fedsim.engines import engine as engines
from fedsim.engines.footprint import memory_needed
from fedsim.engines.job import Memory
from fedsim.engines.retrying import Note, announce, retried
from fedsim.engines.shortage import shortage_told
from fedsim.errors import ExperimentError, FedsimWarning, one_line, show, show_bytes
from fedsim.experiment import Experiment
from fedsim.objects import names_in, why_unsendable
from fedsim.randomness import numpy_generator, random_state_kept, sample_cohort, sample_workers
from fedsim.registry import Imported
from fedsim.rows import Layout
from fedsim.system.devices import describe_device, free_memory, shares_memory
from fedsim.system.openmp import warn_if_threads_spin
from fedsim.system.precision import PRECISIONS
from fedsim.training import Objective, check_outputs
from fedsim.workshop import Workshop

PROBE_SAMPLES = 8
COPIES_OF_MODEL = 3  # at least: the global row, a worker's row, and the module
MOST_RACING = 32  # processes, unless an experiment asks for more: each of them takes a quarter of a gigabyte
LOOKED_AT = 1_000  # workers at most, where shards would have to be drawn to look at them


@dataclass(frozen=True)
class Setting:
    """What is known before the first round: what runs where, on what."""

    experiment: Experiment
    task: Task
    device: str
    how: dict[str, Any]  # it is computed: the engine's choices
    parameters: int
    train_samples: int
    test_samples: int
    looked_at: list[int] | None  # the workers of whom the next line tells, of a virtual population; None: of all
    label_counts: np.ndarray  # [workers looked at, classes]
    byzantine: list[int]
    row_bytes: int  # of one model, or one gradient
    buffer_bytes: int  # that go with a model, which they do where they are averaged
    done: int = 0  # rounds that are on record already, of a run that is gone on with

    @property
    def schedule(self) -> Schedule:
        return self.task.schedule

    @property
    def shard_sizes(self) -> list[int]:
        """How many samples the workers hold that were looked at."""
        return self.label_counts.sum(1).tolist()

    @property
    def record_bytes(self) -> int:
        """Of what the run folder will hold, about; its small files left out."""
        records = self.experiment.records
        rows = records.model + len(records.updates) * self.experiment.cohort_size
        if self.experiment.checkpoint.every != 0:  # one more than stay, for a moment
            in_rounds = self.experiment.policy.bind().in_rounds
            each = 1 if in_rounds else self.experiment.cohort_size
            if self.task.hook is not None and self.task.hook.keeps:
                each += self.how["ranks"]
            rows += (self.experiment.checkpoint.keep + 1) * each
        return self.row_bytes * rows

    def facts(self) -> dict[str, Any]:
        """What the run folder says of all this, beyond the experiment itself."""
        return {
            "device": self.device,
            "arithmetic": self.task.precision.facts(),
            **self.how,
            "parameters": self.parameters,
            "train_samples": self.train_samples,
            "test_samples": self.test_samples,
            "smallest_shard": min(self.shard_sizes),
            "largest_shard": max(self.shard_sizes),
            **({} if self.looked_at is None else {"workers_looked_at": len(self.looked_at)}),
        }


@contextlib.contextmanager
def prepare(
    experiment: Experiment,
    workshop: Workshop,
    note: Note | None = None,
    on_setup: Callable[[str], object] = lambda step: None,
) -> Iterator[tuple[Setting, Engine]]:
    """The setting of an experiment and an engine of the workshop, which leaves it when the `with` block ends.

    `note` is called for every process that is lost and replaced meanwhile; see `RunFolder.event`. `on_setup` is called
    with what is being done.

    Raises ExperimentError or DataError where the experiment cannot be run here.
    """
    device = engines.get(experiment.engine).target.device_for(experiment.device)
    PRECISIONS[experiment.precision].require(device)
    processes = _processes(experiment, device)
    warn_if_threads_spin(experiment.threads_per_process)
    on_setup(f"starting the engine {experiment.engine}")
    with (
        random_state_kept(device),
        workshop.engine(
            _engine_of(experiment), processes, experiment.threads_per_process, experiment.timeout, device
        ) as engine,
        contextlib.ExitStack() as stack,
    ):  # the engine first: its processes start while the data loads
        on_setup(f"making the model {show(experiment.model.name)}")
        task = task_of(experiment, device)
        stack.enter_context(_room_on(task, processes))
        _check_memory(experiment, task, processes, recorded=note is not None)
        on_setup(f"loading the data set {show(experiment.data.dataset)}")
        train, test = workshop.data(experiment.data.dataset, experiment.data.root, experiment.data.params, device)
        _check_fit(experiment, task, train, test)
        on_setup(f"partitioning the data among {experiment.workers:,} workers")
        shards = _shards(experiment, train)
        _check_smallest_batch(experiment, task, train, shards)
        _check_last_steps(experiment, task, shards)
        root = _root(experiment, train) if task.rule.takes("root") else None
        on_setup(f"getting the engine {experiment.engine} ready for the first round")
        memory = engine.allocate(task, experiment.cohort_size, train, test, shards, root)
        how = _begin(experiment, engine, task, memory, note)
        looked_at = _workers_to_look_at(shards, experiment.seed)
        known = range(len(shards)) if looked_at is None else looked_at
        counts = label_counts(train.targets.cpu().numpy(), [shards.of(worker) for worker in known], memory.classes)
        setting = Setting(
            experiment=experiment,
            task=task,
            device=describe_device(device),
            how={**_racing(experiment), **how},
            parameters=len(memory.global_row),
            train_samples=len(train),
            test_samples=len(test),
            looked_at=looked_at,
            label_counts=counts,
            byzantine=experiment.byzantine,
            row_bytes=memory.global_row.nbytes,
            buffer_bytes=memory.global_buffers.numel() * task.dtype.itemsize if task.buffers == "average" else 0,
        )
        del memory  # so that the engine, as it leaves, is the last to hold it
        yield setting, engine


def _begin(experiment: Experiment, engine: Engine, task: Task, memory: Memory, note: Note | None) -> dict[str, Any]:
    """Give an engine its task, again if it loses a process while it starts; how it computes the task.

    No worker is in hand yet, so on_worker_failure = "drop" does the same as "retry" here.
    """

    def attempt(number: int) -> dict[str, Any]:
        engine.begin(task, memory)
        return {**engine.facts(), **_how_steps_are_taken(task, engine)}

    retries = 0 if experiment.on_worker_failure == "abort" else experiment.worker_retries
    return retried(
        attempt,
        retries,
        lambda loss, number: announce(loss, number, retries, note),
        "its processes have been started",
    )


@contextlib.contextmanager
def _room_on(task: Task, processes: int) -> Iterator[None]:
    """Refuse what does not fit into the memory of the device, from now until the run has ended."""
    try:
        with shortage_told(task, processes):
            yield
    except torch.OutOfMemoryError as error:
        raise ExperimentError(f"device = {show(str(task.device))}: {error}") from error


def _racing(experiment: Experiment) -> dict[str, Any]:
    if experiment.mode != "race":
        return {}
    return {"engine": _engine_of(experiment), "repeatable": False, "runs": experiment.race.runs}


def _how_steps_are_taken(task: Task, engine: Engine) -> dict[str, Any]:
    compiled = {"compiled": engine.compiled()} if task.compile else {}
    return {**compiled, **({"cuda_graphs": engine.replayed()} if task.device.type == "cuda" else {})}


def task_of(experiment: Experiment, device: torch.device) -> Task:
    """What every process needs to know of an experiment. Raises ExperimentError where the model cannot be made."""
    local, chosen, aggregate, rule = experiment.local, experiment.partition, experiment.aggregate, experiment.pipeline
    weights = aggregate.weights or ("samples" if rule.needs_weights else "uniform")
    rows_for, ranked = what_needs_rows(experiment), engines.get(experiment.engine).target.ranks
    by_hook = ranked and experiment.rounds_of_gradients > 0 and rows_for is None
    task = Task(
        seed=experiment.seed,
        rounds=experiment.rounds,
        gradient_rounds=experiment.rounds_of_gradients,
        model=experiment.model.bind(),
        schedule=Schedule(local.batch_size, local.epochs, local.steps, local.drop_last),
        solver=AsGradient() if _brings_gradients(experiment) else local.bind(),
        rule=rule,
        weights=tuple(weights) if isinstance(weights, list) else weights,
        nonfinite=aggregate.nonfinite,
        attack=experiment.attack.bind(),
        byzantine=frozenset(experiment.byzantine),
        server=experiment.server.bind(),
        buffers=experiment.buffers,
        augment=tuple(augment.bind() for augment in experiment.data.augment),
        transforms=transforms_of_workers(experiment.workers, chosen.strategy, **chosen.params),
        device=device,
        precision=PRECISIONS[experiment.precision],
        compile=experiment.compile,
        cuda_graphs=experiment.cuda_graphs,
        width=experiment.batched.width,
        inner=experiment.distributed.inner,
        hook=experiment.distributed.hook.bind() if by_hook else None,
        rows_for=rows_for,
        local_lr=experiment.local_lr,
    )
    _check_model(experiment, task)
    return task


def _brings_gradients(experiment: Experiment) -> bool:
    """Whether workers step along nothing themselves, but bring gradients to a policy."""
    policy = experiment.policy.bind()
    return not policy.in_rounds and policy.work == "gradient"


def finished_model(setting: Setting, engine: Engine) -> nn.Module:
    """The global model as a module of its own, on the CPU and in evaluation mode."""
    module = setting.task.new_module()
    layout = Layout.of(module)
    layout.write(engine.memory.global_row, module)
    layout.write_buffers(engine.memory.global_buffers, module)
    return module.cpu().eval()


def _check_model(experiment: Experiment, task: Task) -> None:
    where = f"model.name = {show(experiment.model.name)}"
    try:
        _check_parameters(where, task)
        layout = Layout.of(task.new_module())
    except ExperimentError:
        raise
    except Exception as error:
        raise ExperimentError(f"{where}: cannot be made: {one_line(error)}") from error
    if not layout.d:
        raise ExperimentError(f"{where}: has no trainable parameters")
    if task.buffers == "error" and layout.buffers:
        names = ", ".join(entry.name for entry in layout.buffers)
        raise ExperimentError(f'buffers = "error": {where} has buffers ({names}); use average, local or server')


def _check_parameters(where: str, task: Task) -> None:
    """Whether there is memory for the model, found out on one that takes none; a user's own is not made twice."""
    if isinstance(task.model, Imported):
        return
    with random_state_kept(torch.device("cpu")), torch.device("meta"):
        count = sum(parameter.numel() for parameter in task.model().parameters())
    needed, free = COPIES_OF_MODEL * count * task.dtype.itemsize, free_memory()
    if needed > free:
        raise ExperimentError(
            f"{where}: has {count:,} parameters; {COPIES_OF_MODEL} copies of it need {needed / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB of memory are free"
        )


def _check_memory(experiment: Experiment, task: Task, processes: int, *, recorded: bool) -> None:
    """Whether there is memory for the run. Cards say that themselves; ranks share the rows."""
    engine = engines.get(_engine_of(experiment)).target
    if task.device.type != "cpu" or engine.ranks:
        return
    d = Layout.of(task.new_module()).d
    may_replace = not engine.chooses and engine.may_lose_processes(processes)
    parts = memory_needed(
        task,
        d,
        experiment.cohort_size,
        1 if engine.chooses else processes,  # it may choose one
        stacked=engine.stacks and not engine.chooses,
        in_rounds=experiment.policy.bind().in_rounds,
        replaces=may_replace and experiment.on_worker_failure != "abort",
        checkpoints=recorded and experiment.checkpoint.every != 0,
    )
    needed, free = sum(parts.values()), free_memory()
    if needed > free:
        listed = ", ".join(f"{what} {show_bytes(nbytes)}" for what, nbytes in parts.items())
        fewer = ", fewer processes" if processes > 1 else ""
        raise ExperimentError(
            f"cohort = {experiment.cohort_size}: with a model of {d:,} parameters this run needs about "
            f"{show_bytes(needed)} of memory ({listed}), and {show_bytes(free)} are free; use a smaller cohort{fewer} "
            "or a smaller model"
        )


def _check_fit(experiment: Experiment, task: Task, train: TensorData, test: TensorData) -> None:
    """Whether the model and the data fit each other, found out on a few samples."""
    where = f"model.name = {show(experiment.model.name)}"
    inputs, targets = train.to(task.device, task.dtype).gather(torch.arange(min(PROBE_SAMPLES, len(train))))
    try:
        classes = check_outputs(task.new_module(), inputs)
    except ExperimentError as error:
        raise ExperimentError(f"{where}: {error}") from None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        shape = tuple(inputs.shape)
        raise ExperimentError(f"{where}: does not work on inputs of shape {shape}: {one_line(error)}") from error
    if task.precision.autocast is not None:
        _check_autocast(experiment, task, inputs, targets)
    highest = int(max(train.targets.max(), test.targets.max()))
    if highest >= classes:
        raise ExperimentError(f"{where}: tells {classes} classes apart, but the labels go up to {highest}")


def _check_autocast(experiment: Experiment, task: Task, inputs: Tensor, targets: Tensor) -> None:
    """Whether each of the model's operations has a form in the type that training casts it to."""
    module = task.new_module().train()
    try:
        Objective(task.precision)(module, inputs, targets).backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        where, name = f"precision = {show(experiment.precision)}", show(experiment.model.name)
        raise ExperimentError(
            f"{where}: on {task.device} the model {name} cannot be trained in it: {one_line(error)}"
        ) from error


def _check_smallest_batch(experiment: Experiment, task: Task, train: TensorData, shards: Shards) -> None:
    """Whether the model can be trained on a batch of one sample, if a worker has such a batch."""
    looked_at = _workers_to_look_at(shards, experiment.seed)
    sizes = {worker: shards.size(worker) for worker in (range(len(shards)) if looked_at is None else looked_at)}
    worker = next((worker for worker, size in sizes.items() if task.schedule.smallest_batch(size) == 1), None)
    if worker is None:
        return
    module = task.new_module().train()
    try:
        with random_state_kept(task.device):
            Objective(task.precision)(module, *train.to(task.device, task.dtype).gather(torch.arange(1)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = f"one sample, on which the model cannot be trained ({one_line(error)})"
        batch_size, strategy = experiment.local.batch_size, show(experiment.partition.strategy)
        if sizes[worker] == 1:
            line = f"partition.strategy = {strategy}: worker {worker} has {why}; give each worker two or more"
        elif batch_size == 1:
            line = f"local.batch_size = 1: each batch has {why}; set it to 2 or more"
        else:
            line = (
                f"local.batch_size = {batch_size}: the last batch of worker {worker} ({sizes[worker]} samples) has "
                f"{why}; set local.drop_last = true"
            )
        raise ExperimentError(line) from error


def _engine_of(experiment: Experiment) -> str:
    """The engine that does it; a race is run by the processes of one."""
    if experiment.mode != "race":
        return experiment.engine
    return engines.get(experiment.engine).target.racing or SpawnEngine.racing  # a comparison puts serial in its place


def _processes(experiment: Experiment, device: torch.device) -> int:
    engine, most = engines.get(_engine_of(experiment)).target, experiment.cohort_size
    if experiment.mode == "race" and device.type == "cpu":  # who has a process of its own races more than who has half
        default = min(most, MOST_RACING)
    else:
        default = engine.default_processes(device, most, experiment.threads_per_process)
    processes = min(most, experiment.processes or default)
    if engine.may_lose_processes(processes) and (reason := _why_unsendable(experiment)):
        if not engine.chooses:
            raise ExperimentError(f"engine = {show(experiment.engine)}: {reason}; use engine=serial")
        if processes > 1:
            warnings.warn(f"{reason}; the run uses one process", FedsimWarning, stacklevel=2)
        return 1
    if processes > 1 and not shares_memory(device):
        raise ExperimentError(
            f'engine = "{experiment.engine}": processes cannot share memory of the device {device}; use processes=1'
        )
    return processes


def _why_unsendable(experiment: Experiment) -> str | None:
    """Why an engine cannot send the experiment's objects to processes. Data goes there as tensors."""
    return why_unsendable(names_in(experiment.model_dump(exclude={"data": {"dataset"}})))


def _check_last_steps(experiment: Experiment, task: Task, shards: Shards) -> None:
    """Whether the rule can aggregate the gradients of so few workers as have data left in the last step of a round.

    Raises ExperimentError where it cannot. All rounds are looked at, since their cohorts are known.
    """
    try:
        if experiment.rounds_of_gradients:
            task.rule.rehearse(1)
        return
    except ExperimentError:  # then there is a number that is too small
        pass
    whole = experiment.cohort_size == experiment.workers
    fewest, first = experiment.cohort_size, 1
    for round in (1,) if whole else range(1, experiment.rounds_of_gradients + 1):
        cohort = sample_cohort(experiment.seed, round, experiment.workers, experiment.cohort_size).tolist()
        count = _still_at_work(task, cohort, [task.schedule.steps_for(shards.size(worker)) for worker in cohort])
        if count < fewest:
            fewest, first = count, round
    if fewest == experiment.cohort_size:  # which has been tried already
        return
    try:
        task.rule.rehearse(fewest)
    except ExperimentError as error:
        where = f"in round {first} only {fewest} of {experiment.cohort_size} workers have data left for the last step"
        remedy = "set local.steps, so that all workers take the same number of steps"
        raise ExperimentError(*(f"{line}; {where}; {remedy}" for line in error.lines)) from None


def _still_at_work(task: Task, cohort: list[int], steps: list[int]) -> int:
    """How many of a cohort take part in the last step of a round of gradients that is aggregated."""
    weights = task.weights if isinstance(task.weights, tuple) and task.rule.takes_weights else None
    last = max(n for worker, n in zip(cohort, steps, strict=True) if weights is None or weights[worker])
    return sum(n >= last for n in steps)


def _root(experiment: Experiment, train: TensorData) -> np.ndarray:
    """The server's own samples: some of the training samples, drawn at random."""
    size = experiment.aggregate.root_samples
    if size > len(train):
        raise ExperimentError(f"aggregate.root_samples = {size}: there are {len(train)} training samples")
    return np.sort(numpy_generator(experiment.seed, "root").choice(len(train), size, replace=False))


def _shards(experiment: Experiment, train: TensorData) -> Shards:
    chosen, labels = experiment.partition, train.targets.cpu()
    return partition_shards(
        labels, experiment.workers, chosen.strategy, experiment.seed, ids=train.ids, **chosen.params
    )


def _workers_to_look_at(shards: Shards, seed: int) -> list[int] | None:
    """Some workers, drawn at random, that show what a population is like; None where all can be looked at."""
    if shards.listed or len(shards) <= LOOKED_AT:
        return None
    return sample_workers(numpy_generator(seed, "look"), len(shards), LOOKED_AT).tolist()
