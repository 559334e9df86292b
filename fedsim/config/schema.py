"""The tables of an experiment: keys, types, bounds and defaults. `validation.py` checks combinations."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from torch import nn

from fedsim.aggregation import Pipeline, make_pipeline, resolve, rule
from fedsim.aggregation.resolve import FORMS, as_table
from fedsim.asynchronous.policies import policy
from fedsim.asynchronous.policies.topologies import adjacency_of, is_graph, topology
from fedsim.byzantine import attack_strategy
from fedsim.clients import ClientAlgorithm, KeptState, LRSchedule, Streamed, as_algorithm, client_algorithm, lr_schedule
from fedsim.clients.adapters import TrainFunction
from fedsim.clients.lr_schedules import LENGTHS
from fedsim.clients.schedule import Varying
from fedsim.core.base_table import ComponentTable, Name, Table
from fedsim.core.learning_task import LearningTask, LossTask, learning_task
from fedsim.core.metrics import OutputMetric, metric
from fedsim.core.numbers import Count, FractionBelowOne, NonNegativeFloat, PositiveCount, PositiveFloat, ProperFraction
from fedsim.core.objects import ObjectName, plain
from fedsim.core.registry import Component, Registration, Registry, in_chain
from fedsim.core.validation_errors import explain
from fedsim.data import dataset, partition_strategy
from fedsim.data.augmentation import ImageTransform, augmentation
from fedsim.data.sources import data_table
from fedsim.delays import noise, slowdown
from fedsim.errors import ExperimentError, called, one_line, show
from fedsim.hints.meanings import nearest
from fedsim.loggers import logger
from fedsim.models import model
from fedsim.models.base import dimensions_of
from fedsim.privacy import Mechanism, privacy_mechanism
from fedsim.processes.hooks import hook
from fedsim.processing import UpdateProcessor, processor
from fedsim.server import sampling_strategy, server_optimizer

OWN = "own"  # value of `data.local_test_fraction`
DIRECTIONS: dict[str, Literal["min", "max"]] = {
    "validation_accuracy": "max",
    "validation_loss": "min",
    "test_accuracy": "max",
    "test_loss": "min",
    "worker_accuracy": "max",
    "worker_loss": "min",
    "train_loss": "min",
}


def matching(pattern: str, requirement: str) -> AfterValidator:
    """Return a pydantic validator for texts that match `pattern` as a whole. Errors say "must be {requirement}"."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(requirement)
        return text

    return AfterValidator(check)


def _in_list(value: Any) -> Any:
    value = in_chain(value)
    return [value] if isinstance(value, dict) or (isinstance(value, str) and "," not in value) else value


OneOrMore = BeforeValidator(_in_list)  # for a list of components, which may be given as a single name or table


class Task(ComponentTable):
    """The learning task, which defines the loss and the correct predictions in training and tests.

    A loss function or loss module, such as `torch.nn.functional:mse_loss`, is a task without accuracy.
    """

    place, named_by, registry, follows_data = "task", "name", learning_task, True

    name: Name = "classification"

    def check_parameters(self) -> None:
        super().check_parameters()
        self.component  # noqa: B018  # raises an error if the component is not a task

    @cached_property
    def component(self) -> LearningTask:
        """Task with its parameters: an instance of the dataclass `name`, or the result of the function `name`."""
        registration, bound = self.registration, self.registration.bind(self.params)
        if registration.takes:
            return LossTask.of(self.name, bound, tuple(registration.takes), registration.target)
        task = bound if is_dataclass(registration.target) else bound()
        if isinstance(task, nn.Module):
            return LossTask.of(self.name, bound, (), task)
        if missing := [name for name in ("loss", "check_outputs") if not hasattr(task, name)]:
            raise ExperimentError(
                f"{self.setting}: has no method {missing[0]}; must be a loss function of (outputs, "
                "targets), a loss module, or a task with the methods of fedsim.core.learning_task.LearningTask"
            )
        try:
            inspect.signature(task.loss).bind("outputs", "targets", "none")
        except TypeError:
            raise ExperimentError(
                f"{self.setting}: its method `loss` must take outputs, targets and reduction"
            ) from None
        return task


class EvaluationMetric(ComponentTable):
    """A metric that is computed in each test."""

    place, index, named_by, registry = "metrics", "[]", "name", metric

    name: Name
    label: (
        Annotated[
            str, matching(r"[A-Za-z_][A-Za-z0-9_]{0,49}", "a name of letters, digits and _, at most 50 characters")
        ]
        | None
    ) = None
    """Name of the metric in the records. Unset: the name of the component."""

    @cached_property
    def component(self) -> OutputMetric:
        return OutputMetric.of(self.registration, self.params, label=self.label)


class LoRA(Table):
    """Low-rank adapters: linear layers of the model are frozen, and a low-rank term that is added to each is trained.

    All other parameters are frozen too, except those that match `local.trainable`. Hu et al. 2022.
    """

    rank: Count = 0
    """Rank of the adapters. 0: no adapters."""
    alpha: PositiveFloat = 8.0
    """The low-rank term is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["*"])
    """Name patterns of the linear layers that get an adapter, with `*` and `?` as in a shell."""


class Model(ComponentTable):
    """The model that all workers train."""

    place, named_by, registry, follows_data = "model", "name", model, True

    name: Name = "net"
    weights: Annotated[str | None, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)] = None
    """File (`.safetensors`) with the initial parameters and buffers. Unset: the random initialization of the model."""
    lora: LoRA = LoRA()
    """Low-rank adapters, which are trained instead of the model's own parameters."""

    @property
    def from_data(self) -> list[str]:
        """Names of the model's parameters that are not set, so that the experiment takes them from the data."""
        return [name for name in dimensions_of(self.registration) if name not in self.model_fields_set]

    def check_parameters(self) -> None:
        fields = self.registration.parameters.model_fields
        required = [name for name in self.from_data if fields[name].is_required()]
        self.params.update(dict.fromkeys(required, 1))  # until the data is known
        super().check_parameters()


class Augment(ComponentTable):
    """One augmentation of the images in training batches."""

    place, index, named_by, registry = "data.augment", "[]", "name", augmentation

    name: Name

    @cached_property
    def component(self) -> ImageTransform:
        return ImageTransform(self.registration.bind(self.params), tuple(self.registration.takes))


class Data(ComponentTable):
    """The data set."""

    place, named_by, registry = "data", "name", dataset

    name: Name = "mnist5k"
    root: Annotated[str | None, BeforeValidator(lambda root: str(root) if isinstance(root, Path) else root)] = None
    """Folder of downloaded data sets. Unset: the environment variable FEDSIM_DATA, or `~/.cache/fedsim/data`."""
    local_test_fraction: FractionBelowOne | Literal[OWN] = 0.0  # type: ignore[valid-type]
    """Fraction of each worker's samples that is held out as the worker's local test set. `own`: the local test set of a
    worker is that of its owner. This is the default for a partition by owners if the test data names the owners
    too."""
    stratify: bool | None = None
    """Whether samples that are drawn for tests, validation or local tests contain the same fraction of each class.
    Unset: true if test samples are drawn from one data set with class labels."""
    channels: Literal["first", "last"] | None = None
    """Whether the first or the last axis of an image array contains the channels. Unset: the last if only this axis can
    contain channels (at most 4); otherwise the first, or an error if both axes can."""
    split_by: str | None = None
    """Column of owners whose samples are kept together when samples are drawn for tests, validation or local tests.
    `samples`: samples of one owner may be separated. Unset: if test samples are drawn, the column with the most owners,
    unless the partition already divides by this column or by a finer one."""
    augment: Annotated[list[Augment], OneOrMore, Field(max_length=100)] = Field(default=[])
    """Augmentations of training batches: names or tables, applied in this order."""
    validation_fraction: FractionBelowOne = 0.0
    """Fraction of the training samples that no worker trains on. Each round records `validation_loss` and
    `validation_accuracy` on these samples."""

    def source(self, partition: Partition) -> tuple[str, str | None, dict[str, Any]]:
        """Return the name, root and parameters of the data set that is divided by `partition`, for `load_dataset`."""
        column_of = getattr(partition.component, "column", None)
        settings = {"stratify": self.stratify, "split_by": self.split_by, "channels": self.channels}
        settings["partitioned_by"] = column_of({}) if column_of else None
        return self.name, self.root, self.params | {key: value for key, value in settings.items() if value is not None}

    @property
    def transforms(self) -> list[ImageTransform]:
        """Augmentations with their parameters."""
        return [table.component for table in self.augment]

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return value if isinstance(value, cls) else data_table(value)


class Partition(ComponentTable):
    """How the training samples are divided among the workers."""

    place, named_by, registry = "partition", "name", partition_strategy

    name: Name = "iid"

    @model_validator(mode="before")
    @classmethod
    def _list_is_given(cls, value: Any) -> Any:
        first = next(iter(value), None) if isinstance(value, list) else None
        is_pair = isinstance(first, str)  # ["dirichlet", 0.1]
        if isinstance(first, int):
            raise ExperimentError(
                "partition: has one number per sample, but needs one list of samples per worker, such as "
                "[numpy.flatnonzero(ids == k) for k in range(workers)]"
            )
        return {"name": "given", "shards": value} if isinstance(value, list) and not is_pair else value


class Sampling(ComponentTable):
    """How the workers of each round are chosen."""

    place, named_by, registry = "sampling", "name", sampling_strategy

    name: Name = "uniform"
    dropout_rate: FractionBelowOne = 0.0
    """Probability that a chosen worker drops out and its update is lost."""


class Numbers(Table):
    """Values for one worker in one round of those settings in `[local]` that may differ between workers and rounds."""

    epochs: PositiveCount = 1
    steps: PositiveCount = 1
    batch_size: PositiveCount = 1
    clip_norm: PositiveFloat = 1.0
    lr: NonNegativeFloat = 1.0
    momentum: FractionBelowOne = 0.0


worker_function = Registry("function of a worker and a round", inputs=("worker", "round"))


def form_of(value: Any) -> tuple[Any, list[Any]]:
    """Return the form of a setting ("one", "list", "uniform", "choice" or "function"), and the numbers in the setting.

    >>> from fedsim.config.schema import form_of
    >>> form_of(5), form_of([1, 2]), form_of({"uniform": [1, 5]}), form_of("module:function")
    (('one', [5]), ('list', [1, 2]), ('uniform', [1, 5]), ('function', []))
    """
    if isinstance(value, str) and (":" in value or value.startswith("<")):  # a name of a Python object
        return "function", []
    if isinstance(value, dict):
        [(form, numbers), *others] = value.items() or [("", [])]
        return (form, numbers) if isinstance(numbers, list) and not others else ("", [])
    return ("list", value) if isinstance(value, list) else ("one", [value])


def _checked_numbers(value: Any, info: Any) -> Any:
    """Check and return the value of a key in `Numbers`: a number, or a list, distribution or function of numbers.

    `info`: the key, or pydantic's validation info, which contains the key. Raises ExperimentError if a number is
    invalid.
    """
    key, (form, numbers) = getattr(info, "field_name", info), form_of(value)
    if form == "function":
        return worker_function.get(value, f"local.{key}").name  # an ObjectName for functions of the main script
    where = f"local.{key} = {show(value)}: must be"
    if form not in ("one", "list", "uniform", "choice") or not numbers:
        forms = "a list with one number per worker, {uniform = [low, high]}, {choice = [n, ...]}"
        raise ExperimentError(f"{where} a number, {forms} or a function of (worker, round)")
    if key in Local.alternatives and form == "one" and isinstance(value, float) and value < 1:
        raise ExperimentError(f"{where} at least 1; for less than an epoch set local.steps")
    for number in numbers:
        try:
            Numbers(**{key: number})
        except ValidationError as error:
            raise ExperimentError(*explain(error, Numbers, "local")) from None
    if form == "uniform" and not (len(numbers) == 2 and numbers[0] <= numbers[1]):
        raise ExperimentError(f"{where} {{uniform = [low, high]}} with low <= high")
    return value


def _computed(key: str, function: Component, worker: int, round: int) -> Any:
    """Return the number for `key` that the user's function computes. Raise ExperimentError if it fails.

    A second call must return the same number, because every process and a resumed run call the function again.
    """
    where = f"local.{key} = {show(function.name)}: worker {called(worker)} in round {round}"
    try:
        returned = (plain(function.on({"worker": worker, "round": round})) for _ in range(2))
        first, second = (getattr(Numbers(**{key: number}), key) for number in returned)
    except Exception as error:
        reason = explain(error, Numbers)[0] if isinstance(error, ValidationError) else one_line(error)
        raise ExperimentError(f"{where}: {reason}") from error
    if first != second:
        raise ExperimentError(
            f"{where}: the function returned {first:g}, and {second:g} in a second call; it must depend only on worker "
            "and round"
        )
    return first


Counts = Annotated[int | list[int] | dict[str, list[int]] | Name, BeforeValidator(_checked_numbers)]
Norms = Annotated[float | list[float] | dict[str, list[float]] | Name, BeforeValidator(_checked_numbers)]


class ServerSchedule(ComponentTable):
    """How the learning rate changes over the rounds, after a linear warmup."""

    place, named_by, registry = "server.schedule", "name", lr_schedule

    name: Name = "constant"
    warmup: Count = 0
    """Number of initial rounds (or steps) in which the learning rate grows linearly."""

    @property
    def spans_run(self) -> bool:
        """Whether the learning rates depend on the planned number of rounds."""
        return "length" in self.registration.takes and not any(self.params.get(key) for key in LENGTHS)

    def schedule(self, length: int | None, per: Literal["round", "step"] = "round") -> LRSchedule | None:
        """Return the schedule for `length` rounds or steps (see `per`), or None if the learning rate is constant."""
        if self == type(self)():
            return None
        settings = {"length": length, "warmup": self.warmup, "per": per, "place": self.place}
        return LRSchedule.of(self.registration, self.params, **settings)


class LocalSchedule(ServerSchedule):
    """How the learning rate of the client algorithm changes over the rounds, or over the steps of each round."""

    place = "local.schedule"

    per: Literal["round", "step"] = "round"
    """Whether the learning rate changes over the rounds, or over the steps of each round."""

    @property
    def spans_run(self) -> bool:
        return self.per == "round" and super().spans_run


class Fragments(Table):
    """Streaming DiLoCo: workers keep their own models, and synchronize one fragment of the model in each round.

    In round r, fragment (r - 1) mod `count` of each worker's update is sent and aggregated. All other parameters are
    trained on by each worker. Douillard et al. 2025.
    """

    count: PositiveCount = 1
    """Number of fragments. Each consists of consecutive parameter tensors, and all have about equal sizes. They
    take turns: one fragment is synchronized after every `local.steps` steps."""
    delay: Count = 0
    """Number of steps of the next round after which workers receive the new fragment. They communicate meanwhile."""
    mixing: FractionBelowOne = 0.0
    """Weight of a worker's own parameters when it receives a fragment. 0: the global parameters replace its own."""

    @property
    def active(self) -> bool:
        """Whether workers keep their own models."""
        return self != type(self)()


class Local(ComponentTable):
    """The training of a worker between two synchronizations, for a number of `epochs` or `steps` (not both).

    `epochs`, `steps`, `batch_size`, `clip_norm` and the parameters `lr` and `momentum` of client algorithms accept a
    number, a list with one number per worker, or a distribution from which a number is drawn for each worker and round:
    {uniform = [1, 5]} draws between 1 and 5, and {choice = [1, 5, 20]} draws one of the listed numbers. They also
    accept a function of (worker, round), in a file as "module:function". Rounds are counted from 1.
    """

    place, named_by, registry = "local", "algorithm", client_algorithm
    alternatives = ("epochs", "steps")

    algorithm: Name = "sgd"
    epochs: Counts | None = None
    """Number of epochs over the worker's shard in each round. Unset: 1, unless `steps` is set."""
    steps: Counts | None = None
    """Number of steps of the client algorithm in each round, instead of epochs."""
    batch_size: Counts = 10
    """Number of samples in a batch."""
    drop_last: bool = False
    """Whether to drop the last batch of an epoch if it is smaller than `batch_size`. A shard that is smaller than one
    batch is still used as one batch."""
    accumulation_steps: PositiveCount = 1
    """Number of batches whose mean gradient is used for one step. The last step of a round may use fewer batches."""
    clip_norm: Norms | None = None
    """Maximum L2 norm of a worker's gradient. Larger gradients are scaled down before weight decay and momentum. Unset:
    no clipping."""
    trainable: list[str] = Field(default=[])
    """Name patterns of the parameters that are trained, such as `["fc2.*"]`. All other parameters are frozen, and rows
    do not contain them. Empty: all parameters, or only the adapters of `model.lora`."""
    keep_optimizer_state: bool = False
    """Whether a worker keeps the state of its client algorithm (momentum, ...) between its rounds."""
    fragments: Fragments = Fragments()
    """Synchronization of the model in fragments, one in each round (Streaming DiLoCo)."""
    schedule: LocalSchedule = LocalSchedule()
    """Schedule of the parameter `lr` of the client algorithm. It multiplies rates that differ between workers."""

    @cached_property
    def component(self) -> ClientAlgorithm:
        """Client algorithm with its parameters, not yet adapted to a model by `for_model`.

        Parameters that differ between workers have their largest value.
        """
        registration, params = self.registration, {**self.params, **self.largest}
        algorithm = (
            TrainFunction(registration, params) if registration.takes else as_algorithm(registration.bind(params))
        )
        algorithm = KeptState(algorithm) if self.keep_optimizer_state else algorithm
        fragments = self.fragments
        if not fragments.active:
            return algorithm
        return Streamed(algorithm, fragments.count, fragments.delay, fragments.mixing)

    @property
    def steps_setting(self) -> str:
        """The setting to name in errors about local steps, such as `local.algorithm = "mime"`."""
        return self.component.setting or self.setting

    @property
    def most_work(self) -> int:
        """Largest number of epochs, or of steps, that a worker trains in a round."""
        return max(form_of(self.epochs if self.steps is None else self.steps)[1])

    @cached_property
    def varying(self) -> dict[str, tuple[Any, list[Any]]]:
        """Settings whose values differ between workers or rounds, by key, with their numbers (see `form_of`)."""
        fields = {**self.registration.parameters.model_fields, **type(self).model_fields}
        keys = [key for key in Numbers.model_fields if key in fields and key in vars(self) | self.params]
        own = [key for key in keys if key in self.params and fields[key].annotation not in (float, int, Any)]
        forms = {key: form_of(getattr(self, key)) for key in keys if key not in own}  # without lists of a parameter
        return {key: form for key, form in forms.items() if form[0] != "one"}

    @property
    def largest(self) -> dict[str, Any]:
        """Largest value of each parameter that varies, by name. A function has no known maximum and counts as 0.5."""
        return {key: max(numbers, default=0.5) for key, (_, numbers) in self.varying.items() if key in self.params}

    def check_parameters(self) -> None:
        params, varying = self.params, self.varying
        given = {key: _checked_numbers(params[key], key) for key in varying if key in params}
        for changes in [{key: number} for key in given for number in dict.fromkeys(varying[key][1])] or [{}]:
            params.update({**self.largest, **changes})
            super().check_parameters()
        params.update(given)

    def amount(self, key: str, seed: int) -> Any:
        """Return the value of a setting, or a `Varying` if it differs between workers or rounds.

        `key`: name of a field of `Numbers`. `seed`: seed of the experiment.
        """
        if key not in self.varying:
            return self.params.get(key, vars(self).get(key))
        (form, numbers), kind = self.varying[key], type(getattr(Numbers(), key))
        function = Component.of(worker_function.get(getattr(self, key)), {}) if form == "function" else None
        values = numbers if function is None else partial(_computed, key, function)
        return Varying(form, values, seed, "local_work" if key in self.alternatives else f"local_{key}", kind)

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        keys_set = [key for key in cls.alternatives if table.get(key) is not None]
        if len(keys_set) > 1:
            raise cls.not_both()
        return table if keys_set else {**table, "epochs": 1}


class TopAttack(ComponentTable):
    """The attack of Byzantine groups, which replaces what they send to the top level. Needs `groups`."""

    place, named_by, registry = "top_attack", "name", attack_strategy
    alternatives = ("f", "fraction", "workers")

    name: Name = "none"
    f: Count | None = None
    """Number of Byzantine workers (in `top_attack`: groups), which are drawn at random."""
    fraction: FractionBelowOne = 0.0
    """Fraction of Byzantine workers (or groups), instead of a number. The number is rounded down."""
    workers: list[Count] | None = None
    """IDs of the Byzantine workers (or groups), instead of a number."""
    resample: bool = False
    """Whether the Byzantine workers (or groups) are drawn again in each round."""
    start_round: PositiveCount = 1
    """First round with an attack. In earlier rounds the Byzantine workers (or groups) follow the protocol."""

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        chosen = [table.get("f") is not None, bool(table.get("fraction")), table.get("workers") is not None]
        if sum(chosen) > 1:
            raise cls.not_both()
        return table

    def count(self, n_workers: int) -> int:
        """Return the number of Byzantine workers."""
        if self.f is not None:
            return self.f
        return int(self.fraction * n_workers + 1e-9) if self.workers is None else len(self.workers)


class Attack(TopAttack):
    """The attack, and the Byzantine workers."""

    place = "attack"

    by_class: Count | None = None
    """Class label. The Byzantine workers are those with the most samples of this class."""
    before_processors: bool = False
    """Whether the attackers' updates pass through `processors` like those of honest workers. Otherwise attackers see
    the processed updates, and send theirs unprocessed. Attacks on data only are always processed."""
    knows: Literal["latest", "buffer"] = "latest"
    """What an attack knows with an asynchronous policy: the last result of each worker that trains at the same time
    (`latest`), or only those that no update of the global model has used yet (`buffer`). On a graph, it knows the
    neighbours' models."""
    slowdown: Literal["fastest", "slowest"] | PositiveFloat | None = None
    """Slowdown factor of the Byzantine workers on the virtual clock in all rounds, instead of `clock.slowdown`: a
    number, or the factor of the fastest or slowest honest worker. So attackers choose when their results arrive."""


class TopAggregate(ComponentTable):
    """The rule that aggregates the models of the groups into the global model, if `groups` is set."""

    place, named_by, registry = "top_aggregate", "rule", rule

    rule: Name | list[Name | dict[str, Any]] = "weighted_mean"
    """Aggregation rule, or a list of pre-aggregators and a rule. Each is a name or a table {rule, parameters}.
    Lists of names can be written as `nnm+krum`. The default of `aggregate.rule` is `mean` with central differential
    privacy, which weights all workers equally. Asynchronous policies with a server never weight by samples."""
    f: Count | None = None
    """Number of Byzantine updates that the rule must tolerate, for rules with this parameter. Unset: true number."""
    weights: Literal["uniform", "samples"] | list[NonNegativeFloat] | None = None
    """Weights of the groups: equal (`uniform`), proportional to the samples of the updates that a group has averaged
    since it last received the global model (`samples`), or a list. Unset: `samples` for rules that require weights,
    otherwise `uniform`."""

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        rule = in_chain(table.get("rule", cls.model_fields["rule"].default))
        settings = {key: table[key] for key in cls.model_fields if key in table}
        resolved = cls._resolve(
            rule, {key: value for key, value in table.items() if key not in settings}, table.get("f")
        )
        stages = [{"rule": registration.name, **_without_f(params)} for registration, params in resolved]
        if isinstance(rule, str):
            return {**settings, **stages[0]} if "rule" in table else settings  # a default is not "set"
        tables = [as_table(stage, f"{cls.place}.rule") for stage in rule]
        stages = [{**stage, **table, "rule": stage["rule"]} for stage, table in zip(stages, tables, strict=True)]
        return {**settings, "rule": stages}

    def check_parameters(self) -> None:
        """Do nothing, because the method `completed` has already checked the parameters."""

    @classmethod
    def _resolve(cls, rule: Any, params: dict[str, Any], f: int | None) -> list[tuple[Registration, dict[str, Any]]]:
        if not isinstance(rule, (str, list)):
            raise ExperimentError(f"{cls.place}.rule = {show(rule)}: must be {FORMS}")
        return resolve(rule, params, cls.place, list(cls.model_fields), {"f": f or 0})

    def pipeline(self, f: int) -> Pipeline:
        """Return the rule with its parameters for `f` Byzantine updates."""
        return make_pipeline(self._resolve(self.rule, self.params, f))

    @property
    def takes_f(self) -> bool:
        """Whether the rule or a pre-aggregator has the parameter `f`."""
        stages = self._resolve(self.rule, self.params, 0)
        return any("f" in stage.parameter_names or stage.accepts_any for stage, _ in stages)

    @property
    def label(self) -> str:
        """Name of the rule, such as `nnm + trimmed_mean`."""
        return self.pipeline(0).name


class Aggregate(TopAggregate):
    """How the updates of a cohort, or of the workers of each group, are aggregated into one update."""

    place = "aggregate"

    weights: Literal["uniform", "samples", "inverse_probability"] | list[NonNegativeFloat] | None = None  # type: ignore[assignment]
    """Weights of the workers: equal (`uniform`), proportional to sample counts, or to batch sizes where gradients are
    aggregated (`samples`), sample fractions divided by the probability of being in the cohort, for unbiased means
    (`inverse_probability`), or a list. Unset: `samples` if the rule requires weights, otherwise `uniform`."""
    nonfinite: Literal["error", "stop", "exclude", "keep"] = "error"
    """Treatment of updates with NaN or infinity. `error`: the run ends with an error. `stop`: the run ends with the
    last finite model. `exclude`: these updates are left out and recorded. `keep`: they are aggregated."""
    secure: bool = False
    """Whether the experiment is restricted to what secure aggregation allows: the server learns only the sum of the
    updates. Secure aggregation itself is not simulated."""
    root_samples: PositiveCount = 100
    """Number of training samples that the server holds, for rules that use its gradient (`fltrust`)."""
    root_every: PositiveCount = 10
    """Number of updates of the global model between two gradients of the server, with an asynchronous policy. On the
    virtual clock, they take no time."""


def _without_f(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "f"}


class Processor(ComponentTable):
    """One processing step for updates before aggregation."""

    place, index, named_by, registry = "processors", "[]", "name", processor

    name: Name
    error_feedback: bool = False
    """Whether a worker adds the compression error of its earlier updates to the next update."""

    def check_parameters(self) -> None:
        super().check_parameters()
        if self.error_feedback and not getattr(self.registration.target, "compresses", True):
            raise ExperimentError(
                f"{self.place}.error_feedback = true: only works with compressors, and would cancel the effect of "
                f"{self.name}; omit it"
            )

    @cached_property
    def component(self) -> UpdateProcessor:
        return UpdateProcessor.of(self.registration, self.params, error_feedback=self.error_feedback)


class Privacy(ComponentTable):
    """Differential privacy: how updates are clipped and get noise, and how epsilon is computed."""

    place, named_by, registry = "privacy", "mechanism", privacy_mechanism
    alternatives = ("noise", "target_epsilon")

    mechanism: Name = "none"
    target_epsilon: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    """Epsilon after all `rounds`, instead of `noise` (or `local.noise` with `dp_sgd`). The noise is the smallest
    multiplier with three digits that reaches this epsilon. `environment.json` records it."""
    delta: ProperFraction = 1e-5
    """Delta of (epsilon, delta)-differential privacy. Choose a delta below 1 / (number of workers). With `dp_sgd`,
    choose it below 1 / (number of samples)."""
    accountant: Literal["rdp", "pld"] = "rdp"
    """How epsilon is computed: by Renyi differential privacy (`rdp`), or by privacy loss distributions (`pld`), which
    are tighter, slower, and do not support cohorts of fixed size drawn without replacement."""

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        if all(table.get(key) is not None for key in cls.alternatives):
            raise cls.not_both()
        return table

    def check_parameters(self) -> None:
        awaits_noise = self.target_epsilon is not None and "noise" in self.registration.parameter_names
        if awaits_noise:
            self.params["noise"] = 1.0  # any valid value, to check the other parameters
        super().check_parameters()
        if awaits_noise:
            self.params["noise"] = None  # until it is found

    @cached_property
    def component(self) -> Mechanism:
        return self.registration.bind(self.params)


class DownlinkProcessor(Processor):
    """One processing step for the server's message: the difference between the global model and the workers' copy."""

    place = "downlink"

    def check_parameters(self) -> None:
        super().check_parameters()
        if self.error_feedback:
            raise ExperimentError(
                "downlink.error_feedback = true: each message already contains the compression errors of earlier "
                "messages; omit it"
            )


class Server(ComponentTable):
    """How the server applies the aggregated update to the global model."""

    place, named_by, registry = "server", "name", server_optimizer

    name: Name = "sgd"
    schedule: ServerSchedule = ServerSchedule()
    """Schedule of the parameter `lr` of the server optimizer over the rounds."""


class Batched(Table):
    """Settings of the engine `batched`."""

    stack_size: PositiveCount | None = None
    """Maximum number of workers in a stack. Unset: depends on the model, the cohort, and a GPU's memory per process."""


class Hook(ComponentTable):
    """How ranks average gradients, if `sync = "gradients"`, the rule is a mean, and there is no attack."""

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
    timeout: PositiveFloat = 300.0
    """Maximum seconds that ranks wait for each other, at the start and in each exchange. A slower step ends the run."""
    init_method: Annotated[
        str, matching(r"env://|tcp://.+:\d+|file:///.+", "env://, tcp://HOST:PORT or file:///PATH")
    ] = "env://"
    """Address at which ranks meet: `env://`, `tcp://HOST:PORT` or `file:///PATH`."""
    trainer: Literal["serial", "batched"] = "serial"
    """How a rank trains its workers: one after another (`serial`) or stacked (`batched`)."""
    hook: Hook = Hook()
    """How ranks communicate averaged gradients."""


class Topology(ComponentTable):
    """Which workers exchange their models, and with which weights. A matrix or a CSV file may replace the name."""

    place, named_by, registry = "policy.topology", "name", topology

    name: Name = "ring"

    @model_validator(mode="before")
    @classmethod
    def _matrix_is_given(cls, value: Any) -> Any:
        name = value.get("name") if isinstance(value, dict) else value
        if isinstance(name, ObjectName) and is_graph(name.target):
            name = adjacency_of(name.target)
        if isinstance(name, list):
            return {"name": "matrix", "weights": name}
        return {"name": "csv", "path": name} if isinstance(name, str) and name.endswith(".csv") else value


class AsyncPolicy(ComponentTable):
    """How the server handles each result that arrives from a worker, in runs without synchronous rounds."""

    place, named_by, registry = "policy", "name", policy

    name: Name = "sync"
    topology: Topology = Topology()
    """Which workers exchange their models, and with which weights, for policies without a server."""


class Slowdown(ComponentTable):
    """Factor on each worker's computing time on the virtual clock: 2 means twice as slow. A list has one per worker."""

    place, named_by, registry = "clock.slowdown", "name", slowdown

    name: Name = "equal"

    @model_validator(mode="before")
    @classmethod
    def _list_is_given(cls, value: Any) -> Any:
        return {"name": "list", "values": value} if isinstance(value, list) else value


class Noise(ComponentTable):
    """Random variation of computing times on the virtual clock."""

    place, named_by, registry = "clock.noise", "name", noise

    name: Name = "constant"


class Clock(Table):
    """Durations on the virtual clock.

    Computing takes gradients x step_seconds x slowdown x noise. The communication of one work item (a round of local
    training, or a step that sends a gradient) takes latency + bytes / bandwidth, for both directions together.
    """

    step_seconds: PositiveFloat = 1.0
    """Seconds per batch gradient. A local step of `sgd` computes one gradient."""
    slowdown: Slowdown = Slowdown()
    """Factor on each worker's computing time: 2 means twice as slow."""
    noise: Noise = Noise()
    """Random variation of computing times."""
    latency: NonNegativeFloat = 0.0
    """Latency of the communication of one work item, in seconds, for both directions together."""
    bandwidth: PositiveFloat | None = None
    """Bandwidth in bytes per second. Unset: infinite."""
    departures: dict[str, NonNegativeFloat] = Field(default={})
    """Time in seconds at which workers leave: `{3 = 100.0}`."""
    replay_log: str | None = None
    """Run folder of a race, or its race.csv. The clock repeats the order of events in the race."""


class Race(Table):
    """Settings of `mode = "race"`. Results of a race vary, so a race is repeated and all repetitions are recorded."""

    runs: Annotated[int, Field(gt=0, le=10_000)] = 5
    """Number of repetitions."""


class WorkerEvaluation(Table):
    """Tests of individual workers on their own test samples, which need `data.local_test_fraction`.

    The metrics `worker_accuracy` and `worker_loss` are means over the workers. The files `workers-*.csv` contain the
    accuracy and loss of each worker.
    """

    every: PositiveCount = 10
    """Number of rounds between two tests. The last round is also tested."""
    workers: PositiveCount = 100
    """Maximum number of tested workers, drawn once at random. Byzantine workers are never tested."""
    fine_tune: Count = 0
    """Number of epochs for which each worker trains the global model before a second test. 0: no second test."""


class Stop(Table):
    """Early stopping.

    A run ends after the round in which `metric` reaches `target`, or has not improved for `patience` rounds. The result
    is the model after this round. Only rounds in which the metric was measured and the global model can have changed
    count. With groups, these are the rounds in which the groups are aggregated.
    """

    metric: str = "validation_accuracy"
    """Metric that decides when the run ends: `validation_accuracy`, `validation_loss`, `test_accuracy`, `test_loss`,
    `worker_accuracy`, `worker_loss`, `train_loss`, or `metrics.NAME`."""
    mode: Literal["min", "max"] | None = None
    """Whether lower (`min`) or higher (`max`) values are better. Unset: `min` for losses and `max` for accuracies."""
    patience: PositiveCount | None = None
    """Number of rounds without an improvement after which the run ends, of those that count. Unset: no limit."""
    min_delta: NonNegativeFloat = 0.0
    """Minimum difference from the best value so far that counts as an improvement."""
    target: float | None = None
    """Value of the metric at which the run ends. Unset: no target."""

    @property
    def direction(self) -> Literal["min", "max"]:
        """Direction in which the metric improves: "min" if lower values are better, "max" if higher values are."""
        return self.mode or DIRECTIONS.get(self.metric, "max")

    @property
    def active(self) -> bool:
        """Whether a run can end early."""
        return self.patience is not None or self.target is not None


class Checkpoint(Table):
    """Checkpoint settings for resuming an interrupted run with `fedsim run --resume RUN`."""

    every: Count | None = None
    """Number of rounds between two checkpoints. 0: no checkpoints. Unset: as often as 1 % of the run time allows."""
    keep: PositiveCount = 2
    """Number of newest checkpoints to keep."""


class Logger(ComponentTable):
    """A destination for the numbers of each round, in addition to the run folder."""

    place, index, named_by, registry = "records.loggers", "[]", "name", logger

    name: Name


class Records(Table):
    """Optional files in the run folder, and loggers for the numbers of each round."""

    updates: list[PositiveCount] = Field(default=[])
    """Rounds whose updates are recorded for `fedsim replay`. With an asynchronous policy, the vectors that the rule
    combines last in the round. Means then combine whole vectors too, which may change the rounding."""
    model: bool = True
    """Whether to save the trained model."""
    curve: bool = True
    """Whether to draw a figure of accuracy and losses."""
    figures: list[Literal["png", "svg", "pdf"]] = Field(default=["png"])
    """File formats of all figures."""
    tensorboard: bool = False
    """Whether to write TensorBoard files, as the logger `tensorboard` does."""
    loggers: Annotated[list[Logger], OneOrMore, Field(max_length=20)] = Field(default=[])
    """Loggers that receive the numbers of each round: names or tables."""

    @property
    def all_loggers(self) -> list[Logger]:
        """All loggers, including the TensorBoard logger if `tensorboard` is true."""
        named = [table.name for table in self.loggers]
        return [
            *self.loggers,
            *([Logger(name="tensorboard")] if self.tensorboard and "tensorboard" not in named else []),
        ]
