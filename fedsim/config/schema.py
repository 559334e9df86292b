"""The tables of an experiment: their keys, types, bounds and defaults. `validation.py` checks combinations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from fedsim.aggregation import Pipeline, make_pipeline, resolve, rule
from fedsim.asynchronous.clock.noises import noise
from fedsim.asynchronous.clock.speeds import speed
from fedsim.asynchronous.policies import policy
from fedsim.byzantine import BoundAttack, attack_strategy, bind_attack
from fedsim.config.local_schema import Amount, Count, ServerSchedule
from fedsim.core.base_table import PlugTable, Table
from fedsim.core.objects import Name
from fedsim.core.registry import Plug
from fedsim.data import dataset, partition_strategy
from fedsim.data.augmentation import ImageTransform, augmentation
from fedsim.engines.distributed.hooks import BoundHook, bind_hook, hook
from fedsim.errors import ExperimentError, show
from fedsim.loggers import logger
from fedsim.models import model
from fedsim.processing import BoundProcessor, bind_processor, processor
from fedsim.server import server_optimizer

NonNegativeFloat = Annotated[float, Field(ge=0)]


def _init_method(init: str) -> str:
    if not re.fullmatch(r"env://|tcp://.+:\d+|file:///.+", init):
        raise ValueError("env://, tcp://HOST:PORT or file:///PATH")
    return init


def _text_of_path(path: Any) -> Any:
    return str(path) if isinstance(path, Path) else path


class Model(PlugTable):
    place, named_by, registry = "model", "name", model

    name: Name = "net"


class Augment(PlugTable):
    place, named_by, registry = "data.augment", "name", augmentation

    name: Name

    def bind(self) -> ImageTransform:
        return ImageTransform(super().bind(), tuple(self.plug.takes))


class Data(PlugTable):
    place, named_by, registry = "data", "dataset", dataset

    dataset: Name = "mnist5k"
    root: Annotated[str | None, BeforeValidator(_text_of_path)] = (
        None  # folder of downloaded data sets; None: $FEDSIM_DATA, else the user's cache folder
    )
    worker_test: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fraction of each worker's samples that it tests on
    augment: Annotated[list[Augment], Field(max_length=100)] = Field(default=[])  # of training batches, in this order
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the training samples that nobody trains on

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_pairs(cls, value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, dict) and {"train", "test"} <= value.keys()):
            raise ExperimentError(
                "data: must be a name, a table, or a tuple (train, test) of two data sets, not a list or a dict; "
                "of tensors make data sets by fedsim.TensorData(inputs, targets)"
            )
        return value

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        """The table without `verify`, which experiments of earlier versions have; its default is ignored."""
        if table.get("verify", True) is not True:
            raise ExperimentError("data.verify: was removed with the checksums of MNIST's files; omit it")
        return {key: value for key, value in table.items() if key != "verify"}


class Partition(PlugTable):
    place, named_by, registry = "partition", "strategy", partition_strategy

    strategy: Name = "iid"


class Attack(PlugTable):
    """The attack, and the Byzantine workers: a random `fraction` of all, or a list of `workers`.

    With `redraw`, each round draws its own `fraction`. With `holding`, none is drawn: the `fraction` are the workers
    with the most samples of a class. Before `start_round` they follow the protocol.
    """

    place, named_by, registry = "attack", "name", attack_strategy
    alternatives = ("fraction", "workers")

    name: Name = "none"
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    workers: list[NonNegativeInt] | None = None
    redraw: bool = False
    holding: NonNegativeInt | None = None
    start_round: PositiveInt = 1

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        if table.get("fraction") and table.get("workers") is not None:
            raise cls.not_both()
        return table

    def bind(self) -> BoundAttack:
        return bind_attack(self.plug, self.params)

    def count(self, n_workers: int) -> int:
        """The number of Byzantine workers."""
        return int(self.fraction * n_workers + 1e-9) if self.workers is None else len(self.workers)


class Aggregate(PlugTable):
    """`rule` is a name, or a list of pre-aggregators and a rule, each a name or a table {rule, parameters}.

    `f` is the number of Byzantine rows that the rule tolerates; None: the number of Byzantine workers.
    `weights` None: sample counts for a rule that requires weights, equal weights for any other rule.
    "inverse_probability": the share of all samples over the probability of being in the cohort, for unbiased means.
    """

    place, named_by, registry = "aggregate", "rule", rule

    rule: Name | list[Name | dict[str, Any]] = "weighted_mean"
    f: NonNegativeInt | None = None
    weights: Literal["uniform", "samples", "inverse_probability"] | list[NonNegativeFloat] | None = None
    nonfinite: Literal["error", "stop", "exclude", "keep"] = "error"  # for rows with NaN or infinity
    root_samples: Amount = 100  # training samples of the server, for rules that use its gradient

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        rule = table.get("rule", cls.model_fields["rule"].default)
        own = {key: table[key] for key in cls.model_fields if key in table}
        resolved = cls._resolve(rule, {key: value for key, value in table.items() if key not in own}, table.get("f"))
        stages = [{"rule": plug.name, **_without_f(params)} for plug, params in resolved]
        if isinstance(rule, str):
            return {**stages[0], **own, "rule": stages[0]["rule"]}
        given = [stage if isinstance(stage, dict) else {} for stage in rule]
        stages = [{**stage, **table, "rule": stage["rule"]} for stage, table in zip(stages, given, strict=True)]
        return {**own, "rule": stages}

    def check_parameters(self) -> None:
        """`completed` has checked them."""

    @classmethod
    def _resolve(cls, rule: Any, params: dict[str, Any], f: int | None) -> list[tuple[Plug, dict[str, Any]]]:
        if not isinstance(rule, (str, list)):
            raise ExperimentError(f"aggregate.rule = {show(rule)}: must be a name, or a list of names and tables")
        return resolve(rule, params, cls.place, list(cls.model_fields), {"f": f or 0})

    def pipeline(self, f: int) -> Pipeline:
        """The rule with its parameters, for `f` Byzantine rows."""
        return make_pipeline(self._resolve(self.rule, self.params, f))

    @property
    def label(self) -> str:
        """`nnm + trimmed_mean`."""
        return self.pipeline(0).name


def _without_f(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "f"}


class Processor(PlugTable):
    place, named_by, registry = "processors", "name", processor

    name: Name
    error_feedback: bool = False  # whether a worker adds what was left out of its updates before

    def check_parameters(self) -> None:
        super().check_parameters()
        if self.error_feedback and not getattr(self.plug.target, "compresses", True):
            raise ExperimentError(
                f"processors.error_feedback = true: is for compression, and {self.name} adds noise, which it would "
                "take back; omit it"
            )

    def bind(self) -> BoundProcessor:
        return bind_processor(self.plug, self.params, error_feedback=self.error_feedback)


class Server(PlugTable):
    place, named_by, registry = "server", "optimizer", server_optimizer

    optimizer: Name = "sgd"
    schedule: ServerSchedule = ServerSchedule()  # of the optimizer's parameter `lr`


class AsyncPolicy(PlugTable):
    place, named_by, registry = "policy", "name", policy

    name: Name = "sync"


class Speed(PlugTable):
    place, named_by, registry = "clock.speed", "name", speed

    name: Name = "equal"


class Noise(PlugTable):
    place, named_by, registry = "clock.noise", "name", noise

    name: Name = "constant"


class Clock(Table):
    """Virtual time: a worker computes for steps x base x speed x noise, and sends in latency + bytes / bandwidth."""

    base: PositiveFloat = 1.0  # seconds of a step
    speed: Speed = Speed()
    noise: Noise = Noise()
    latency: NonNegativeFloat = 0.0  # seconds
    bandwidth: PositiveFloat | None = None  # bytes per second; None: infinite
    departures: dict[str, NonNegativeFloat] = Field(default={})  # worker = seconds after which it leaves
    log: str | None = None  # repeat the order of a recorded race: a run folder, or its race.csv


class Race(Table):
    """Processes that race. The result differs each time, so a race is run several times, and the records hold all."""

    runs: Annotated[int, Field(gt=0, le=10_000)] = 5


class Batched(Table):
    """Settings of the engine `batched`."""

    width: Amount | None = None  # rows per stack at most; None: as many as fit into memory


class Hook(PlugTable):
    place, named_by, registry = "distributed.hook", "name", hook

    name: Name = "allreduce"

    def bind(self) -> BoundHook:
        return bind_hook(self.plug, self.params)


class Distributed(Table):
    """Settings of the engine `distributed`."""

    backend: str | None = None  # of torch.distributed; None: the default of the device; gloo if ranks share a GPU
    timeout: PositiveFloat = 60.0  # seconds without a heartbeat after which a rank counts as lost
    init: Annotated[str, AfterValidator(_init_method)] = "env://"
    inner: Literal["serial", "batched"] = "serial"  # whether a rank trains its rows one by one or stacked
    hook: Hook = Hook()  # compresses gradients that DistributedDataParallel averages


class WorkerEvaluation(Table):
    """The test of single workers' models on the workers' own test samples; needs `data.worker_test`."""

    every: Amount = 10  # rounds; also after the last round
    workers: Amount = 100  # at most so many are tested, drawn at random once; Byzantine workers are not
    fine_tune: Count = 0  # epochs of local training of the global model before a second test; 0: no second test


class Checkpoint(Table):
    """Checkpoint settings for resuming an interrupted run with `fedsim run --resume RUN`."""

    every: Count | None = None  # rounds; 0: never; None: as often as possible in 1 percent of the time
    keep: Amount = 2  # the number of checkpoints in the folder


class Logger(PlugTable):
    place, named_by, registry = "records.loggers", "name", logger

    name: Name


class Records(Table):
    """Optional files of a run folder, and the loggers that get the numbers of each round."""

    updates: list[Amount] = Field(default=[])  # rounds whose updates are recorded, for `fedsim replay`
    model: bool = True  # model.safetensors
    curve: bool = True  # the figure `curve`
    figures: list[Literal["png", "svg", "pdf"]] = Field(default=["png"])  # formats of all figures
    tensorboard: bool = False  # the logger tensorboard
    loggers: Annotated[list[Logger], Field(max_length=20)] = Field(default=[])

    @property
    def all_loggers(self) -> list[Logger]:
        """The loggers, with the one that `tensorboard` stands for."""
        named = [each.name for each in self.loggers]
        return [
            *self.loggers,
            *([Logger(name="tensorboard")] if self.tensorboard and "tensorboard" not in named else []),
        ]
