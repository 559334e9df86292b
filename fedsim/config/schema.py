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
from fedsim.aggregation.resolve import as_table
from fedsim.byzantine import BoundAttack, attack_strategy, bind_attack
from fedsim.config.local_schema import Amount, Count, ServerSchedule
from fedsim.core.base_table import PlugTable, Table
from fedsim.core.objects import Name
from fedsim.core.registry import Plug
from fedsim.core.suggestions import nearest
from fedsim.data import dataset, partition_strategy
from fedsim.data.augmentation import ImageTransform, augmentation
from fedsim.engines.distributed.hooks import BoundHook, hook
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
    """The model that all workers train."""

    place, named_by, registry = "model", "name", model

    name: Name = "net"


class Augment(PlugTable):
    """One augmentation of the images of a training batch."""

    place, named_by, registry = "data.augment", "name", augmentation

    name: Name

    def bind(self) -> ImageTransform:
        return ImageTransform(super().bind(), tuple(self.plug.takes))


class Data(PlugTable):
    """The data set."""

    place, named_by, registry = "data", "dataset", dataset

    dataset: Name = "mnist5k"
    root: Annotated[str | None, BeforeValidator(_text_of_path)] = None
    """Folder of downloaded data sets. Unset: the environment variable FEDSIM_DATA, else `~/.cache/fedsim/data`."""
    worker_test: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each worker's samples on which it does not train, but tests."""
    augment: Annotated[list[Augment], Field(max_length=100)] = Field(default=[])
    """Augmentations of training batches: names or tables, applied in this order."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training samples on which nobody trains; each round records `validation_loss` and
    `validation_accuracy`."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_pairs(cls, value: Any) -> Any:
        pair = isinstance(value, dict) and {"train", "test"} <= value.keys() and "dataset" not in value
        if pair or isinstance(value, list):
            raise ExperimentError(
                "data: must be a name, a table, or a tuple (train, test), not a list or a dict; train and test are "
                "data sets, tuples (inputs, targets) of tensors or arrays, or lists of samples (input, target)"
            )
        return value


class Partition(PlugTable):
    """How the training samples are divided among the workers."""

    place, named_by, registry = "partition", "strategy", partition_strategy

    strategy: Name = "iid"


class Attack(PlugTable):
    """The attack, and the Byzantine workers."""

    place, named_by, registry = "attack", "name", attack_strategy
    alternatives = ("fraction", "workers")

    name: Name = "none"
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the workers that are Byzantine, drawn by the seed."""
    workers: list[NonNegativeInt] | None = None
    """The Byzantine workers, instead of a fraction."""
    redraw: bool = False
    """Whether each round draws its own fraction."""
    holding: NonNegativeInt | None = None
    """A class: the fraction are the workers with the most samples of it."""
    start_round: PositiveInt = 1
    """The first round in which they attack; before it they follow the protocol."""

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
    """How the rows of a cohort become one update."""

    place, named_by, registry = "aggregate", "rule", rule

    rule: Name | list[Name | dict[str, Any]] = "weighted_mean"
    """The rule, or a list of pre-aggregators and a rule, each a name or a table {rule, parameters}."""
    f: NonNegativeInt | None = None
    """Number of Byzantine rows that the rule must tolerate, for rules with this parameter. Unset: their true number."""
    weights: Literal["uniform", "samples", "inverse_probability"] | list[NonNegativeFloat] | None = None
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
        own = {key: table[key] for key in cls.model_fields if key in table}
        resolved = cls._resolve(rule, {key: value for key, value in table.items() if key not in own}, table.get("f"))
        stages = [{"rule": plug.name, **_without_f(params)} for plug, params in resolved]
        if isinstance(rule, str):
            return {**stages[0], **own, "rule": stages[0]["rule"]}
        given = [as_table(stage, "aggregate.rule") for stage in rule]
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
    """One step of what is done to an update before it is aggregated."""

    place, named_by, registry = "processors", "name", processor

    name: Name
    error_feedback: bool = False
    """Whether a worker adds what was left out of its earlier updates."""

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
    """How the server moves the global model by the aggregated update."""

    place, named_by, registry = "server", "optimizer", server_optimizer

    optimizer: Name = "sgd"
    schedule: ServerSchedule = ServerSchedule()
    """How the parameter `lr` of the server optimizer changes over the rounds."""


class Batched(Table):
    """Settings of the engine `batched`."""

    width: Amount | None = None
    """Rows of a stack at most. Unset: by memory and cache."""


class Hook(PlugTable):
    """How ranks send the gradients that they average: with `sync = "gradients"`, a mean and no attack."""

    place, named_by, registry = "distributed.hook", "name", hook

    name: Name = "allreduce"

    def check_parameters(self) -> None:
        if self.name not in (names := self.registry.names()):
            raise ExperimentError(
                f"{self.place}.name = {show(self.name)}: no such communication hook; {nearest(self.name, names)}"
            )
        super().check_parameters()

    def bind(self) -> BoundHook:
        return BoundHook(self.name, self.plug.bind(self.params))


class Distributed(Table):
    """Settings of the engine `distributed`."""

    backend: str | None = None
    """Backend of torch.distributed. Unset: nccl on CUDA, gloo on CPUs and for ranks that share a GPU."""
    timeout: PositiveFloat = 60.0
    """Seconds without a heartbeat after which a rank counts as lost, and in which all ranks must have joined."""
    init: Annotated[str, AfterValidator(_init_method)] = "env://"
    """Address at which ranks meet: `env://`, `tcp://HOST:PORT` or `file:///PATH`."""
    inner: Literal["serial", "batched"] = "serial"
    """Whether a rank trains its rows one by one or stacked."""
    hook: Hook = Hook()
    """How ranks send the gradients that they average."""


class WorkerEvaluation(Table):
    """The test of single workers' models on the workers' own test samples; needs `data.worker_test`."""

    every: Amount = 10
    """Rounds between two tests; there is one after the last round too."""
    workers: Amount = 100
    """Workers that are tested at most, drawn once; Byzantine workers are not."""
    fine_tune: Count = 0
    """Epochs of local training of the global model before a second test; 0: no second test."""


class Checkpoint(Table):
    """Checkpoint settings for resuming an interrupted run with `fedsim run --resume RUN`."""

    every: Count | None = None
    """Rounds between two checkpoints; 0: none. Unset: as often as possible in 1 percent of the time."""
    keep: Amount = 2
    """Number of newest checkpoints that are kept."""


class Logger(PlugTable):
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
