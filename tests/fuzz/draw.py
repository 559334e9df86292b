"""Draw small experiments at random from the tables of an experiment and from the registries of components.

An experiment is a dict of dotted keys, as on the command line. Every key of `fedsim.Experiment` is drawn unless
`SET_BY_PROPERTIES` names it, and every registered component that needs no file, so new keys and components are drawn
without a change here. Rarely used groups of keys are as likely as common ones.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import types
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from torch import nn

import fedsim
from fedsim.aggregation.rule import pre_aggregator
from fedsim.config import schema
from fedsim.config.load import load_experiment, with_data
from fedsim.core.base_table import ComponentTable, Table
from fedsim.core.model_inputs import Inputs, leaves
from fedsim.core.registry import Registration, Registry
from fedsim.core.training import check_outputs
from fedsim.data import TensorData
from fedsim.data.sources import dataset
from fedsim.errors import FedsimError
from fedsim.models import model as models
from fedsim.models.base import DIMENSIONS
from fedsim.runs.session import Session
from fedsim.runs.setup import check_run
from tests.fuzz.tables import FORMS

Settings = dict[str, Any]

OWNERS: list[Settings] = [{"data.name": "tests.fuzz.tables:owners", "data.form": form} for form in FORMS]
DATA: list[Settings] = [  # of each kind of inputs and targets
    {"data.name": "tests.components:tiny", "data.train": 60},
    {"data.name": "tests.components:few"},
    {"data.name": "tests.components:clients"},
    {"data.name": "tests.components:one_table"},
    {"data.name": "tests.real_models:noise", "data.shape": [3, 8, 8], "data.classes": 3},
    {"data.name": "tests.other_tasks:planes"},
    {"data.name": "tests.several_inputs:samples"},
    {"data.name": "tests.several_inputs:samples", "data.by_position": True},
]
MODELS = [*models, *(models.get(f"tests.several_inputs:{name}") for name in ("Joint", "JointWithObject"))]
TEXT: list[Settings] = [{"data.name": "tests.real_models:text"}, {"data.name": "tests.other_tasks:counting"}]
LARGEST_DATA, LARGEST_MODEL = 2_000, 300_000  # numbers of training samples, and of parameters
SET_BY_PROPERTIES = {  # keys of every draw, keys that say where a run is computed or what it writes, and names of files
    *("seed", "rounds", "workers", "precision", "engine", "processes", "records", "checkpoint"),
    *("distributed.hook", "model.weights", "data.root", "clock.replay_log"),
}
CHOSEN_WITH_THE_DATA = {"data.name", "model.name", "task.name"}
WORDS: dict[str, list[Any]] = {  # values of keys whose annotation is only `str`, or whose other values take too long
    "name": ["fuzz"],
    "device": ["cpu"],
    "threads_per_process": [2],
    "process_timeout": [200.0],
    "distributed.timeout": [200.0],
    "distributed.backend": ["gloo"],
    "race.runs": [2],
    "clock.departures": [{"0": 0.0}, {"1": 2.5}, {"0": 7.0, "1": 4.0}],
    "stop.metric": list(schema.DIRECTIONS),
    "privacy.target_epsilon": [5.0, 50.0, 500.0],
}
PATTERNS = ["*", "*", "*", "*bias", "*weight", "*.0.*"]
# groups with mechanisms of their own, which are drawn WEIGHT times as often as other groups
OFTEN = {
    "local",
    "model.lora",
    "privacy",
    "processors",
    "downlink",
    "aggregate",
    "partition",
    "attack",
    "data",
    "task",
    "stop",
    "groups",
}
ASYNCHRONOUS = [["policy", "aggregate", "attack"], ["policy", "race", "aggregate", "attack"]]  # often drawn together
GROUPED = "groups", "group_rounds", "top_aggregate", "top_attack"  # keys that only have an effect with groups
WEIGHT = 4
VARYING = [schema.Local.model_fields[key] for key in ("epochs", "steps", "batch_size", "clip_norm")]  # see `_work`
TRIES = 6  # to draw a group of keys that fits the others


def draw(rng: random.Random, wanted: Sequence[str] = ()) -> tuple[Settings, str | None]:
    """Return an experiment that passes the checks before the first round, with the groups of keys `wanted` if possible.

    The second value is None, or the reason why no try with all `wanted` groups was valid. Names of keys that every draw
    has, or that properties set, may be among `wanted`.
    """
    settings, refused = _drawn_with(rng, wanted)
    weighted = [group for group in GROUPS for _ in range(WEIGHT if group in OFTEN else 1)]
    groups = list(dict.fromkeys(rng.choices(weighted, k=rng.randint(2, 5))))
    groups = groups if rng.random() < 0.5 else list(dict.fromkeys(["local", *groups]))
    if all(tensor.ndim != 4 for tensor in leaves(_samples(_data_of(settings))[1])):  # augmentations are of images
        groups = [group for group in groups if group != "data.augment"]
    for group in groups:
        settings = _with_group(rng, group, settings, wanted)[0]
    return settings, refused


def _drawn_with(rng: random.Random, wanted: Sequence[str]) -> tuple[Settings, str | None]:
    """Return a small experiment with the groups of keys `wanted`, and None, or why none of the tries was valid."""
    for _ in range(TRIES):
        settings, line = _basis(rng), None
        for group in [group for group in wanted if group in GROUPS]:
            nested = [name for name in GROUPS if name == group or name.startswith(f"{group}.")]
            settings, refused = _with_group(rng, rng.choice([group, *nested]), settings, wanted)
            line = line or refused
        if line is None:
            break
    return settings, line


def _with_group(
    rng: random.Random, group: str, settings: Settings, wanted: Sequence[str]
) -> tuple[Settings, str | None]:
    """Return the settings with a drawn group of keys, and None. Or the settings, and why none of the tries was valid.

    What was drawn before for `wanted` keys remains.
    """
    before, line = changed_keys(settings), None
    needed = {key for key in before if key in wanted} | {group.partition(".")[0]} - CHOSEN_WITH_THE_DATA
    for _ in range(TRIES):
        candidate = settings | _drawn_group(rng, group, settings)
        if refused := refusal(candidate):
            line = refused
        elif needed <= changed_keys(candidate):
            return candidate, None
    return settings, line or f"{group}: has no other value"


def changed_keys(settings: Settings) -> set[str]:
    """Return the top-level keys whose value is set and differs from the default. None of invalid settings."""
    try:
        experiment = load_experiment(settings)
    except FedsimError:
        return set()
    defaults = type(experiment).model_fields
    return {key for key in experiment.model_fields_set if getattr(experiment, key) != defaults[key].default}


def is_valid(settings: Settings) -> bool:
    try:
        load_experiment(settings)
    except FedsimError:
        return False
    return True


def is_runnable(settings: Settings) -> bool:
    """Whether the settings fit the data and the model, as fedsim checks before the first round."""
    return refusal(settings) is None


def refusal(settings: Settings) -> str | None:
    """Return the line with which fedsim refuses an experiment before the first round. None: it can be run."""
    engine = {} if settings.get("mode") == "race" else {"engine": "serial"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Session() as session:
                check_run(with_data(load_experiment({**settings, **engine})), session, to_run=False)
        except FedsimError as error:
            return str(error).splitlines()[0]
        except Exception:  # a failure that the check of a property reports
            return None
    return None


def _basis(rng: random.Random) -> Settings:
    """Return the keys that every experiment has: data, model, task, sizes and local work."""
    data = rng.choice([*DATA, *OWNERS, *TEXT, *TEXT, *({"data.name": name} for name in _registered_data())])
    work = rng.choice([{"local.epochs": 1}, {"local.epochs": 2}, *({"local.steps": n} for n in (1, 2, 3))])
    if _samples(json.dumps(data))[0] > 1000:
        work = {"local.steps": rng.randint(1, 3)}
    owners = {"partition.name": "natural"} if loaded(data)[1].ids and rng.random() < 0.7 else {}
    settings = {
        **owners,
        **{"rounds": rng.randint(1, 3), "workers": rng.randint(2, 6), "seed": rng.randrange(100)},
        **{"precision": rng.choice(["float64", "float32"]), "local.batch_size": rng.choice([3, 4, 7, 16])},
        **{**work, **data, **_fitting_model(rng, data)},
    }
    from_data = {key: value for key, value in settings.items() if key.removeprefix("model.") not in DIMENSIONS}
    return from_data if rng.random() < 0.5 and is_valid(from_data) and is_runnable(from_data) else settings


@functools.cache
def _registered_data() -> list[str]:
    """Return the names of the data sets that come with fedsim and are small enough."""
    free = [r for r in dataset if not r.takes and not any(f.is_required() for f in r.parameters.model_fields.values())]
    return [r.name for r in free if _samples(json.dumps({"data.name": r.name}))[0] <= LARGEST_DATA]


def loaded(data: Settings) -> tuple[TensorData, TensorData]:
    params = {key.removeprefix("data."): value for key, value in data.items() if key.startswith("data.")}
    return fedsim.load_dataset(params.pop("name"), **params)


def _data_of(settings: Settings) -> str:
    keys = {f"data.{name}" for name in schema.Data.model_fields} - {"data.name"}  # not parameters of the data set
    return json.dumps({key: value for key, value in settings.items() if key.startswith("data.") and key not in keys})


@functools.cache
def _samples(data: str) -> tuple[int, Inputs, torch.Tensor, int]:
    """Return the number of training samples of a data set, some of them, and the number of classes."""
    train, test = loaded(json.loads(data))
    inputs, targets = train.gather(torch.arange(min(16, len(train))))
    return len(train), inputs, targets, max(train.classes, test.classes)


def _fitting_model(rng: random.Random, data: Settings) -> Settings:
    """Return a model and a task that work on the data set."""
    sizes = _sizes(data)
    while True:
        registration, task = rng.choice(_fitting(json.dumps(data)))
        params = _small_model(rng, registration, sizes)
        if (module := _built(registration, params)) and _works(module, task, data):
            return {
                **{"model.name": registration.name, "task.name": task.name},
                **{f"model.{name}": value for name, value in params.items()},
            }


@functools.cache
def _fitting(data: str) -> list[tuple[Registration, Registration]]:
    """Return the models and tasks that work on a data set."""
    table, rng, pairs = json.loads(data), random.Random(0), {}
    for registration in MODELS:
        for _ in range(TRIES):  # with different parameters, which may not fit each other
            module = _built(registration, _small_model(rng, registration, _sizes(table)))
            works = [task for task in schema.Task.registry if module and _works(module, task, table)]
            pairs |= {(registration.name, task.name): (registration, task) for task in works}
    return list(pairs.values())


def _sizes(data: Settings) -> dict[str, int]:
    """Return the parameters of models that depend on the data."""
    _, several, targets, classes = _samples(json.dumps(data))
    inputs = leaves(several)[0]
    words = 0 if inputs.is_floating_point() else int(inputs.max()) + 1
    columns = targets.shape[1] if targets.is_floating_point() and targets.ndim > 1 else 1
    channels = inputs.shape[1] if inputs.ndim > 2 else 1
    return {
        **{"inputs": inputs[0].numel(), "classes": max(classes, words, 2), "outputs": columns},
        **{"channels": channels, "size": inputs.shape[-1], "context": inputs[0].numel()},
    }


def _small_model(rng: random.Random, registration: Registration, sizes: dict[str, int]) -> Settings:
    fields = registration.parameters.model_fields
    return {name: sizes[name] if name in sizes else _field(rng, field, 1) for name, field in fields.items()}


def _built(registration: Registration, params: Settings) -> nn.Module | None:
    with torch.random.fork_rng():
        try:
            module = registration.bind(registration.check(params))()
        except Exception:  # such as a width that the number of heads does not divide
            return None
    return module if sum(p.numel() for p in module.parameters()) <= LARGEST_MODEL else None


def _works(module: nn.Module, task: Registration, data: Settings) -> bool:
    _, inputs, targets, classes = _samples(json.dumps(data))
    try:
        with torch.random.fork_rng():
            learning_task = schema.Task(name=task.name).component
            getattr(learning_task, "check_targets", lambda targets: None)(targets)
            check_outputs(module, inputs, targets, learning_task, classes=classes)
    except Exception:  # a model that does not fit these inputs raises anything
        return False
    return True


def _drawn_group(rng: random.Random, group: str, settings: Settings) -> Settings:
    """Return keys of a table of the experiment, and what this table needs in other tables."""
    drawn = GROUPS[group](rng, settings)
    if "attack.name" in drawn and not drawn.keys() & {"attack.f", "attack.fraction", "attack.workers"}:
        drawn["attack.workers"] = [rng.randrange(settings["workers"])]
    if "top_attack.name" in drawn and not drawn.keys() & {"top_attack.f", "top_attack.fraction", "top_attack.workers"}:
        drawn["top_attack.workers"] = [0]
    if group in GROUPED:
        count, rounds = rng.randint(1, settings["workers"]), settings["rounds"]
        listed = [rng.randrange(count) for _ in range(settings["workers"])]
        drawn = {"groups": rng.choice([count, listed])} | {key: each for key, each in drawn.items() if each is not None}
        drawn["group_rounds"] = rng.choice([n for n in range(1, rounds + 1) if rounds % n == 0])
    if group == "policy.topology":
        drawn["policy.name"] = rng.choice([r.name for r in schema.AsyncPolicy.registry if r.target.uses_topology])
    if "policy.name" in drawn or group.startswith("clock"):
        drawn["mode"] = "clock"
    if group == "race":
        drawn["mode"] = "race"
    if group == "switch_after_round":
        drawn["sync"] = "post_local"
    if group == "worker_evaluation":
        drawn |= {"data.local_test_fraction": 0.3, "worker_evaluation.every": rng.randint(1, 2)}
    if group == "stop":
        drawn["stop.patience"] = rng.randint(1, 2)
    if group == "privacy" and settings.get("local.algorithm") == "dp_sgd":
        drawn = {"privacy.target_epsilon": rng.choice(WORDS["privacy.target_epsilon"])}
    if drawn.get("sync") == "post_local":
        drawn["switch_after_round"] = rng.randint(1, settings["rounds"])
    return drawn


def _groups() -> dict[str, Any]:
    """Return a function that draws each table, nested table and key of an experiment."""
    groups: dict[str, Any] = {}
    keys = []
    for name, field in fedsim.Experiment.model_fields.items():
        kind = field.annotation
        if name in SET_BY_PROPERTIES:
            continue
        if isinstance(kind, type) and issubclass(kind, Table):
            groups[name] = functools.partial(_table, kind, name)
            groups |= {
                f"{name}.{key}": functools.partial(_table, nested.annotation, f"{name}.{key}")
                for key, nested in kind.model_fields.items()
                if isinstance(nested.annotation, type) and issubclass(nested.annotation, Table)
            }
        elif _item_table(kind):
            groups[name] = functools.partial(_list_of_tables, field, name)
        else:
            keys.append(name)
            groups[name] = functools.partial(_key, field, name)
    groups["records.updates"] = lambda rng, settings: {"records.updates": [rng.randint(1, settings["rounds"])]}
    groups["data.augment"] = functools.partial(_list_of_tables, schema.Data.model_fields["augment"], "data.augment")
    return groups


def _key(field: FieldInfo, name: str, rng: random.Random, settings: Settings) -> Settings:
    if name == "cohort":
        return {"cohort": rng.randint(1, settings["workers"])}
    if name in WORDS:
        return {name: rng.choice(WORDS[name])}
    return {name: value_of(rng, field.annotation, field.metadata, None, settings["workers"])}


def _table(kind: type[Table], place: str, rng: random.Random, settings: Settings) -> Settings:
    """Return a component with some parameters, and some other keys of a table."""
    drawn: Settings = {}
    named_by = kind.named_by if issubclass(kind, ComponentTable) else None
    if named_by and f"{place}.{named_by}" not in CHOSEN_WITH_THE_DATA:
        drawn |= {f"{place}.{key}": value for key, value in _component(rng, kind, settings["workers"]).items()}
    fields = {name: field for name, field in kind.model_fields.items() if name != named_by}
    for name, field in fields.items():
        key, nested = f"{place}.{name}", field.annotation
        if key in SET_BY_PROPERTIES or (key in settings and place == "local") or field in VARYING:
            continue
        if _is_table(nested) or _item_table(nested):
            continue  # a group of its own
        if rng.random() < (0.25 if named_by else 0.7):
            drawn[key] = rng.choice(WORDS[key]) if key in WORDS else _field(rng, field, settings["workers"])
    if kind is schema.Task:
        task, classes = kind.registry.get(settings["task.name"]), _samples(_data_of(settings))[3]
        fields = {name: field for name, field in task.parameters.model_fields.items() if field.annotation is not int}
        drawn |= {f"task.{name}": _field(rng, field, classes) for name, field in fields.items() if rng.random() < 0.7}
    if kind is schema.Privacy and "privacy.target_epsilon" in drawn:
        del drawn["privacy.noise"]
    if kind is schema.Local:
        drawn |= _work(rng, settings)
    if kind is schema.Aggregate and rng.random() < 0.25:
        own = [key for key in drawn if key.removeprefix("aggregate.") not in fields]
        rule = {key.removeprefix("aggregate."): drawn.pop(key) for key in own}
        drawn["aggregate.rule"] = [_named(rng, pre_aggregator, "rule", settings["workers"]), rule]
    return {key: value for key, value in drawn.items() if value is not None}


def _work(rng: random.Random, settings: Settings) -> Settings:
    """Return settings that differ between workers: a number per worker, a distribution or a function."""
    drawn, work = {}, "local.steps" if "local.steps" in settings else "local.epochs"
    numbers = {work: [1, 2, 3], "local.batch_size": [3, 4, 7], "local.lr": [0.01, 0.05, 0.1]}
    numbers |= {"local.momentum": [0.0, 0.5, 0.9], "local.clip_norm": [0.1, 0.5, 2.0]}
    for key, values in numbers.items():
        if rng.random() < (0.3 if key == work else 0.15):
            listed = [rng.choice(values) for _ in range(settings["workers"])]
            draws = {"uniform": [values[0], values[-1]]}, {"choice": values[::2]}
            drawn[key] = rng.choice([values[1], listed, *draws, f"tests.fuzz.draw:{key.replace('.', '_')}"])
    return drawn


def local_steps(worker: int, round: int) -> int:
    return 1 + (worker + round) % 3


def local_lr(worker: int, round: int) -> float:
    return 0.05 * (1 + worker % 2) / round


local_epochs, local_batch_size, local_momentum, local_clip_norm = local_steps, local_steps, local_lr, local_lr


def _list_of_tables(field: FieldInfo, place: str, rng: random.Random, settings: Settings) -> Settings:
    kind = _item_table(field.annotation)
    tables = []
    for _ in range(rng.choice([1, 1, 2])):
        table = _component(rng, kind, settings["workers"])
        more = {
            name: item for name, item in kind.model_fields.items() if name != kind.named_by and item.annotation is bool
        }
        tables.append(table | {name: True for name in more if rng.random() < 0.3})
    return {place: tables}


def _component(rng: random.Random, kind: type[ComponentTable], workers: int) -> Settings:
    return _named(rng, kind.registry, kind.named_by, workers, kind.model_fields[kind.named_by].default)


def _named(rng: random.Random, registry: Registry, named_by: str, workers: int, usual: Any = None) -> Settings:
    """Return the name and some parameters of a component, not the `usual` one, that passes its own checks."""
    while True:
        registration = rng.choice([r for r in drawable(registry) if r.name != usual])
        params = {}
        for name, field in registration.parameters.model_fields.items():
            if field.is_required() or rng.random() < 0.4:
                params[name] = _field(rng, field, workers)
        params = {name: value for name, value in params.items() if value is not None}
        try:
            registration.bind(registration.check(params))
        except (FedsimError, ValueError):
            continue
        return {named_by: registration.name, **params}


def drawable(registry: Registry) -> list[Registration]:
    """Return the components of a registry that need no file."""
    return [
        r
        for r in registry
        if not any(f.is_required() and f.annotation is str for f in r.parameters.model_fields.values())
    ]


def _field(rng: random.Random, field: FieldInfo, workers: int) -> Any:
    return value_of(rng, field.annotation, field.metadata, None if field.is_required() else field.default, workers)


def value_of(rng: random.Random, kind: Any, metadata: Any, default: Any, workers: int) -> Any:
    """Return a small value of an annotated type, within its bounds. None: leave the key out."""
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return value_of(rng, kind, [*metadata, *more], default, workers)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return rng.choice(parts)
    if origin in (Union, types.UnionType):
        part = rng.choice([part for part in parts if part is not type(None)])
        return value_of(rng, part, metadata, default, workers)
    if origin in (list, tuple):
        if parts[0] is str:
            return [rng.choice(PATTERNS)]
        length = rng.choice([workers, 1, 2])
        return [value_of(rng, parts[0], [], None, workers) for _ in range(length)]
    if kind is bool:
        return rng.random() < 0.5
    if kind in (int, float):
        return _number(rng, kind, metadata, default)
    return None


def _number(rng: random.Random, kind: type, metadata: Any, default: Any) -> Any:
    adapter = TypeAdapter(Annotated[(kind, Field(), *metadata)])

    def is_allowed(number: float) -> bool:
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(number) == number
        return False

    plain = default if isinstance(default, (int, float)) and not isinstance(default, bool) else None
    if kind is int:
        least = list(filter(is_allowed, range(100)))[:7]
        return rng.choice([*least[1:2], *least, *([plain] if plain and plain <= 20 else [])])
    numbers = [0.01, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 0.0, *([plain / 2, plain, 2 * plain] * 2 if plain else [])]
    return rng.choice([*filter(is_allowed, numbers)] or [plain])


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Table)


def _item_table(kind: Any) -> Any:
    """Return the class of the tables in a list, or None if `kind` is not a list of tables."""
    if get_origin(kind) is Annotated:
        return _item_table(get_args(kind)[0])
    parts = get_args(kind)
    return parts[0] if get_origin(kind) is list and _is_table(parts[0]) else None


GROUPS = _groups()
