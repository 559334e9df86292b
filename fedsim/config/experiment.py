"""The description of an experiment, with all checks.

Its tables are in `schema.py`; `validation.py` checks combinations of settings.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from fedsim.aggregation import Pipeline
from fedsim.asynchronous.policies import policy
from fedsim.byzantine.base import draw_attackers
from fedsim.clients import LRSchedule
from fedsim.config import schema
from fedsim.config.overrides import DEFAULT_ENGINE
from fedsim.config.schema import Amount, Count, matching
from fedsim.config.source_catalog import keys_of_tables
from fedsim.config.validation import problems_with, what_needs_rows
from fedsim.core.base_table import ComponentTable, Table
from fedsim.core.input_limits import problem_with_words
from fedsim.core.objects import Name, own_copy, plain
from fedsim.core.validation_errors import explain
from fedsim.engines import Engine, engine
from fedsim.engines.distributed.hooks import CommunicationHook
from fedsim.errors import MAX_NAME, ExperimentError, show
from fedsim.processing import UpdateProcessor
from fedsim.system.precision import PRECISIONS

FOLDER_NAME = f"one or more of a-z, A-Z, 0-9 and . _ -, the first of them a letter or digit, at most {MAX_NAME}"
Processes = Annotated[int, Field(gt=0, le=1024)]  # or threads; more could overload the machine


class Experiment(Table):
    """The checked description of an experiment. Each key has a default; tables are given as dicts.

    Raises ExperimentError, one line per problem.

    >>> experiment = Experiment(workers=8, local={"lr": 0.1})
    >>> experiment.workers, experiment.local.params["lr"]
    (8, 0.1)
    """

    name: Annotated[str, matching(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", FOLDER_NAME)] = ""
    """Name of the run folder. By default made from model, data, and rule or policy: `net-mnist5k-weighted_mean`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of every random draw."""
    rounds: Amount = 10
    """Number of rounds."""
    workers: Amount = 4
    """Number of workers."""
    cohort: Amount | None = None
    """Number of workers that take part in a round; unset: all."""
    engine: Name = DEFAULT_ENGINE
    """Where and how rows are trained: one process (`serial`), several (`spawn`), stacks of rows (`batched`), ranks of a
    launcher (`distributed`), or the best of these here (`auto`); `fedsim list engines` describes each."""
    processes: Processes | None = None
    """Number of processes of `spawn` and `batched`; with `auto` the most that it may use. Unset: by cores and memory.
    """
    threads_per_process: Processes = 1
    """PyTorch's threads in each process."""
    start_method: Literal["fork", "spawn"] = "fork"
    """How processes start. `fork`: in hundredths of a second where that is safe (Linux without a GPU, one thread per
    process, a program without threads of its own), else as `spawn`: a new Python that imports PyTorch, in seconds."""
    timeout: PositiveFloat = 300.0
    """Seconds without a step after which a process counts as lost."""
    process_retries: Count = 2
    """Maximum number of times that new processes repeat a round in which a process was lost. 0: the run ends."""
    worker_state_memory: Amount = 4_000_000_000
    """State that workers keep between their rounds lies in a temporary file if it takes more bytes than this."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    precision: Literal[tuple(PRECISIONS)] = "float32"  # type: ignore[valid-type]
    """Of rows and all arithmetic: `float32` or `float64`. Of training alone, on float32 rows: `tf32` (on CUDA) or
    `bf16` (autocast)."""
    cuda_graphs: bool | None = None
    """Whether `batched` on CUDA records its steps once as a CUDA graph and replays them. Unset: where possible."""
    mode: Literal["rounds", "clock", "race"] = "rounds"
    """`rounds`: synchronous rounds. `clock`: on a virtual clock. `race`: processes that train at the same time."""
    sync: Literal["parameters", "gradients", "post_local"] = "parameters"
    """`parameters`: workers train, then their updates are aggregated. `gradients`: the gradients of each step are
    aggregated. `post_local`: gradients in the first `gradient_rounds` rounds, then parameters."""
    gradient_rounds: Count | None = None
    """With `sync = "post_local"`: the rounds before parameters are averaged."""
    buffers: Literal["average", "local", "frozen", "error"] = "average"
    """BatchNorm statistics and other buffers. `average`: the server averages them. `local`: each worker keeps its own,
    and their average is tested. `frozen`: they are never updated. `error`: a model with buffers is refused.
    Those of personal models stay with the workers in any case."""
    processors: Annotated[list[schema.Processor], Field(max_length=100)] = Field(default=[])
    """What is done to each update, or gradient, before it is aggregated: names or tables, applied in this order."""
    task: schema.Task = schema.Task()
    metrics: Annotated[list[schema.EvaluationMetric], Field(max_length=20)] = Field(default=[])
    """Numbers that each test records besides loss and accuracy: names or tables."""
    model: schema.Model = schema.Model()
    data: schema.Data = schema.Data()
    partition: schema.Partition = schema.Partition()
    sampling: schema.Sampling = schema.Sampling()
    local: schema.Local = schema.Local(epochs=1)
    batched: schema.Batched = schema.Batched()
    distributed: schema.Distributed = schema.Distributed()
    attack: schema.Attack = schema.Attack()
    aggregate: schema.Aggregate = schema.Aggregate()
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
            alternative = "mode=rounds" if synchronous else f"mode=race policy={mode} for processes that race"
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
        """The Byzantine workers, ascending; without those of `attack.resample` and `attack.by_class`."""
        attack, count = self.attack, self.attack.count(self.workers)
        if attack.workers is not None:
            return sorted(attack.workers)
        if not count or attack.resample or attack.by_class is not None:
            return []
        return draw_attackers(self.seed, self.workers, count)

    @property
    def f(self) -> int:
        """The number of Byzantine rows that the rule tolerates; by default as many as a cohort can have."""
        most = min(self.attack.count(self.workers), self.cohort_size)
        return most if self.aggregate.f is None else self.aggregate.f

    @cached_property
    def rule(self) -> Pipeline:
        """Return the aggregation rule with its parameters."""
        return self.aggregate.pipeline(self.f)

    @property
    def chain(self) -> list[UpdateProcessor]:
        """The processors with their parameters."""
        return [table.component for table in self.processors]

    @property
    def weights(self) -> Literal["uniform", "samples", "inverse_probability"] | list[float]:
        """How workers are weighted: `aggregate.weights`, or what the rule needs."""
        return self.aggregate.weights or ("samples" if self.rule.needs_weights else "uniform")

    @property
    def nonfinite(self) -> Literal["error", "exclude", "keep"]:
        """What a round does with rows that hold NaN or infinity; `stop` ends the run after the error of a round."""
        return "error" if self.aggregate.nonfinite == "stop" else self.aggregate.nonfinite

    @property
    def in_rounds(self) -> bool:
        """Whether all workers of a cohort start together; else they work on a virtual clock, or in a race."""
        return self.policy.component.in_rounds

    @property
    def sends_gradients(self) -> bool:
        """Whether workers send gradients to an asynchronous policy, and take no steps of their own."""
        return not self.in_rounds and self.policy.component.work == "gradient"

    @cached_property
    def needs_rows(self) -> str | None:
        """Return the setting because of which ranks exchange a gradient of each worker.

        None if they may average gradients.
        """
        return what_needs_rows(self)

    @property
    def gradient_hook(self) -> CommunicationHook | None:
        """What averages the ranks' gradients; None if the rule aggregates rows of single workers."""
        ranks = engine.get(self.engine).target.traits.ranks
        averages = ranks and self.rounds_of_gradients > 0 and self.needs_rows is None
        return self.distributed.hook.component if averages else None

    @property
    def local_lr(self) -> float | None:
        """The learning rate of the client algorithm; None if it has no parameter `lr`."""
        return self.local.params.get("lr")

    @cached_property
    def local_schedule(self) -> LRSchedule | None:
        """How `local_lr` changes; None if it is constant."""
        per, steps = self.local.schedule.per, self.local.steps
        steps_of_a_round = steps if isinstance(steps, int) else None
        return self.local.schedule.schedule(self.rounds if per == "round" else steps_of_a_round, per)

    @cached_property
    def server_schedule(self) -> LRSchedule | None:
        """How the learning rate of the server optimizer changes; None if it is constant."""
        return self.server.schedule.schedule(self.rounds)

    def local_lr_at(self, round: int, step: int = 0) -> float | None:
        """Return the learning rate of the client algorithm in a step (from 0) of a round; None if it has none."""
        lr, schedule = self.local_lr, self.local_schedule
        return lr if schedule is None or lr is None else schedule.rate(lr, round, step)

    @property
    def rounds_of_gradients(self) -> int:
        """The number of rounds, from the first, that aggregate gradients at every step."""
        if not self.in_rounds:
            return 0
        return {"parameters": 0, "gradients": self.rounds}.get(self.sync, self.gradient_rounds or 0)

    @property
    def cohort_size(self) -> int:
        return self.cohort or self.workers

    def own(self) -> Experiment:
        """Return a copy for the processes of one run, without its data set and loggers.

        What its objects keep belongs to it.

        Raises ExperimentError if an object cannot be copied.
        """
        data, records = self.data.model_copy(update={"name": ""}), self.records.model_copy(update={"loggers": []})
        copied = self.model_copy(update={"data": data, "records": records})
        for table in copied.tables():
            if isinstance(table, ComponentTable) and table not in (data, copied.aggregate):
                table.component  # noqa: B018  # made here, so that the copy has its own
        copied.rule  # noqa: B018
        return own_copy(copied)

    def resolved(self) -> dict[str, Any]:
        """All keys with their values as nested tables, including defaults, without keys that are unset."""
        return _without_unset(self.model_dump(mode="json"))


def _without_unset(value: Any) -> Any:
    """Nested tables without keys whose value is None, also in lists of tables, which `exclude_none` ignores."""
    if isinstance(value, dict):
        return {key: _without_unset(one) for key, one in value.items() if one is not None}
    return [_without_unset(one) for one in value] if isinstance(value, list) else value


def default_name(experiment: Experiment, varied: Collection[str] = ()) -> str:
    """Return the name of an experiment without a name: `net-mnist5k-weighted_mean`, `net-mnist5k-hogwild-race`.

    Its parts are the model, the data, the client algorithm unless it is sgd, the rule (or the asynchronous policy), and
    `race` for a race.

    Args:
        experiment: the experiment, with checked tables.
        varied: dotted keys that a comparison varies; parts that depend on them are left out.
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
