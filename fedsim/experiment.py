"""The description of an experiment: what a TOML file, a dict or the command line may say, checked.

Its tables stand in `sections.py`, what goes together in `consistency.py`, what a table is as such in `tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from fedsim.aggregation import Pipeline
from fedsim.consistency import problems_with
from fedsim.engines import Engine, engine
from fedsim.errors import LONGEST_NAME, ExperimentError, explain, show
from fedsim.objects import Name, plain
from fedsim.randomness import numpy_generator
from fedsim.sections import (
    Aggregate,
    Amount,
    AsyncPolicy,
    Attack,
    Batched,
    Checkpoint,
    Clock,
    Data,
    Distributed,
    Local,
    Model,
    Partition,
    Race,
    Records,
    Server,
)
from fedsim.synonyms import KEYS
from fedsim.system.precision import PRECISIONS
from fedsim.tables import PlugTable, Table

Processes = Annotated[int, Field(gt=0, le=1024)]  # or threads: a file must not fill the machine with them


def _name_of_a_folder(name: str) -> str:
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}", name):
        raise ValueError(
            f"one or more of a-z, A-Z, 0-9 and . _ -, the first of them a letter or digit, at most {LONGEST_NAME}"
        )
    return name


class Experiment(Table):
    """An experiment, checked as a whole; the defaults are the default experiment.

    `Experiment(workers=8, local={"lr": 0.1})` takes nested tables. Raises ExperimentError, one line per problem.
    """

    name: Annotated[str, AfterValidator(_name_of_a_folder)] = ""  # by default from model, data and rule
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Amount = 10
    workers: Amount = 4
    cohort: Amount | None = None  # workers that take part in a round; None: all
    engine: Name = "auto"
    processes: Processes | None = None  # None: by cores and memory
    threads_per_process: Processes = 1
    timeout: PositiveFloat = 300.0  # seconds without a sign of life after which a process counts as hanging
    on_worker_failure: Literal["retry", "drop", "abort"] = "retry"  # what becomes of a round that loses a process
    worker_retries: NonNegativeInt = 2  # how often one round is done again at most
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
    checkpoint: Checkpoint = Checkpoint()

    def __init__(self, **tables: Any) -> None:
        try:
            super().__init__(**plain(tables))
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
    def _name_by_content(self) -> Experiment:
        if not self.name:
            object.__setattr__(self, "name", default_name(self))  # the model is frozen
        return self

    @model_validator(mode="after")
    def _check_as_a_whole(self) -> Experiment:
        if lines := problems_with(self):
            raise ExperimentError(*lines)
        self.pipeline.rehearse(self.cohort_size, self.local_lr)
        return self

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
    def anchored(self) -> bool:
        """Whether the local solver goes by the row that a worker was sent; see `fedsim.local.Solver`."""
        return getattr(self.local.plug.target, "anchored", False)

    @property
    def local_lr(self) -> float | None:
        """The learning rate of the local solver; None if it has no parameter `lr`."""
        return self.local.params.get("lr")

    @property
    def rounds_of_gradients(self) -> int:
        """In so many rounds, the first, gradients are aggregated at every step."""
        return {"parameters": 0, "gradients": self.rounds}.get(self.sync, self.gradient_rounds or 0)

    @property
    def cohort_size(self) -> int:
        return self.cohort or self.workers

    def resolved(self) -> dict[str, Any]:
        """All keys with their values, defaults included, as nested tables; keys that are unset are left out."""
        return _without_unset(self.model_dump(mode="json"))


def _without_unset(value: Any) -> Any:
    """The same without keys whose value is None, in tables within lists too, which `exclude_none` passes over."""
    if isinstance(value, dict):
        return {key: _without_unset(one) for key, one in value.items() if one is not None}
    return [_without_unset(one) for one in value] if isinstance(value, list) else value


def default_name(experiment: Experiment, varied: Collection[str] = ()) -> str:
    """`net-mnist5k-weighted_mean`, `net-mnist5k-asgd`, `net-mnist5k-hogwild-race`: an experiment named by its content.

    Model, data, and the rule, or the policy if that is asynchronous; then `race` for a race.

    Args:
        experiment: whose tables are checked.
        varied: dotted keys that a comparison varies; the parts that depend on them are left out.
    """
    policy, rule = experiment.policy, experiment.aggregate.rule
    stages = rule if isinstance(rule, list) else [rule]
    rules = [stage if isinstance(stage, str) else stage["rule"] for stage in stages]
    parts = [
        ({"model.name"}, [experiment.model.name]),
        ({"data.dataset"}, [experiment.data.dataset]),
        ({"aggregate.rule", "policy.name", "mode"}, rules if policy.bind().in_rounds else [policy.name]),
        ({"mode"}, ["race"] if experiment.mode == "race" else []),
    ]
    words = [
        "_".join(name.rpartition(":")[2].strip("<>") for name in names)
        for keys, names in parts
        if keys.isdisjoint(varied)
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(filter(None, words))).lstrip("._-")
    return name[:LONGEST_NAME] or "experiment"


def keys_called(name: str) -> list[str]:
    """The keys of an experiment, in dotted form, that `name` is, is the last part of, or is another word for; or []."""
    if name.partition(".")[0] in Experiment.model_fields:
        return [name]
    return list(KEYS.get(name) or keys_of_tables({}).get(name, []))


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
