"""The class `Experiment`: all keys of an experiment, with all checks.

`schema.py` defines the tables of an experiment, and `validation.py` checks combinations of settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from fedsim.aggregation import Pipeline
from fedsim.asynchronous.policies import policy
from fedsim.byzantine.base import draw_attackers
from fedsim.clients import LRSchedule
from fedsim.config import schema
from fedsim.config.overrides import DEFAULT_ENGINE
from fedsim.config.schema import matching
from fedsim.config.source_catalog import keys_of_tables
from fedsim.config.validation import problems_with, what_needs_rows
from fedsim.core.base_table import ComponentTable, Table
from fedsim.core.import_policy import is_untrusted
from fedsim.core.input_limits import problem_with_words
from fedsim.core.numbers import Count, PositiveCount
from fedsim.core.objects import Name, own_copy, plain
from fedsim.core.validation_errors import explain
from fedsim.data.formats.images import lacks_files
from fedsim.data.sources import load_dataset_once
from fedsim.data.subsets import validation_positions
from fedsim.engines import Engine, engine
from fedsim.errors import MAX_NAME, ExperimentError, show
from fedsim.privacy import Releases
from fedsim.processes.hooks import CommunicationHook
from fedsim.processing import UpdateProcessor
from fedsim.system.files import is_outside
from fedsim.system.precision import PRECISIONS

Weighting = Literal["uniform", "samples", "inverse_probability"] | list[float]

FOLDER_NAME = f"at most {MAX_NAME} characters (a-z, A-Z, 0-9, and . _ -), starting with a letter or digit"
Processes = Annotated[int, Field(gt=0, le=1024)]  # also for threads; more could overload the machine


class Experiment(Table):
    """All settings of a run, checked on construction. Every key has a default. Tables are passed as dicts.

    Raises ExperimentError with one line per problem.

    >>> experiment = Experiment(workers=8, local={"lr": 0.1})
    >>> experiment.workers, experiment.local.params["lr"]
    (8, 0.1)
    """

    name: Annotated[str, matching(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", FOLDER_NAME)] = ""
    """Name of the run folder. Default: model, data, and rule or policy, as in `net-mnist5k-weighted_mean`."""
    seed: Count = 0
    """Seed of all random draws."""
    rounds: PositiveCount = 10
    """Number of rounds."""
    workers: PositiveCount = 4
    """Number of workers. Unset with a partition by owners (`natural`) or a given one (`given`): one for each shard."""
    cohort: PositiveCount | None = None
    """Number of workers that take part in each round. Unset: all workers."""
    engine: Name = DEFAULT_ENGINE
    """How workers are trained: one after another (`serial`), in several processes (`spawn`), stacked into batched
    operations (`batched`), on the ranks of a launcher (`distributed`), or by an engine chosen for this experiment
    (`auto`), which is `distributed` under a launcher. `fedsim list engines` describes each engine."""
    processes: Processes | None = None
    """Number of processes for `spawn` and `batched`, or the maximum number for `auto`. Unset: depends on cores and
    memory."""
    threads_per_process: Processes = 1
    """Number of PyTorch threads in each process."""
    start_method: Literal["fork", "spawn"] = "fork"
    """How processes start. `fork` takes hundredths of a second. It is used only where it is safe: on Linux without a
    GPU, with one thread per process, in a program without other threads. Otherwise, and with `spawn`, each process is a
    new Python that imports PyTorch, which takes seconds."""
    timeout: PositiveFloat = 300.0
    """Seconds without a training step after which a process counts as lost."""
    process_retries: Count = 2
    """Maximum number of times that a round is repeated with new processes after a process was lost. 0: the run ends."""
    worker_state_memory: PositiveCount = 4_000_000_000
    """Maximum size in bytes of the state that workers keep in memory between rounds. Larger state is stored in a
    temporary file."""
    device: str = "auto"
    """Device for training and tests: `auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    precision: Literal[tuple(PRECISIONS)] = "float32"  # type: ignore[valid-type]
    """`float32` or `float64` for all values and arithmetic. `tf32` (on CUDA) or `bf16` (autocast) lower the precision
    of training only. Model parameters stay float32."""
    cuda_graphs: bool | None = None
    """Whether `batched` on CUDA records training steps as a CUDA graph and replays the graph. Unset: where possible."""
    mode: Literal["rounds", "clock", "race"] = "rounds"
    """`rounds`: synchronous rounds. `clock`: virtual time. `race`: processes that train concurrently."""
    sync: Literal["parameters", "gradients", "post_local"] = "parameters"
    """`parameters`: workers train locally, then the server aggregates their updates. `gradients`: the server aggregates
    the gradients of each step. `post_local`: gradients in the first `gradient_rounds` rounds, then parameters."""
    gradient_rounds: Count | None = None
    """Number of rounds with gradient aggregation, for `sync = "post_local"`."""
    buffers: Literal["average", "local", "frozen", "error"] = "average"
    """Treatment of buffers such as BatchNorm statistics. `average`: the server averages the buffers. `local`: each
    worker keeps its own buffers, and tests use their average. `frozen`: buffers are never updated. `error`: models with
    buffers are refused. The buffers of personal models always stay with the workers."""
    processors: Annotated[list[schema.Processor], Field(max_length=100)] = Field(default=[])
    """Processing steps for each update (or gradient) before aggregation: names or tables, applied in this order."""
    broadcast: Annotated[list[schema.BroadcastProcessor], Field(max_length=100)] = Field(default=[])
    """Processing steps for the difference of the global model to the workers' copy of it, which the server sends to all
    workers before each round: names or tables, applied in this order. Empty: workers receive the global model."""
    task: schema.Task = schema.Task()
    metrics: Annotated[list[schema.EvaluationMetric], Field(max_length=20)] = Field(default=[])
    """Numbers that each test records in addition to loss and accuracy: names or tables."""
    model: schema.Model = schema.Model()
    data: schema.Data = schema.Data()
    partition: schema.Partition = schema.Partition()
    sampling: schema.Sampling = schema.Sampling()
    local: schema.Local = schema.Local(epochs=1)
    batched: schema.Batched = schema.Batched()
    distributed: schema.Distributed = schema.Distributed()
    attack: schema.Attack = schema.Attack()
    aggregate: schema.Aggregate = schema.Aggregate()
    privacy: schema.Privacy = schema.Privacy()
    server: schema.Server = schema.Server()
    policy: schema.AsyncPolicy = schema.AsyncPolicy()
    clock: schema.Clock = schema.Clock()
    race: schema.Race = schema.Race()
    worker_evaluation: schema.WorkerEvaluation = schema.WorkerEvaluation()
    stop: schema.Stop = schema.Stop()
    records: schema.Records = schema.Records()
    checkpoint: schema.Checkpoint = schema.Checkpoint()

    def __init__(self, **tables: Any) -> None:
        tables = plain(tables)
        if problem := problem_with_words(tables):
            raise ExperimentError(problem)
        try:
            if "workers" not in tables and (count := count_workers(tables)) is not None:
                tables = {**tables, "workers": count}
            super().__init__(**tables)
        except ValidationError as error:
            raise ExperimentError(*explain(error, type(self), elsewhere=keys_of_tables(tables))) from None

    @field_validator("engine")
    @classmethod
    def _engine_exists(cls, name: str) -> str:
        target = engine.get(name, "engine").target
        if not (isinstance(target, type) and issubclass(target, Engine)):
            raise ExperimentError(f"engine = {show(name)}: must be a subclass of fedsim.engines.Engine")
        return name

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_is_no_policy(cls, mode: Any) -> Any:
        if mode in policy.names():
            synchronous = mode == schema.AsyncPolicy.model_fields["name"].default
            alternative = "mode=rounds" if synchronous else f"mode=race policy={mode} for a race of processes"
            raise ExperimentError(
                f"mode = {show(mode)}: is a policy; write {alternative}, or mode=clock policy={mode} for virtual time"
            )
        return mode

    @model_validator(mode="after")
    def _name_by_content(self) -> Experiment:
        if not self.name:
            object.__setattr__(self, "name", default_name(self))  # the model is frozen
        return self

    @model_validator(mode="after")
    def _check_as_a_whole(self) -> Experiment:
        if lines := problems_with(self):
            raise ExperimentError(*lines)
        return self

    @property
    def byzantine(self) -> list[int]:
        """IDs of the workers that are Byzantine in all rounds, ascending.

        The list is empty with `attack.resample` or `attack.by_class`.
        """
        attack, count = self.attack, self.attack.count(self.workers)
        if attack.workers is not None:
            return sorted(attack.workers)
        if not count or attack.resample or attack.by_class is not None:
            return []
        return draw_attackers(self.seed, self.workers, count)

    @property
    def f(self) -> int:
        """Number of Byzantine updates that the rule must tolerate: `aggregate.f`, or the maximum number in a cohort."""
        most = min(self.attack.count(self.workers), self.cohort_size)
        return most if self.aggregate.f is None else self.aggregate.f

    @cached_property
    def rule(self) -> Pipeline:
        """Aggregation rule with its parameters."""
        return self.aggregate.pipeline(self.f)

    @property
    def chain(self) -> list[UpdateProcessor]:
        """Processors of updates, with their parameters."""
        return [table.component for table in self.processors]

    @property
    def broadcast_chain(self) -> list[UpdateProcessor]:
        """Processors of what the server sends, with their parameters."""
        return [table.component for table in self.broadcast]

    @property
    def weights(self) -> Weighting:
        """Aggregation weights of the workers: `aggregate.weights`, or the default ("samples" or "uniform")."""
        return self.weights_for(self.rule)

    def weights_for(self, rule: Pipeline) -> Weighting:
        """Return the aggregation weights of the workers if `rule` were the rule of the experiment."""
        by_samples = rule.needs_weights and not self.privacy.component.at_server
        return self.aggregate.weights or ("samples" if by_samples else "uniform")

    @property
    def weight_total(self) -> float | None:
        """Divisor of weighted sums of updates, or None for the sum of the weights."""
        if self.privacy.component.at_server:
            return self.expected_updates
        return 1.0 if self.weights == "inverse_probability" else None

    @property
    def protects(self) -> Literal["worker", "sample"] | None:
        """Unit of differential privacy: a worker with its updates, a sample of a worker, or None without protection."""
        if self.privacy.component.active:
            return "worker"
        return None if self.local.component.sample_noise is None else "sample"

    def releases(self, holders: int) -> Releases | None:
        """Return the noisy sums of each round, for privacy accounting, or None without differential privacy.

        `holders` is the maximum number of workers in a round that hold the same sample.
        """
        mechanism, sampling = self.privacy.component, self.sampling.registration.target
        releases = Releases(mechanism.noise, self.workers, self.cohort_size, by_replacement=mechanism.by_replacement)
        if mechanism.at_server:
            return replace(releases, sampling=getattr(sampling, "amplifies", None))
        if mechanism.active or (sample_noise := self.local.component.sample_noise) is None:
            return releases if mechanism.active else None
        return replace(releases, noise=sample_noise.noise, per_round=self.local.most_work, holders=holders)

    @property
    def nonfinite(self) -> Literal["error", "exclude", "keep"]:
        """How a round treats rows with NaN or infinity: `aggregate.nonfinite`, but "error" if the setting is "stop"."""
        return "error" if self.aggregate.nonfinite == "stop" else self.aggregate.nonfinite

    @property
    def in_rounds(self) -> bool:
        """Whether the experiment has synchronous rounds, in which all workers of a cohort start together."""
        return self.policy.component.in_rounds

    @property
    def sends_gradients(self) -> bool:
        """Whether workers send gradients to an asynchronous policy, without local steps."""
        return not self.in_rounds and self.policy.component.work == "gradient"

    @cached_property
    def needs_rows(self) -> str | None:
        """The setting that needs each worker's own gradient, or None if averaged gradients are enough."""
        return what_needs_rows(self)

    @property
    def gradient_hook(self) -> CommunicationHook | None:
        """Hook that averages the gradients of the ranks, or None if the rule needs each worker's gradient."""
        ranks = engine.get(self.engine).target.traits.ranks
        averages = ranks and self.rounds_of_gradients > 0 and self.needs_rows is None
        return self.distributed.hook.component if averages else None

    @property
    def local_lr(self) -> float | None:
        """Learning rate of the client algorithm, or None if the algorithm has no parameter `lr`."""
        return self.local.params.get("lr")

    @cached_property
    def local_schedule(self) -> LRSchedule | None:
        """Schedule of `local_lr`, or None if the learning rate is constant."""
        per, steps = self.local.schedule.per, self.local.steps
        steps_of_a_round = steps if isinstance(steps, int) else None
        return self.local.schedule.schedule(self.rounds if per == "round" else steps_of_a_round, per)

    @cached_property
    def server_schedule(self) -> LRSchedule | None:
        """Schedule of the server optimizer's learning rate, or None if the learning rate is constant."""
        return self.server.schedule.schedule(self.rounds)

    def local_lr_at(self, round: int, step: int = 0) -> float | None:
        """Return the learning rate of the client algorithm in a step (from 0) of a round, or None if there is none."""
        lr, schedule = self.local_lr, self.local_schedule
        return lr if schedule is None or lr is None else schedule.rate(lr, round, step)

    @property
    def rounds_of_gradients(self) -> int:
        """Number of rounds, at the start of the run, in which workers send gradients instead of training locally."""
        if not self.in_rounds:
            return 0
        return {"parameters": 0, "gradients": self.rounds}.get(self.sync, self.gradient_rounds or 0)

    def sync_in(self, round: int) -> Literal["parameters", "gradients"]:
        """Return "gradients" if `round` aggregates the gradients of each step, otherwise "parameters"."""
        return "gradients" if round <= self.rounds_of_gradients else "parameters"

    @property
    def cohort_size(self) -> int:
        """Number of workers in a cohort: `cohort`, or all workers if `cohort` is unset."""
        return self.cohort or self.workers

    @property
    def largest_cohort(self) -> int:
        """Maximum number of workers in a cohort, which is more than `cohort_size` with Poisson sampling."""
        return self.sampling.component.largest(self.workers, self.cohort_size)

    @property
    def expected_updates(self) -> float:
        """Expected number of updates in a round, from which privacy mechanisms compute the mean."""
        return self.cohort_size * (1 - self.sampling.client_dropout)

    def own(self) -> Experiment:
        """Return a copy for one run, without data set and loggers. Components are copied too.

        Raises ExperimentError if an object cannot be copied.
        """
        data, records = self.data.model_copy(update={"name": ""}), self.records.model_copy(update={"loggers": []})
        copied = self.model_copy(update={"data": data, "records": records})
        for table in copied.tables():
            if isinstance(table, ComponentTable) and table not in (data, copied.aggregate):
                table.component  # noqa: B018  # created here, so that the copy includes the component
        copied.rule  # noqa: B018
        return own_copy(copied)

    def resolved(self) -> dict[str, Any]:
        """Return the values of all keys as nested tables, including defaults, without keys whose value is None."""
        return _without_unset(self.model_dump(mode="json"))


def count_workers(tables: Mapping[str, Any]) -> int | None:
    """Return the number of workers that the partition (such as `natural`) prescribes, or None if it prescribes none."""
    if "partition" not in tables:
        return None
    try:
        partition = schema.Partition.model_validate(tables["partition"])
        data = schema.Data.model_validate(tables.get("data", {}))
    except (ValidationError, ExperimentError):  # reported together with the errors of the other tables
        return None
    count = getattr(partition.component, "count_workers", None)

    def ids() -> Mapping[str, np.ndarray]:
        refuse_untrusted_root(data)
        columns = load_dataset_once(data.name, data.root, data.params)[0].ids
        if not columns or not data.validation_fraction:
            return columns
        n = len(next(iter(columns.values())))
        remaining, _ = validation_positions(n, data.validation_fraction, tables.get("seed", 0))
        return {name: column[remaining] for name, column in columns.items()}

    return None if count is None else count(ids)


def refuse_untrusted_root(data: schema.Data) -> None:
    """Raise ExperimentError if an untrusted file would download data to a folder outside the working directory."""
    if data.root is None or not is_untrusted(data.root):
        return
    if is_outside(Path(os.path.expanduser(data.root)), Path.cwd()) and lacks_files(data.name, data.root, **data.params):
        raise ExperimentError(
            f"data.root = {show(data.root)}: does not contain {data.name}, and an experiment file must not download "
            "data to a folder outside the working directory; set the key on the command line"
        )


def _without_unset(value: Any) -> Any:
    """Return nested tables without keys whose value is None.

    Such keys are also removed from tables in lists, which pydantic's `exclude_none` does not do.
    """
    if isinstance(value, dict):
        return {key: _without_unset(item) for key, item in value.items() if item is not None}
    return [_without_unset(item) for item in value] if isinstance(value, list) else value


def default_name(experiment: Experiment, varied: Collection[str] = ()) -> str:
    """Return the default name of an experiment, such as `net-mnist5k-weighted_mean` or `net-mnist5k-hogwild-race`.

    The parts of the name are the model, the data, the client algorithm (except sgd), the rule or asynchronous policy,
    and `race` for a race.

    Args:
        experiment: experiment with checked tables.
        varied: dotted keys that a comparison varies. Parts that depend on these keys are left out.
    """
    policy, rule, algorithm = experiment.policy, experiment.aggregate.rule, experiment.local.algorithm
    stages = rule if isinstance(rule, list) else [rule]
    rules = [stage if isinstance(stage, str) else stage["rule"] for stage in stages]
    parts = [
        ({"model.name"}, [experiment.model.name]),
        ({"data.name"}, [experiment.data.name]),
        ({"local.algorithm"}, [algorithm] if algorithm != schema.Local.model_fields["algorithm"].default else []),
        ({"aggregate.rule", "policy.name", "mode"}, rules if experiment.in_rounds else [policy.name]),
        ({"mode"}, ["race"] if experiment.mode == "race" else []),
    ]
    words = [
        "_".join(name.rpartition(":")[2].strip("<>") for name in names)
        for keys, names in parts
        if keys.isdisjoint(varied)
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(filter(None, words))).lstrip("._-")
    return name[:MAX_NAME] or "experiment"
