"""The tables of an experiment, one after another: their keys, types, bounds and defaults, each by itself.

What they may be together stands in `consistency.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat

from fedsim.aggregation import Pipeline, make_pipeline, resolve, rule, server_optimizer
from fedsim.asynchronous.delays import noise, speed
from fedsim.asynchronous.policies import policy
from fedsim.augmentation import ImageTransform, augmentation
from fedsim.byzantine import BoundAttack, attack_strategy, bind_attack
from fedsim.data import dataset, partition_strategy
from fedsim.engines.hooks import BoundHook, bind_hook, hook
from fedsim.errors import ExperimentError, show
from fedsim.local import solver
from fedsim.models import model
from fedsim.objects import Name
from fedsim.registry import Plug
from fedsim.tables import PlugTable, Table

NonNegativeFloat = Annotated[float, Field(ge=0)]
Amount = Annotated[int, Field(gt=0, lt=2**63)]  # of anything that is counted
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _meeting_place(init: str) -> str:
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
    augment: Annotated[list[Augment], Field(max_length=100)] = Field(default=[])  # of training batches, in this order


class Partition(PlugTable):
    place, named_by, registry = "partition", "strategy", partition_strategy

    strategy: Name = "iid"


class Local(PlugTable):
    """What a worker does between two synchronisations: `epochs` or `steps`, not both.

    `drop_last` leaves a last batch of each epoch out that is smaller than `batch_size`, as PyTorch's DataLoader does;
    but a shard smaller than a batch is trained on, as one batch.
    """

    place, named_by, registry = "local", "solver", solver
    alternatives = ("epochs", "steps")

    solver: Name = "sgd"
    epochs: Amount | None = None
    steps: Amount | None = None
    batch_size: Amount = 10
    drop_last: bool = False

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        given = [key for key in cls.alternatives if table.get(key) is not None]
        if len(given) > 1:
            raise cls.not_both()
        return table if given else {**table, "epochs": 1}


class Attack(PlugTable):
    """Who is Byzantine (a `fraction` of the workers, drawn by the seed, or the `workers` listed) and what they do."""

    place, named_by, registry = "attack", "name", attack_strategy
    alternatives = ("fraction", "workers")

    name: Name = "none"
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    workers: list[NonNegativeInt] | None = None

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        if table.get("fraction") and table.get("workers") is not None:
            raise cls.not_both()
        return table

    def bind(self) -> BoundAttack:
        return bind_attack(self.plug, self.params)

    def count(self, n_workers: int) -> int:
        """How many of so many workers are Byzantine."""
        return int(self.fraction * n_workers + 1e-9) if self.workers is None else len(self.workers)


class Aggregate(PlugTable):
    """`rule`: a name, or a list of pre-aggregators that ends in a rule, each a name or a table {rule, parameters}.

    `f`: how many Byzantine rows the rule is to withstand, where it has such a notion; None means as many as there are.
    `weights`: None means sample counts for a rule that needs weights, and equal ones for any other.
    """

    place, named_by, registry = "aggregate", "rule", rule

    rule: Name | list[Name | dict[str, Any]] = "weighted_mean"
    f: NonNegativeInt | None = None
    weights: Literal["uniform", "samples"] | list[NonNegativeFloat] | None = None
    nonfinite: Literal["error", "exclude", "keep"] = "error"  # what becomes of rows that hold NaN or infinity
    root_samples: Amount = 100  # the server's own, drawn from the training samples, for rules that compare with it

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

    def _check_parameters(self) -> Aggregate:
        return self  # that was done to complete them

    @classmethod
    def _resolve(cls, rule: Any, params: dict[str, Any], f: int | None) -> list[tuple[Plug, dict[str, Any]]]:
        if not isinstance(rule, (str, list)):
            raise ExperimentError(f"aggregate.rule = {show(rule)}: must be a name, or a list of names and tables")
        return resolve(rule, params, cls.place, list(cls.model_fields), {"f": f or 0})

    def pipeline(self, f: int) -> Pipeline:
        """The rule with its parameters, where `f` rows are Byzantine."""
        return make_pipeline(self._resolve(self.rule, self.params, f))

    @property
    def label(self) -> str:
        """`nnm + trimmed_mean`."""
        return self.pipeline(0).name


def _without_f(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "f"}


class Server(PlugTable):
    place, named_by, registry = "server", "optimizer", server_optimizer

    optimizer: Name = "sgd"


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
    """Virtual time: steps x base x speed x noise, and where models are sent latency + bytes / bandwidth."""

    base: PositiveFloat = 1.0  # seconds of a step
    speed: Speed = Speed()
    noise: Noise = Noise()
    latency: NonNegativeFloat = 0.0  # seconds
    bandwidth: PositiveFloat | None = None  # bytes per second; None: infinite
    departures: dict[str, NonNegativeFloat] = Field(default={})  # worker = seconds after which it is gone
    log: str | None = None  # of a race, which is done again in its order: a run folder, or the race.csv in it


class Race(Table):
    """A race is never the same twice, so it is run several times, round by round, and records tell of all."""

    runs: Annotated[int, Field(gt=0, le=10_000)] = 5


class Batched(Table):
    """How the engine `batched` stacks rows."""

    width: Amount | None = None  # how many at most; None: what fits into memory


class Hook(PlugTable):
    place, named_by, registry = "distributed.hook", "name", hook

    name: Name = "allreduce"

    def bind(self) -> BoundHook:
        return bind_hook(self.plug, self.params)


class Distributed(Table):
    """How the ranks of the engine `distributed` find each other, and what each of them does."""

    backend: str | None = None  # of torch.distributed; None: the device's own, or gloo where ranks share a card
    timeout: PositiveFloat = 60.0  # seconds without a sign of life after which another rank counts as lost
    init: Annotated[str, AfterValidator(_meeting_place)] = "env://"
    inner: Literal["serial", "batched"] = "serial"  # how a rank trains its rows: one by one, or stacked
    hook: Hook = Hook()  # in what form gradients travel where DistributedDataParallel averages them


class Checkpoint(Table):
    """What is kept so that a run can be gone on with that was broken off: `fedsim run --resume RUN`."""

    every: Count | None = None  # rounds; 0: never; None: as often as takes at most 1 percent of the time
    keep: Amount = 2  # the newest so many


class Records(Table):
    """What a run folder holds besides the experiment, the environment, the partition and the metrics."""

    updates: list[Amount] = Field(default=[])  # rounds whose updates are kept, for `fedsim replay`

    model: bool = True  # model.safetensors
    curve: bool = True  # the figure `curve`
    figures: list[Literal["png", "svg", "pdf"]] = Field(default=["png"])  # formats of all figures
    tensorboard: bool = False  # scalars of every round as a TensorBoard event file
