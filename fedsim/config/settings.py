"""The class `Settings`: the keys of an experiment, and properties computed from their values.

`schema.py` defines the tables of an experiment, and `experiment.py` adds the checks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from fedsim.aggregation import Pipeline
from fedsim.byzantine.base import draw_attackers
from fedsim.clients import CohortGradient, LRSchedule
from fedsim.config import schema
from fedsim.config.engines import DEFAULT_ENGINE, traits_of
from fedsim.config.schema import matching
from fedsim.core.base_table import Name, Table
from fedsim.core.numbers import Count, PositiveCount, PositiveFloat
from fedsim.core.randomness import draw_key
from fedsim.errors import MAX_NAME, show
from fedsim.privacy import Releases
from fedsim.processes.hooks import CommunicationHook
from fedsim.processing import UpdateProcessor
from fedsim.server.groups import divide_workers
from fedsim.system.precision import PRECISIONS

if TYPE_CHECKING:
    from typing_extensions import Self
else:  # for typing.get_type_hints
    Self = Any

Weighting = Literal["uniform", "samples", "inverse_probability"] | list[float]

FOLDER_NAME = f"at most {MAX_NAME} characters (a-z, A-Z, 0-9, and . _ -), starting with a letter or digit"
Processes = Annotated[int, Field(gt=0, le=1024)]  # also for threads; more could overload the machine


class Settings(Table):
    """All settings of a run. Every key has a default. The subclass `Experiment` checks them."""

    name: Annotated[str, matching(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", FOLDER_NAME)] = ""
    """Name of the run folder. Default: model, data, and rule or policy, as in `net-mnist5k-weighted_mean`."""
    seed: Count = 0
    """Seed of all random draws."""
    rounds: PositiveCount = 10
    """Number of rounds."""
    planned_rounds: PositiveCount | None = None
    """Number of rounds for which learning-rate schedules and `privacy.target_epsilon` are planned. Unset: `rounds`. If
    unset, a run that is resumed for more rounds keeps its original number."""
    workers: PositiveCount = 4
    """Number of workers. Unset with a partition by owners (`natural`) or a given one (`given`): one for each shard.
    Unset with `groups`: one for each entry of the list, or 4 in each group."""
    cohort: PositiveCount | None = None
    """Number of workers that take part in each round. Unset: all workers."""
    groups: PositiveCount | list[Count] | Name | None = None
    """Groups of workers with a model of their own (Hier-FAVG, Liu et al. 2020): the number of groups of consecutive
    workers, a list with the group of each worker, or a function that returns this list for a number of workers. In each
    round, the rule `aggregate` averages within each group. Unset: no groups."""
    group_rounds: PositiveCount = 1
    """Number of rounds after which the models of the groups are aggregated into the global model, with `groups`."""
    engine: Name = DEFAULT_ENGINE
    """How workers are trained: one after another (`serial`), in several processes (`processes`, or `spawn`, which never
    forks), stacked into batched operations (`batched`), on the ranks of a launcher (`distributed`), or by an engine
    chosen for this experiment (`auto`), which is `distributed` under a launcher. See `fedsim list engines`."""
    processes: Processes | None = None
    """Number of processes for `processes`, `spawn` and `batched`, or the maximum number for `auto`. Unset: depends on
    cores and memory."""
    threads_per_process: Processes = 1
    """Number of PyTorch threads in each process."""
    start_method: Literal["auto", "fork", "spawn"] = "auto"
    """How processes start. `fork` copies this program, which takes hundredths of a second. `spawn` starts a new Python
    that imports PyTorch, which takes seconds. `auto` forks where forking is safe: on Linux without a GPU, with one
    thread per process, in a program without other threads."""
    process_timeout: PositiveFloat = 300.0
    """Seconds without a training step after which a process counts as lost."""
    max_restarts: Count = 2
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
    the gradients of each step, where `aggregate.weights = "samples"` counts the samples of each worker's batch in this
    step. `post_local`: gradients up to round `switch_after_round`, then parameters."""
    switch_after_round: Count | None = None
    """Last round that aggregates gradients, for `sync = "post_local"`. 0: all rounds aggregate parameters."""
    buffers: Literal["average", "local", "frozen", "error"] = "average"
    """Treatment of buffers such as BatchNorm statistics. `average`: the server averages the buffers. `local`: each
    worker keeps its own buffers, and tests use their average. `frozen`: buffers are never updated. `error`: models with
    buffers are refused. The buffers of personal models always stay with the workers."""
    processors: Annotated[list[schema.Processor], schema.OneOrMore, Field(max_length=100)] = Field(default=[])
    """Processing steps (not CPUs, which `processes` sets) for each update or gradient before aggregation, such as
    `"sign"`: names or tables, applied in this order."""
    downlink: Annotated[list[schema.DownlinkProcessor], schema.OneOrMore, Field(max_length=100)] = Field(default=[])
    """Processing steps for the difference between the global model and the workers' copy, which the server sends to all
    workers before each round: names or tables, applied in this order. Empty: workers receive the global model."""
    task: schema.Task = schema.Task()
    metrics: Annotated[list[schema.EvaluationMetric], schema.OneOrMore, Field(max_length=20)] = Field(default=[])
    """Numbers that tests of the global model record in addition to loss and accuracy: names or tables. Tests of
    individual workers (`worker_evaluation`) record only loss and accuracy."""
    model: schema.Model = schema.Model()
    data: schema.Data = schema.Data()
    partition: schema.Partition = schema.Partition()
    sampling: schema.Sampling = schema.Sampling()
    local: schema.Local = schema.Local(epochs=1)
    batched: schema.Batched = schema.Batched()
    distributed: schema.Distributed = schema.Distributed()
    attack: schema.Attack = schema.Attack()
    aggregate: schema.Aggregate = schema.Aggregate()
    top_aggregate: schema.TopAggregate = schema.TopAggregate()
    top_attack: schema.TopAttack = schema.TopAttack()
    privacy: schema.Privacy = schema.Privacy()
    server: schema.Server = schema.Server()
    policy: schema.AsyncPolicy = schema.AsyncPolicy()
    clock: schema.Clock = schema.Clock()
    race: schema.Race = schema.Race()
    worker_evaluation: schema.WorkerEvaluation = schema.WorkerEvaluation()
    stop: schema.Stop = schema.Stop()
    records: schema.Records = schema.Records()
    checkpoint: schema.Checkpoint = schema.Checkpoint()

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
        """Number of Byzantine updates that the rule must tolerate: `aggregate.f`, or the maximum number.

        The maximum is that in a cohort. On a graph, `f_on_graph` has the number for each worker.
        """
        most = min(self.attack.count(self.workers), self.cohort_size)
        return most if self.aggregate.f is None else self.aggregate.f

    @cached_property
    def rule(self) -> Pipeline:
        """Aggregation rule with its parameters."""
        return self.aggregate.pipeline(self.f)

    def f_on_graph(self, byzantine: Collection[int], round: int) -> list[int]:
        """Return the number of Byzantine models that the rule of each worker on a graph must tolerate in `round`.

        It is `aggregate.f`, or the number of the worker's Byzantine neighbours. In a pair of workers, it is at most 1.
        For a Byzantine worker, it is at most the largest number of an honest worker.

        Args:
            byzantine: Byzantine workers of all rounds; empty if they are drawn in each round or not known yet.
            round: number of the round, on which the graph may depend.
        """
        if self.aggregate.f is not None or not self.aggregate.takes_f:
            return [self.f] * self.workers
        adjacent = self.policy.topology.component.adjacency(self.workers, self.seed, round)
        inside = (adjacent[:, sorted(byzantine)] if byzantine else adjacent).sum(1)
        most = 1 if self.policy.component.locking == "pair" else self.attack.count(self.workers)
        counts = np.minimum(inside, min(most, self.attack.count(self.workers)))
        honest = np.setdiff1d(np.arange(self.workers), sorted(byzantine))
        return np.minimum(counts, counts[honest].max()).tolist()

    @field_validator("groups", mode="before")
    @classmethod
    def _check_groups(cls, value: Any) -> Any:
        if isinstance(value, (bool, float, dict)) or (isinstance(value, int) and value < 1):
            raise ValueError("must be a number of groups, a list with one group per worker, or a function module:name")
        return value

    @cached_property
    def grouping(self) -> np.ndarray:
        """Group of each worker, int64 [workers]; empty without groups."""
        return np.zeros(0, dtype=int) if self.groups is None else divide_workers(self.groups, self.workers)

    @cached_property
    def group_count(self) -> int:
        """Number of groups; 0 without groups."""
        return int(self.grouping.max(initial=-1)) + 1

    def groups_of(self, workers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the group of each of n `workers`, int64 [n]."""
        return self.grouping[np.asarray(workers, dtype=np.int64)]

    def f_of_groups(self, byzantine: Collection[int]) -> list[int]:
        """Return the number of Byzantine updates that the rule must tolerate in each group.

        `byzantine` are the Byzantine workers of all rounds; empty if they are drawn in each round or not known yet.
        """
        sizes, count = np.bincount(self.grouping), self.attack.count(self.workers)
        inside = np.bincount(self.groups_of([*byzantine]), minlength=len(sizes)) if byzantine else count
        most = np.minimum(inside, np.minimum(sizes, self.cohort_size))
        return most.tolist() if self.aggregate.f is None else [self.aggregate.f] * len(sizes)

    @cached_property
    def top(self) -> Settings:
        """Settings for the aggregation of the groups' models: an experiment whose workers are the groups."""
        aggregate = schema.Aggregate(**self.top_aggregate.model_dump(), nonfinite=self.aggregate.nonfinite)
        own: dict[str, Any] = {
            "workers": self.group_count,
            "cohort": None,
            "groups": None,
            "processors": [],
            "aggregate": aggregate,
        }
        own |= {"seed": draw_key(self.seed, "top"), "attack": schema.Attack(**self.top_attack.model_dump())}
        return self.model_copy(update=own)

    @property
    def chain(self) -> list[UpdateProcessor]:
        """Processors of updates, with their parameters."""
        return [table.component for table in self.processors]

    @property
    def downlink_chain(self) -> list[UpdateProcessor]:
        """Processors of what the server sends, with their parameters."""
        return [table.component for table in self.downlink]

    @property
    def weights(self) -> Weighting:
        """Aggregation weights of the workers: `aggregate.weights`, or the default ("samples" or "uniform")."""
        return self.weights_for(self.rule)

    def weights_for(self, rule: Pipeline) -> Weighting:
        """Return the aggregation weights of the workers if `rule` were the rule of the experiment."""
        by_samples = rule.needs_weights and not self.privacy.component.at_server  # `fedsim replay` applies any rule
        return self.aggregate.weights or ("samples" if by_samples else "uniform")

    @property
    def weight_total(self) -> float | None:
        """Divisor of weighted sums of updates, or None if the divisor is the sum of the weights."""
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
        """Describe each round's noisy sums, for privacy accounting. Return None without differential privacy.

        `holders` is the maximum number of workers in a round that hold the same sample.
        """
        mechanism, sampling = self.privacy.component, self.sampling.registration.target
        releases = Releases(mechanism.noise, self.workers, self.cohort_size, by_replacement=mechanism.by_replacement)
        if mechanism.at_server:
            return replace(releases, sampling=getattr(sampling, "amplifies", None))
        if mechanism.active or (sample_noise := self.local.component.sample_noise) is None:
            return releases if mechanism.active else None
        return replace(releases, noise=sample_noise.noise, per_round=self.local.most_work, holders=holders)

    def with_noise(self, releases: Releases | None) -> Self:
        """Return the experiment with the noise multiplier that reaches `privacy.target_epsilon`, if this key is set.

        `releases` are the noisy sums of each round. Raises ExperimentError if no noise is enough.
        """
        privacy = self.privacy
        if privacy.target_epsilon is None or releases is None:
            return self
        noise = releases.noise_for(privacy.target_epsilon, self.schedule_rounds, privacy.delta, privacy.accountant)
        experiment = self.at_noise(noise)
        experiment.privacy.component.check(self.expected_updates)
        return experiment

    def at_noise(self, noise: float) -> Self:
        """Return the experiment with the noise multiplier `noise`, and without `privacy.target_epsilon`."""
        experiment = self.model_copy(update={"privacy": self.privacy.model_copy(update={"target_epsilon": None})})
        table = getattr(experiment, self.noise_table).model_copy(update={"noise": noise})
        return experiment.model_copy(update={self.noise_table: table})

    @property
    def noise_table(self) -> Literal["privacy", "local"]:
        """Name of the table that contains the noise multiplier."""
        return "privacy" if self.protects == "worker" else "local"

    def noise_found(self, private: Settings) -> dict[str, float]:
        """Return {key: noise multiplier of `private`} if `privacy.target_epsilon` is set, otherwise {}."""
        if self.privacy.target_epsilon is None:
            return {}
        return {f"{self.noise_table}.noise": getattr(private, self.noise_table).params["noise"]}

    @property
    def nonfinite(self) -> Literal["error", "exclude", "keep"]:
        """How a round treats rows with NaN or infinity: `aggregate.nonfinite`, but "error" if the setting is "stop"."""
        return "error" if self.aggregate.nonfinite == "stop" else self.aggregate.nonfinite

    @property
    def in_rounds(self) -> bool:
        """Whether the experiment has synchronous rounds, in which all workers of a cohort start together."""
        return self.policy.component.in_rounds

    @property
    def topology_metadata(self) -> dict[str, Any]:
        """Metadata of the graph of workers, such as its spectral gap. Empty for a policy without a graph."""
        graph = self.policy.topology.component if self.policy.component.uses_topology else None
        return graph.metadata(self.workers, self.seed) if graph else {}

    @property
    def sends_gradients(self) -> bool:
        """Whether workers send single gradients, without local steps, to an asynchronous policy."""
        return not self.in_rounds and self.policy.component.work == "gradient"

    @cached_property
    def needs_rows(self) -> str | None:
        """The setting that needs each worker's own gradient, or None if averaged gradients are enough."""
        settings = {
            f"aggregate.rule = {show(self.rule.name)}": not self.rule.linear_by_weights,
            self.attack.setting: self.attack.name != "none",
            "processors": self.processors,
            "data.local_test_fraction": self.data.local_test_fraction,
            "local.clip_norm": self.local.clip_norm is not None,
            self.local.steps_setting: self.local.component.alters_gradients,
            'aggregate.nonfinite = "exclude"': self.aggregate.nonfinite == "exclude",
            f"distributed.trainer = {show(self.distributed.trainer)}": self.distributed.trainer != "serial",
            "records.updates": self.records.updates,
        }
        return next((setting for setting, holds in settings.items() if holds), None)

    @cached_property
    def stores_updates(self) -> tuple[str, str] | None:
        """The setting that needs all updates of a round at once, and a setting to use instead, as a pair of texts.

        None if the server only sums updates.
        """
        altering = self.attack.component.alters_rows and not self.attack.component.row_by_row
        settings = {
            f"aggregate.rule = {show(self.rule.name)}": (not self.rule.is_mean, "aggregate.rule=weighted_mean"),
            self.attack.setting: (altering, "attack.name=label_flipping"),
            f"sync = {show(self.sync)}": (self.rounds_of_gradients > 0, "sync=parameters"),
            self.local.setting: (isinstance(self.local.component, CohortGradient), "local.algorithm=scaffold"),
            f"local.k = {self.local.component.clusters}": (self.local.component.clusters > 1, "local.k=1"),
            self.policy.setting: (not self.in_rounds, "policy=sync"),
            "groups": (self.groups is not None, "no groups"),
            "records.updates": (bool(self.records.updates), "records.updates=[]"),
        }
        return next(((setting, remedy) for setting, (holds, remedy) in settings.items() if holds), None)

    @property
    def gradient_hook(self) -> CommunicationHook | None:
        """Hook that averages the gradients of the ranks, or None if the rule needs each worker's gradient."""
        averages = traits_of(self.engine).ranks and self.rounds_of_gradients > 0 and self.needs_rows is None
        return self.distributed.hook.component if averages else None

    @property
    def local_lr(self) -> float | None:
        """Learning rate of the client algorithm, or None if it has no parameter `lr`.

        If the learning rate differs between workers, this number is 1, and `local_lr_at` returns the factor by which
        each worker's learning rate is multiplied.
        """
        return 1.0 if "lr" in self.local.varying else self.local.params.get("lr")

    @cached_property
    def local_schedule(self) -> LRSchedule | None:
        """Schedule of `local_lr`, or None if the learning rate is constant."""
        per, steps = self.local.schedule.per, self.local.steps
        steps_of_a_round = steps if isinstance(steps, int) else None
        return self.local.schedule.schedule(self.schedule_rounds if per == "round" else steps_of_a_round, per)

    @cached_property
    def server_schedule(self) -> LRSchedule | None:
        """Schedule of the server optimizer's learning rate, or None if the learning rate is constant."""
        return self.server.schedule.schedule(self.schedule_rounds)

    @property
    def schedule_rounds(self) -> int:
        """Number of rounds for which schedules and the other `planned_settings` are planned."""
        return self.planned_rounds or self.rounds

    @property
    def planned_settings(self) -> list[str]:
        """Settings whose effect depends on `planned_rounds`, such as a schedule that spans the whole run."""
        schedules = [table.place for table in (self.local.schedule, self.server.schedule) if table.spans_run]
        return schedules + ["privacy.target_epsilon"] * (self.privacy.target_epsilon is not None)

    def local_lr_at(self, round: int, step: int = 0) -> float | None:
        """Return the learning rate of the client algorithm in a round and step (from 0), or None (see `local_lr`)."""
        lr, schedule = self.local_lr, self.local_schedule
        return lr if schedule is None or lr is None else schedule.rate(lr, round, step)

    @property
    def rounds_of_gradients(self) -> int:
        """Number of rounds, at the start of the run, in which workers send gradients instead of training locally."""
        if not self.in_rounds:
            return 0
        return {"parameters": 0, "gradients": self.rounds}.get(self.sync, self.switch_after_round or 0)

    def sync_in(self, round: int) -> Literal["parameters", "gradients"]:
        """Return "gradients" if `round` aggregates the gradients of each step, otherwise "parameters"."""
        return "gradients" if round <= self.rounds_of_gradients else "parameters"

    @property
    def stopping(self) -> tuple[schema.Stop, int, int]:
        """Arguments of `EarlyStopping`: (settings, rounds between model changes, rounds between worker tests)."""
        return self.stop, 1 if self.groups is None else self.group_rounds, self.worker_evaluation.every

    @property
    def cohort_size(self) -> int:
        """Number of workers in a cohort: `cohort`, or all workers if `cohort` is unset."""
        return self.cohort or self.workers

    @property
    def largest_cohort(self) -> int:
        """Maximum number of workers in a cohort, which exceeds `cohort_size` with Poisson sampling."""
        return self.sampling.component.largest(self.workers, self.cohort_size)

    @property
    def repetitions(self) -> int:
        """Number of times that the experiment is run: `race.runs` in a race, otherwise 1."""
        return self.race.runs if self.mode == "race" else 1

    @property
    def expected_updates(self) -> float:
        """Expected number of updates in a round, from which privacy mechanisms compute the mean."""
        return self.cohort_size * (1 - self.sampling.dropout_rate)
