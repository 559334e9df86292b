"""The description of an experiment: what a TOML file, a dict or the command line may say, checked.

Keys, types, bounds and defaults stand here once; what a table is as such stands in `tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from fedsim.aggregation import Pipeline, make_pipeline, resolve, rule, server_optimizer
from fedsim.asynchronous.delays import noise, speed
from fedsim.asynchronous.policies import Policy, policy
from fedsim.augmentation import augmentation
from fedsim.byzantine import BoundAttack, attack_strategy, bind_attack
from fedsim.data import dataset, partition_strategy
from fedsim.engines import Engine, engine
from fedsim.errors import ExperimentError, explain, show
from fedsim.local import solver
from fedsim.models import model
from fedsim.precision import PRECISIONS
from fedsim.randomness import numpy_generator
from fedsim.registry import Plug
from fedsim.tables import PlugTable, Table

NonNegativeFloat = Annotated[float, Field(ge=0)]


def _name_of_a_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("one or more of a-z, A-Z, 0-9 and . _ -, the first of them a letter or digit")
    return name


def _meeting_place(init: str) -> str:
    if not re.fullmatch(r"env://|tcp://.+:\d+|file:///.+", init):
        raise ValueError("env://, tcp://HOST:PORT or file:///PATH")
    return init


class Model(PlugTable):
    place, named_by, registry = "model", "name", model

    name: str = "net"


class Augment(PlugTable):
    place, named_by, registry = "data.augment", "name", augmentation

    name: str


class Data(PlugTable):
    place, named_by, registry = "data", "dataset", dataset

    dataset: str = "mnist5k"
    root: str | None = None  # folder of downloaded data sets; None: $FEDSIM_DATA, else the user's cache folder
    augment: list[Augment] = Field(default=[])  # of training batches, in this order


class Partition(PlugTable):
    place, named_by, registry = "partition", "strategy", partition_strategy

    strategy: str = "iid"


class Local(PlugTable):
    """What a worker does between two synchronisations: `epochs` or `steps`, not both."""

    place, named_by, registry = "local", "solver", solver
    alternatives = ("epochs", "steps")

    solver: str = "sgd"
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    batch_size: PositiveInt = 10

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

    name: str = "none"
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

    rule: str | list[str | dict[str, Any]] = "weighted_mean"
    f: NonNegativeInt | None = None
    weights: Literal["uniform", "samples"] | list[NonNegativeFloat] | None = None
    nonfinite: Literal["error", "exclude", "keep"] = "error"  # what becomes of rows that hold NaN or infinity
    root_samples: PositiveInt = 100  # the server's own, drawn from the training samples, for rules that compare with it

    @classmethod
    def completed(cls, table: dict[str, Any]) -> dict[str, Any]:
        rule = table.get("rule", cls.model_fields["rule"].default)
        own = {key: table[key] for key in cls.model_fields if key in table}
        resolved = cls._resolve(rule, {key: value for key, value in table.items() if key not in own}, table.get("f"))
        stages = [{"rule": plug.name, **_without_f(params)} for plug, params in resolved]
        if isinstance(rule, str):
            return {**stages[0], **own}
        given = [stage if isinstance(stage, dict) else {} for stage in rule]
        return {**own, "rule": [{**stage, **table} for stage, table in zip(stages, given, strict=True)]}

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

    optimizer: str = "sgd"


class AsyncPolicy(PlugTable):
    place, named_by, registry = "policy", "name", policy

    name: str = "sync"


class Speed(PlugTable):
    place, named_by, registry = "clock.speed", "name", speed

    name: str = "equal"


class Noise(PlugTable):
    place, named_by, registry = "clock.noise", "name", noise

    name: str = "constant"


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

    runs: PositiveInt = 5


class Batched(Table):
    """How the engine `batched` stacks rows."""

    width: PositiveInt | None = None  # how many at most; None: what fits into memory


class Distributed(Table):
    """How the ranks of the engine `distributed` find each other, and what each of them does."""

    backend: str | None = None  # of torch.distributed; None: the device's own, or gloo where ranks share a card
    timeout: PositiveFloat = 60.0  # seconds without a sign of life after which another rank counts as lost
    init: Annotated[str, AfterValidator(_meeting_place)] = "env://"
    inner: Literal["serial", "batched"] = "serial"  # how a rank trains its rows: one by one, or stacked


class Records(Table):
    """What a run folder holds besides the experiment, the environment, the partition and the metrics."""

    updates: list[PositiveInt] = Field(default=[])  # rounds whose updates are kept, for `fedsim replay`

    model: bool = True  # model.safetensors
    curve: bool = True  # curve.png
    tensorboard: bool = False  # scalars of every round as a TensorBoard event file


class Experiment(Table):
    """An experiment, checked as a whole; the defaults are the default experiment.

    `Experiment(workers=8, local={"lr": 0.1})` takes nested tables. Raises ExperimentError, one line per problem.
    """

    name: Annotated[str, AfterValidator(_name_of_a_folder)] = "mnist5k_sync_sgd"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: PositiveInt = 10
    workers: PositiveInt = 4
    cohort: PositiveInt | None = None  # workers that take part in a round; None: all
    engine: str = "auto"
    processes: PositiveInt | None = None  # None: by cores, and by free memory on a card
    threads_per_process: PositiveInt = 1
    timeout: PositiveFloat = 300.0  # seconds without a sign of life after which a process counts as hanging
    device: str = "auto"
    precision: Literal[tuple(PRECISIONS)] = "float32"  # type: ignore[valid-type]
    compile: bool = False  # forward pass and loss of training, by torch.compile
    cuda_graphs: bool | None = None  # steps of stacks on CUDA; None: where that is safe
    mode: Literal["rounds", "clock", "race"] = "rounds"  # synchronous; on a virtual clock; processes that race
    sync: Literal["parameters", "gradients", "post_local"] = "parameters"
    gradient_rounds: NonNegativeInt | None = None  # of sync = "post_local": after so many, parameters are averaged
    buffers: Literal["average", "local", "server", "error"] = "average"
    model: Model = Model()
    data: Data = Data()
    partition: Partition = Partition()
    local: Local = Local(epochs=1)
    batched: Batched = Batched()
    distributed: Distributed = Distributed()
    attack: Attack = Attack()
    aggregate: Aggregate = Aggregate()
    server: Server = Server()
    policy: AsyncPolicy = AsyncPolicy()
    clock: Clock = Clock()
    race: Race = Race()
    records: Records = Records()

    def __init__(self, **tables: Any) -> None:
        try:
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

    @model_validator(mode="after")
    def _check_as_a_whole(self) -> Experiment:
        lines = []
        if self.cohort is not None and self.cohort > self.workers:
            lines.append(f"cohort = {self.cohort}: must be at most workers, {self.workers}")
        engine_class = engine.get(self.engine).target
        if engine_class.one_process and self.processes not in (None, 1):
            lines.append(
                f'processes = {self.processes}: the engine "{self.engine}" works in one; engine=spawn has more'
            )
        if engine_class.one_process and self.timeout != type(self).model_fields["timeout"].default:
            lines.append(f'timeout = {self.timeout}: the engine "{self.engine}" waits for nobody; leave it out')
        lines.extend(self._problems_with_ranks(engine_class))
        if self.batched.width is not None and not engine_class.stacks:
            lines.append(
                f'batched.width = {self.batched.width}: the engine "{self.engine}" stacks no rows; leave it out, '
                "or use engine=batched"
            )
        if self.cuda_graphs and self.engine != "batched":
            lines.append(f'cuda_graphs = true: goes with engine=batched, not with "{self.engine}"; leave it out')
        if self.sync == "gradients" and self.server != Server():
            lines.append(
                f'server.optimizer = "{self.server.optimizer}": with sync = "gradients" the local solver takes the '
                "step (local.*), so leave [server] out"
            )
        lines.extend(self._problems_with_rounds())
        lines.extend(self._problems_with_time())
        lines.extend(self._problems_with_weights())
        lines.extend(self._problems_with_attackers())
        if lines:
            raise ExperimentError(*lines)
        self.pipeline.rehearse(self.cohort_size)
        return self

    def _problems_with_ranks(self, engine_class: type[Engine]) -> list[str]:
        """With the programs that a launcher has started, or with what is said of them where there are none."""
        if not engine_class.ranks:
            if self.distributed == Distributed():
                return []
            return [f'distributed: goes with engine=distributed, not with "{self.engine}"; leave [distributed] out']
        where, lines = f'engine = "{self.engine}"', []
        if self.processes not in (None, 1):
            lines.append(f"processes = {self.processes}: {where} has as many as the launcher starts; leave it out")
        if self.timeout != type(self).model_fields["timeout"].default:
            lines.append(f"timeout = {self.timeout}: {where} has distributed.timeout instead")
        if not self.policy.bind().in_rounds:
            lines.append(f"policy.name = {show(self.policy.name)}: {where} works in rounds; use another engine")
        if self.batched.width is not None and self.distributed.inner != "batched":
            lines.append(
                f"batched.width = {self.batched.width}: {where} stacks no rows without distributed.inner=batched"
            )
        return lines

    def _problems_with_rounds(self) -> list[str]:
        """With which rounds aggregate what."""
        lines, count = [], self.gradient_rounds
        if self.sync == "post_local" and count is None:
            lines.append('sync = "post_local": needs gradient_rounds, after how many rounds parameters are averaged')
        if self.sync != "post_local" and count is not None:
            lines.append(
                f'gradient_rounds = {count}: goes with sync = "post_local", not with "{self.sync}"; leave it out'
            )
        elif count is not None and count > self.rounds:
            lines.append(f"gradient_rounds = {count}: must be at most rounds, {self.rounds}")
        if self.rounds_of_gradients and self._anchored:
            lines.append(
                f'local.solver = "{self.local.solver}": goes by the row that a worker was sent, which nobody leaves '
                f'where gradients are averaged (sync = "{self.sync}"); use another'
            )
        return lines

    def _problems_with_weights(self) -> list[str]:
        weights = self.aggregate.weights
        if weights is None:
            return []
        pipeline = self.pipeline
        where = f"aggregate.weights = {show(weights)}"
        if not pipeline.takes_weights:
            return [f"{where}: the rule {pipeline.name} has no weighted form; leave them out"]
        if isinstance(weights, list) and len(weights) != self.workers:
            return [f"{where}: must be {self.workers} numbers, one per worker, not {len(weights)}"]
        if isinstance(weights, list) and weights.count(0) >= self.cohort_size:
            return [f"{where}: so many are zero that a whole cohort of {self.cohort_size} can be"]
        return []

    def _problems_with_time(self) -> list[str]:
        """What does not go with the mode."""
        lines, policy = [], self.policy.bind()
        named = f"policy.name = {show(self.policy.name)}"
        if self.mode == "rounds" and not policy.in_rounds:
            lines.append(f"{named}: goes with mode=clock or mode=race")
        if self.mode == "race" and policy.in_rounds:
            lines.append(f'{named}: nobody races in rounds; give a policy, as policy=hogwild, with mode="race"')
        for table, mode in (("clock", "clock"), ("race", "race")):
            if self.mode != mode and getattr(self, table) != type(self).model_fields[table].default:
                lines.append(f"{table}: goes with mode={mode}; leave [{table}] out")
        if self.mode != "rounds" and not policy.in_rounds:
            lines.extend(self._problems_with_policy(policy, named))
        if self.mode == "race" and not policy.in_rounds:
            lines.extend(self._problems_with_race(policy, named))
        lines.extend(self._problems_with_departures(policy))
        lines.extend(self._problems_with_log(policy, named))
        return lines

    def _problems_with_race(self, policy: Policy, named: str) -> list[str]:
        """What processes that race leave no room for."""
        lines = []
        if engine.get(self.engine).target.racing is None:
            lines.append(f'engine = {show(self.engine)}: with mode="race" processes race; use engine=spawn or auto')
        if self.compile and policy.locking == "nothing":
            lines.append(f"compile = true: {named} trains without, on a row that moves under it; leave it out")
        return lines

    def _problems_with_log(self, policy: Policy, named: str) -> list[str]:
        """What a log of a race leaves no room for on the clock."""
        if self.clock.log is None:
            return []
        lines, fields = [], type(self.clock).model_fields
        if policy.in_rounds or policy.locking != "server":
            lines.append(f"clock.log = {show(self.clock.log)}: {named} leaves no log, which takes a lock of the server")
        timed = [key for key in fields if key != "log" and getattr(self.clock, key) != fields[key].default]
        lines.extend(f"clock.{key}: with clock.log nothing takes any time; leave it out" for key in timed)
        return lines

    def _problems_with_policy(self, policy: Policy, named: str) -> list[str]:
        """What an asynchronous policy leaves no room for."""
        defaults, lines = type(self).model_fields, []
        out = {"sync": "workers are never in step", "aggregate": "it says itself what becomes of work that arrives"}
        if not policy.steps_server:
            out["server"] = "it moves the global row itself"
        for key, reason in out.items():
            if getattr(self, key) != defaults[key].default:
                lines.append(f"{named}: {reason}; leave {key} out")
        if self.records.updates:
            lines.append(f"{named}: has no rounds whose updates could be kept; leave records.updates out")
        if self.attack.name != "none" and self.attack.bind().poison is None:
            lines.append(
                f"attack.name = {show(self.attack.name)}: needs to see the rows of a cohort, which {named} has not; "
                "attacks on data work"
            )
        if self.cohort_size < self.workers and not (policy.samples and self.mode == "clock"):
            lines.append(
                f"cohort = {self.cohort}: with mode={self.mode} and {named} all workers are at work; leave it out"
            )
        if policy.work == "gradient" and PRECISIONS[self.precision].scales_losses:
            lines.append(
                f"precision = {show(self.precision)}: {named} steps along gradients, which have no scale there"
            )
        if policy.work == "gradient" and self._anchored:
            lines.append(
                f"local.solver = {show(self.local.solver)}: goes by the row that a worker was sent, which nobody "
                f"leaves with {named}; use another"
            )
        if policy.needs_momentum and not self.local.bind().start(torch.zeros(1)):
            lines.append(f"{named}: is about momentum; give local.momentum")
        try:
            policy.check(self.cohort_size)
        except ExperimentError as error:
            lines.extend(error.lines)
        return lines

    def _problems_with_departures(self, policy: Policy) -> list[str]:
        departures = self.clock.departures
        if not departures:
            return []
        if policy.in_rounds or self.cohort_size < self.workers:
            return ["clock.departures: go with an asynchronous policy in which all workers are at work"]
        wrong = [name for name in departures if not re.fullmatch("0|[1-9][0-9]*", name) or int(name) >= self.workers]
        return [f"clock.departures.{name}: must be a worker, from 0 to {self.workers - 1}" for name in wrong]

    def _problems_with_attackers(self) -> list[str]:
        listed, count = self.attack.workers or [], self.attack.count(self.workers)
        if len(set(listed)) < len(listed) or any(worker >= self.workers for worker in listed):
            return [f"attack.workers = {listed}: must be different workers, from 0 to {self.workers - 1}"]
        if count >= self.workers:
            return [f"attack.workers: {count} of {self.workers} workers are Byzantine; at least one must be honest"]
        if self.attack.name != "none" and not count:
            return [f"attack.name = {show(self.attack.name)}: nobody attacks; give attack.fraction or attack.workers"]
        return []

    @property
    def byzantine(self) -> list[int]:
        """The numbers of the Byzantine workers, ascending."""
        if self.attack.workers is not None:
            return sorted(self.attack.workers)
        if not self.attack.count(self.workers):
            return []
        generator = numpy_generator(self.seed, "attackers")
        return sorted(generator.permutation(self.workers)[: self.attack.count(self.workers)].tolist())

    @property
    def f(self) -> int:
        """How many Byzantine rows the rule is to withstand; unless told otherwise, as many as a cohort can have."""
        most = min(self.attack.count(self.workers), self.cohort_size)
        return most if self.aggregate.f is None else self.aggregate.f

    @property
    def pipeline(self) -> Pipeline:
        """The aggregation rule with its parameters."""
        return self.aggregate.pipeline(self.f)

    @property
    def _anchored(self) -> bool:
        """Whether the local solver goes by the row that a worker was sent; see `fedsim.local.Solver`."""
        return getattr(self.local.plug.target, "anchored", False)

    @property
    def rounds_of_gradients(self) -> int:
        """In so many rounds, the first, gradients are aggregated at every step."""
        return {"parameters": 0, "gradients": self.rounds}.get(self.sync, self.gradient_rounds or 0)

    @property
    def cohort_size(self) -> int:
        return self.cohort or self.workers

    def resolved(self) -> dict[str, Any]:
        """All keys with their values, defaults included, as nested tables; keys that are unset are left out."""
        return self.model_dump(mode="json", exclude_none=True)


def keys_called(name: str) -> list[str]:
    """The keys of an experiment, in dotted form, that `name` is, or is the last part of; [] where there is none."""
    if name.partition(".")[0] in Experiment.model_fields:
        return [name]
    return keys_of_tables({}).get(name, [])


def keys_of_tables(tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Where a key belongs that stands in no table: {"lr": ["local.lr", "server.lr"], ...}, for hints.

    With the plugs that `tables` name; only where none of them has a key, all places where another plug would have it.
    """
    with_these: dict[str, list[str]] = {}
    with_others: dict[str, list[str]] = {}
    for place, field in Experiment.model_fields.items():
        table = field.annotation
        if not (isinstance(table, type) and issubclass(table, Table)):
            continue
        for key in table.model_fields:
            with_these.setdefault(key, []).append(f"{place}.{key}")
        if issubclass(table, PlugTable):
            named = tables.get(place)
            named = named.get(table.named_by) if isinstance(named, Mapping) else named
            chosen = named if named in table.registry.names() else table.model_fields[table.named_by].default
            for plug in table.registry:
                for key in set(plug.parameters.model_fields) - set(table.model_fields):
                    found = (with_these if plug.name == chosen else with_others).setdefault(key, [])
                    found.extend({f"{place}.{key}"} - set(found))
    return {**with_others, **with_these}
