"""The tables of an experiment: their keys, types, bounds and defaults. `validation.py` checks combinations."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, model_validator
from torch import nn

from fedsim.aggregation import Pipeline, make_pipeline, resolve, rule
from fedsim.aggregation.resolve import as_table
from fedsim.asynchronous.delays import noise, slowdown
from fedsim.asynchronous.policies import policy
from fedsim.byzantine import attack_strategy
from fedsim.clients import ClientAlgorithm, KeptState, LRSchedule, as_algorithm, client_algorithm, lr_schedule
from fedsim.clients.adapters import TrainFunction
from fedsim.core.base_table import ComponentTable, Table
from fedsim.core.learning_task import REDUCTION, LearningTask, LossTask, learning_task
from fedsim.core.metrics import OutputMetric, metric
from fedsim.core.objects import Name
from fedsim.core.registry import Registration
from fedsim.core.suggestions import nearest
from fedsim.data import dataset, partition_strategy
from fedsim.data.augmentation import ImageTransform, augmentation
from fedsim.engines.distributed.hooks import hook
from fedsim.errors import ExperimentError, show
from fedsim.loggers import logger
from fedsim.models import model
from fedsim.processing import UpdateProcessor, processor
from fedsim.server import sampling_strategy, server_optimizer

Amount = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
NonNegative = Annotated[float, Field(ge=0)]

DIRECTIONS: dict[str, Literal["min", "max"]] = {
    "validation_accuracy": "max",
    "validation_loss": "min",
    "test_accuracy": "max",
    "test_loss": "min",
    "train_loss": "min",
}


def matching(pattern: str, requirement: str) -> AfterValidator:
    """Return a validator of texts that match a pattern as a whole; `requirement` says in errors what they must be."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(requirement)
        return text

    return AfterValidator(check)


class Task(ComponentTable):
    """The loss of training and tests, and which answers are correct.

    A loss function or loss module, such as `torch.nn.functional:mse_loss`, is a task without accuracy.
    """

    place, named_by, registry = "task", "name", learning_task

    name: Name = "classification"

    def check_parameters(self) -> None:
        super().check_parameters()
        self.component  # noqa: B018  # raises an error if it is no task

    @cached_property
    def component(self) -> LearningTask:
        """The task with its parameters: an instance of the dataclass `name`, or the result of the function `name`."""
        registration, bound = self.registration, self.registration.bind(self.params)
        if registration.takes:
            return LossTask(self.name, bound, tuple(registration.takes))
        task = bound if is_dataclass(registration.target) else bound()
        if isinstance(task, nn.Module):
            reduction = getattr(task, REDUCTION, "mean")
            if reduction not in ("mean", "none"):
                raise ExperimentError(
                    f'{self.setting}: has the reduction {show(reduction)}; must be "mean" or "none", '
                    'since the loss of a batch is the mean over its samples; use reduction="mean" and scale local.lr'
                )
            return LossTask(self.name, bound)
        if missing := [name for name in ("loss", "check_outputs") if not hasattr(task, name)]:
            raise ExperimentError(
                f"{self.setting}: has no method {missing[0]}; must be a loss function of (outputs, "
                "targets), a loss module, or a task with the methods of fedsim.core.learning_task.LearningTask"
            )
        return task


class EvaluationMetric(ComponentTable):
    """A metric of each test; `label` is its name in the records, by default that of the metric."""

    place, named_by, registry = "metrics", "name", metric

    name: Name
    label: (
        Annotated[
            str, matching(r"[A-Za-z_][A-Za-z0-9_]{0,49}", "a name of letters, digits and _, at most 50 characters")
        ]
        | None
    ) = None
    """Its name in the records. Unset: that of the metric."""

    @cached_property
    def component(self) -> OutputMetric:
        return OutputMetric.of(self.registration, self.params, label=self.label)


class Model(ComponentTable):
    """The model that all workers train."""

    place, named_by, registry = "model", "name", model

    name: Name = "net"


class Augment(ComponentTable):
    """One augmentation of the images of a training batch."""

    place, named_by, registry = "data.augment", "name", augmentation

    name: Name

    @cached_property
    def component(self) -> ImageTransform:
        return ImageTransform(self.registration.bind(self.params), tuple(self.registration.takes))


class Data(ComponentTable):
    """The data set."""

    place, named_by, registry = "data", "name", dataset

    name: Name = "mnist5k"
    root: Annotated[str | None, BeforeValidator(lambda root: str(root) if isinstance(root, Path) else root)] = None
    """Folder of downloaded data sets. Unset: the environment variable FEDSIM_DATA, else `~/.cache/fedsim/data`."""
    local_test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each worker's samples on which it does not train, but tests."""
    augment: Annotated[list[Augment], Field(max_length=100)] = Field(default=[])
    """Augmentations of training batches: names or tables, applied in this order."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training samples on which nobody trains; each round records `validation_loss` and
    `validation_accuracy`."""

    @property
    def transforms(self) -> list[ImageTransform]:
        """The augmentations with their parameters."""
        return [table.component for table in self.augment]

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_pairs(cls, value: Any) -> Any:
        pair = isinstance(value, dict) and {"train", "test"} <= value.keys() and "name" not in value
        if pair or isinstance(value, list):
            raise ExperimentError(
                "data: must be a name, a table, or a tuple (train, test), not a list or a dict; train and test are "
                "data sets, tuples (inputs, targets) of tensors or arrays, or lists of samples (input, target)"
            )
        return value


class Partition(ComponentTable):
    """How the training samples are divided among the workers."""

    place, named_by, registry = "partition", "name", partition_strategy

    name: Name = "iid"


class Sampling(ComponentTable):
    """How the workers of a round are chosen."""

    place, named_by, registry = "sampling", "name", sampling_strategy

    name: Name = "uniform"
    client_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a chosen worker does not report, so that its update is lost."""


def _check_work(value: Any) -> Any:
    """Check an amount of local work: n, [n, ...], {uniform = [low, high]} or {choice = [n, ...]}."""
    form, values = "one", [value]
    if isinstance(value, list) and value:
        form, values = "list", value
    elif isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), list):
        ((form, values),) = value.items()
    if form not in ("one", "list", "uniform", "choice") or not values or any(type(n) is not int for n in values):
        raise ValueError("an integer, a list of integers, {uniform = [low, high]} or {choice = [n, ...]}")
    if min(values) < 1 or max(values) >= 2**63:
        raise ValueError("greater than 0" if min(values) < 1 else "less than 2^63")
    if form == "uniform" and not (len(values) == 2 and values[0] <= values[1]):
        raise ValueError("{uniform = [low, high]} with low <= high")
    return value


LocalWork = Annotated[int | list[int] | dict[str, list[int]], BeforeValidator(_check_work)]


class ServerSchedule(ComponentTable):
    """How the learning rate changes over the rounds; in the first `warmup` rounds it grows linearly."""

    place, named_by, registry = "server.schedule", "name", lr_schedule

    name: Name = "constant"
    warmup: Count = 0
    """Rounds, or steps, in which the learning rate first grows linearly."""

    def schedule(self, length: int | None, per: Literal["round", "step"] = "round") -> LRSchedule | None:
        """Return the schedule, of so many rounds or steps; None if the learning rate is constant."""
        if self == type(self)():
            return None
        settings = {"length": length, "warmup": self.warmup, "per": per, "place": self.place}
        return LRSchedule.of(self.registration, self.params, **settings)


class LocalSchedule(ServerSchedule):
    """How the learning rate of the client algorithm changes over the rounds, or over the steps of each round."""

    place = "local.schedule"

    per: Literal["round", "step"] = "round"
    """Whether the learning rate changes over the rounds, or over the steps of each round."""


class Local(ComponentTable):
    """The work of a worker between two synchronizations: `epochs` or `steps`, not both.

    Each is a number, a list with one for each worker, or drawn for each worker and round: {uniform = [1, 5]} draws an
    integer from 1 to 5, {choice = [1, 5, 20]} one of these.
    """

    place, named_by, registry = "local", "algorithm", client_algorithm
    alternatives = ("epochs", "steps")

    algorithm: Name = "sgd"
    epochs: LocalWork | None = None
    """Epochs over the worker's shard in a round; 1 if neither epochs nor steps are given."""
    steps: LocalWork | None = None
    """Steps of the client algorithm in a round, instead of epochs."""
    batch_size: Amount = 10
    """Samples of a batch."""
    drop_last: bool = False
    """Whether an epoch leaves out a last batch that is smaller than `batch_size`; a shard smaller than a batch is still
    one batch."""
    accumulate: Amount = 1
    """Batches whose mean gradient is one step; the last step of a round may take fewer."""
    clip_norm: PositiveFloat | None = None
    """The largest L2 norm of a worker's gradient, which is scaled to it before weight decay and momentum. Unset: none.
    """
    keep_state: bool = False
    """Whether a worker's client algorithm continues with its state (momentum, ...) of its last round."""
    schedule: LocalSchedule = LocalSchedule()
    """How the parameter `lr` of the client algorithm changes."""

    @cached_property
    def component(self) -> ClientAlgorithm:
        """Return the client algorithm, before it knows the model."""
        registration = self.registration
        algorithm = (
            TrainFunction(registration, self.params)
            if registration.takes
            else as_algorithm(registration.bind(self.params))
        )
        return KeptState(algorithm) if self.keep_state else algorithm

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        lengths = [key for key in cls.alternatives if table.get(key) is not None]
        if len(lengths) > 1:
            raise cls.not_both()
        return table if lengths else {**table, "epochs": 1}


class Attack(ComponentTable):
    """The attack, and the Byzantine workers."""

    place, named_by, registry = "attack", "name", attack_strategy
    alternatives = ("fraction", "workers")

    name: Name = "none"
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the workers that are Byzantine, drawn by the seed."""
    workers: list[Count] | None = None
    """The Byzantine workers, instead of a fraction."""
    resample: bool = False
    """Whether each round draws its own fraction."""
    by_class: Count | None = None
    """A class: the fraction are the workers with the most samples of it."""
    start_round: Amount = 1
    """The first round in which they attack; before it they follow the protocol."""

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        if table.get("fraction") and table.get("workers") is not None:
            raise cls.not_both()
        return table

    def count(self, n_workers: int) -> int:
        """Return the number of Byzantine workers."""
        return int(self.fraction * n_workers + 1e-9) if self.workers is None else len(self.workers)


class Aggregate(ComponentTable):
    """How the rows of a cohort become one update."""

    place, named_by, registry = "aggregate", "rule", rule

    rule: Name | list[Name | dict[str, Any]] = "weighted_mean"
    """The rule, or a list of pre-aggregators and a rule, each a name or a table {rule, parameters}."""
    f: Count | None = None
    """Number of Byzantine rows that the rule must tolerate, for rules with this parameter. Unset: their true number."""
    weights: Literal["uniform", "samples", "inverse_probability"] | list[NonNegative] | None = None
    """Weights of the workers: their sample counts; equal; the share of all samples over the probability of being in the
    cohort, for unbiased means; or a list. Unset: sample counts for a rule that requires weights, else equal."""
    nonfinite: Literal["error", "stop", "exclude", "keep"] = "error"
    """What happens with rows that hold NaN or infinity. `error`: the run ends with an error. `stop`: it ends with the
    last finite model. `exclude`: they are left out and recorded. `keep`: they are aggregated."""
    root_samples: Amount = 100
    """Number of training samples that the server holds, for rules that use its gradient (`fltrust`)."""

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        rule = table.get("rule", cls.model_fields["rule"].default)
        table_keys = {key: table[key] for key in cls.model_fields if key in table}
        resolved = cls._resolve(
            rule, {key: value for key, value in table.items() if key not in table_keys}, table.get("f")
        )
        stages = [{"rule": registration.name, **_without_f(params)} for registration, params in resolved]
        if isinstance(rule, str):
            return {**stages[0], **table_keys, "rule": stages[0]["rule"]}
        stage_tables = [as_table(stage, "aggregate.rule") for stage in rule]
        stages = [{**stage, **table, "rule": stage["rule"]} for stage, table in zip(stages, stage_tables, strict=True)]
        return {**table_keys, "rule": stages}

    def check_parameters(self) -> None:
        """`completed` has checked them."""

    @classmethod
    def _resolve(cls, rule: Any, params: dict[str, Any], f: int | None) -> list[tuple[Registration, dict[str, Any]]]:
        if not isinstance(rule, (str, list)):
            raise ExperimentError(f"aggregate.rule = {show(rule)}: must be a name, or a list of names and tables")
        return resolve(rule, params, cls.place, list(cls.model_fields), {"f": f or 0})

    def pipeline(self, f: int) -> Pipeline:
        """Return the rule with its parameters, for `f` Byzantine rows."""
        return make_pipeline(self._resolve(self.rule, self.params, f))

    @property
    def label(self) -> str:
        """`nnm + trimmed_mean`."""
        return self.pipeline(0).name


def _without_f(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "f"}


class Processor(ComponentTable):
    """One step of what is done to an update before it is aggregated."""

    place, named_by, registry = "processors", "name", processor

    name: Name
    error_feedback: bool = False
    """Whether a worker adds what was left out of its earlier updates."""

    def check_parameters(self) -> None:
        super().check_parameters()
        if self.error_feedback and not getattr(self.registration.target, "compresses", True):
            raise ExperimentError(
                f"processors.error_feedback = true: is for compression, and {self.name} adds noise, which it would "
                "take back; omit it"
            )

    @cached_property
    def component(self) -> UpdateProcessor:
        return UpdateProcessor.of(self.registration, self.params, error_feedback=self.error_feedback)


class Server(ComponentTable):
    """How the server moves the global model by the aggregated update."""

    place, named_by, registry = "server", "name", server_optimizer

    name: Name = "sgd"
    schedule: ServerSchedule = ServerSchedule()
    """How the parameter `lr` of the server optimizer changes over the rounds."""


class Batched(Table):
    """Settings of the engine `batched`."""

    max_rows: Amount | None = None
    """Maximum number of rows in a stack. Unset: by memory and cache."""


class Hook(ComponentTable):
    """How ranks send the gradients that they average: with `sync = "gradients"`, a mean and no attack."""

    place, named_by, registry = "distributed.hook", "name", hook

    name: Name = "allreduce"

    def check_parameters(self) -> None:
        if self.name not in (names := self.registry.names()):
            raise ExperimentError(
                f"{self.place}.name = {show(self.name)}: no such communication hook; {nearest(self.name, names)}"
            )
        super().check_parameters()


class Distributed(Table):
    """Settings of the engine `distributed`."""

    backend: str | None = None
    """Backend of torch.distributed. Unset: nccl on CUDA, gloo on CPUs and for ranks that share a GPU."""
    timeout: PositiveFloat = 60.0
    """Seconds without a heartbeat after which a rank counts as lost, and in which all ranks must have joined."""
    init_method: Annotated[
        str, matching(r"env://|tcp://.+:\d+|file:///.+", "env://, tcp://HOST:PORT or file:///PATH")
    ] = "env://"
    """Address at which ranks meet: `env://`, `tcp://HOST:PORT` or `file:///PATH`."""
    trainer: Literal["serial", "batched"] = "serial"
    """Whether a rank trains its rows one by one or stacked."""
    hook: Hook = Hook()
    """How ranks send the gradients that they average."""


class AsyncPolicy(ComponentTable):
    """What the server does with each result that arrives, if there are no synchronous rounds."""

    place, named_by, registry = "policy", "name", policy

    name: Name = "sync"


class Slowdown(ComponentTable):
    """Factor of each worker's computing time on the virtual clock: 2 is twice as slow."""

    place, named_by, registry = "clock.slowdown", "name", slowdown

    name: Name = "equal"


class Noise(ComponentTable):
    """How the duration of work varies on the virtual clock."""

    place, named_by, registry = "clock.noise", "name", noise

    name: Name = "constant"


class Clock(Table):
    """Virtual time: work takes gradients x step_seconds x slowdown x noise, and sending latency + bytes / bandwidth."""

    step_seconds: PositiveFloat = 1.0
    """Seconds of a gradient of a batch; a local step of `sgd` computes one."""
    slowdown: Slowdown = Slowdown()
    """Factor of each worker's computing time: 2 is twice as slow."""
    noise: Noise = Noise()
    """How the duration of work varies."""
    latency: NonNegative = 0.0
    """Seconds of each message."""
    bandwidth: PositiveFloat | None = None
    """Bytes per second. Unset: infinite."""
    departures: dict[str, NonNegative] = Field(default={})
    """Seconds after which workers leave: `{3 = 100.0}`."""
    replay_log: str | None = None
    """A run folder of a race, or its race.csv: the clock repeats its order of events."""


class Race(Table):
    """Processes that race. The result differs each time, so a race is run several times, and the records hold all."""

    runs: Annotated[int, Field(gt=0, le=10_000)] = 5
    """Number of runs."""


class WorkerEvaluation(Table):
    """The test of single workers' models on the workers' own test samples; needs `data.local_test_fraction`."""

    every: Amount = 10
    """Rounds between two tests; there is one after the last round too."""
    workers: Amount = 100
    """Workers that are tested at most, drawn once; Byzantine workers are not."""
    fine_tune: Count = 0
    """Epochs of local training of the global model before a second test; 0: no second test."""


class Stop(Table):
    """A run ends after a round in which `metric` reaches `target`, or has not improved for `patience` rounds. Its model
    is that of the last round."""

    metric: str = "validation_accuracy"
    """The number of a round that is compared: `validation_accuracy`, `validation_loss`, `test_accuracy`, `test_loss`,
    `train_loss`, or `metrics.NAME`."""
    mode: Literal["min", "max"] | None = None
    """Whether a higher or a lower value is better. Unset: as of an accuracy or a loss."""
    patience: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Rounds without an improvement after which the run ends. Unset: it does not end so."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """By how much a value must be better to be an improvement."""
    target: float | None = None
    """A value of the metric at which the run ends. Unset: it does not end so."""

    @property
    def direction(self) -> Literal["min", "max"]:
        return self.mode or DIRECTIONS.get(self.metric, "max")

    @property
    def active(self) -> bool:
        """Whether a run can end early."""
        return self.patience is not None or self.target is not None


class Checkpoint(Table):
    """Checkpoint settings for resuming an interrupted run with `fedsim run --resume RUN`."""

    every: Count | None = None
    """Rounds between two checkpoints; 0: none. Unset: as often as possible in 1 percent of the time."""
    keep: Amount = 2
    """Number of newest checkpoints that are kept."""


class Logger(ComponentTable):
    """Where the numbers of each round go besides the run folder."""

    place, named_by, registry = "records.loggers", "name", logger

    name: Name


class Records(Table):
    """Optional files of a run folder, and the loggers that get the numbers of each round."""

    updates: list[Amount] = Field(default=[])
    """Rounds whose updates are recorded, for `fedsim replay`."""
    model: bool = True
    """Whether the trained model is written."""
    curve: bool = True
    """Whether the figure of accuracy and losses is drawn."""
    figures: list[Literal["png", "svg", "pdf"]] = Field(default=["png"])
    """Formats of all figures."""
    tensorboard: bool = False
    """Whether TensorBoard files are written; the same as the logger `tensorboard`."""
    loggers: Annotated[list[Logger], Field(max_length=20)] = Field(default=[])
    """Where the numbers of each round go besides: names or tables."""

    @property
    def all_loggers(self) -> list[Logger]:
        """The loggers, with the one that `tensorboard` stands for."""
        named = [each.name for each in self.loggers]
        return [
            *self.loggers,
            *([Logger(name="tensorboard")] if self.tensorboard and "tensorboard" not in named else []),
        ]
