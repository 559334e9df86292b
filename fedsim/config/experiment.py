"""The class `Experiment`: the settings of a run with all checks.

`settings.py` defines the keys, and `validation.py` checks combinations of settings.
"""

from __future__ import annotations

import contextlib
import re
import typing
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import PrivateAttr, ValidationError, field_validator, model_validator

from fedsim.asynchronous.policies import policy
from fedsim.config import schema
from fedsim.config.components import COMPONENTS
from fedsim.config.engines import traits_of
from fedsim.config.from_data import tables_from_data
from fedsim.config.settings import Settings
from fedsim.config.tables import keys_called, owners_of, settings_of
from fedsim.config.validation import check_worker_tests, problems_with
from fedsim.core.base_table import ComponentTable
from fedsim.core.import_policy import is_untrusted
from fedsim.core.input_limits import problem_with_words
from fedsim.core.objects import own_copy, plain
from fedsim.core.validation_errors import explain
from fedsim.data.drawn_tests import strata_of
from fedsim.data.formats.images import lacks_files
from fedsim.data.shapes import SampleShape
from fedsim.data.sources import (
    data_loaded_once,
    default_root,
    known_shape,
    load_dataset_once,
    one_per_worker,
    sample_shape,
)
from fedsim.data.subsets import validation_positions
from fedsim.errors import MAX_NAME, DataError, ExperimentError, show
from fedsim.hints.meanings import VOCABULARY, answer
from fedsim.system.files import is_outside, user_path

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack

    from fedsim.config.typed_keys import ExperimentKeys as ExperimentKeys
else:  # for typing.get_type_hints, which shows only the names of the keys
    ExperimentKeys = typing.TypedDict("ExperimentKeys", dict.fromkeys(Settings.model_fields, Any), total=False)
    Unpack = getattr(typing, "Unpack", typing.Union)  # in Python 3.10, which has no Unpack; Union[X] is X


class Experiment(Settings):
    """All settings of a run, checked on construction. Every key has a default. Tables are passed as dicts.

    `fedsim.components("keys")` shows all keys with their types, defaults and descriptions, as `fedsim list keys` does.

    Raises ExperimentError with one line per problem.

    >>> experiment = Experiment(workers=8, local={"lr": 0.1})
    >>> experiment.workers, experiment.local.params["lr"]
    (8, 0.1)
    """

    _awaits_data: bool = PrivateAttr(default=False)

    def __init__(self, **keys: Unpack[ExperimentKeys]) -> None:
        """Check the settings `keys`, which `fedsim.components("keys")` shows."""
        tables: dict[str, Any] = plain(keys)
        if problem := problem_with_words(tables):
            raise ExperimentError(problem)
        try:
            if "partition" not in tables and one_per_worker(tables.get("data")):
                tables = {**tables, "partition": "natural"}
            with data_loaded_once():
                if "workers" not in tables and (count := count_workers(tables)) is not None:
                    tables = {**tables, "workers": count}
                super().__init__(**tables)
        except ValidationError as error:
            aggregate, lines = tables.get("aggregate"), explain(error, type(self))
            rule = aggregate.get("rule", aggregate.get("name")) if isinstance(aggregate, dict) else aggregate
            if isinstance(rule, str):  # a hint to put a pre-aggregator before the rule keeps the rule
                lines = [line.replace(',"mean"]', f',"{rule}"]') for line in lines]
            raise ExperimentError(*lines) from None

    @field_validator("engine")
    @classmethod
    def _engine_exists(cls, name: str) -> str:
        traits_of(name)
        return name

    @field_validator("device", mode="before")
    @classmethod
    def _device_has_a_known_type(cls, name: Any) -> Any:
        try:
            torch.device("cpu" if name == "auto" else name)
        except (RuntimeError, TypeError):
            hint = f"write device=cuda:{name}" if isinstance(name, int) else answer(str(name))
            hint = hint or "allowed: auto, cpu, cuda, cuda:1, ..."
            raise ExperimentError(f"device = {show(name)}: no such device; {hint}") from None
        return name

    @field_validator("mode", mode="before")
    @classmethod
    def _mode_is_no_policy(cls, mode: Any) -> Any:
        if mode in policy.names():
            synchronous = mode == schema.AsyncPolicy.model_fields["name"].default
            alternative = "mode=rounds" if synchronous else f"mode=race policy={mode} for a race of processes"
            raise ExperimentError(
                f"mode = {show(mode)}: is a policy; write {alternative}, or mode=clock policy={mode} for virtual time"
            )
        return mode

    @model_validator(mode="after")
    def _take_from_data(self) -> Experiment:
        tables = tables_from_data(self, partial(_sample_shape, self.partition))
        self._awaits_data = tables is None
        for key, table in (tables or {}).items():
            object.__setattr__(self, key, table)  # the model is frozen
        return self

    @model_validator(mode="after")
    def _test_workers_on_own_samples(self) -> Experiment:
        """Test each worker on the test samples of its owner by default, if the data has such samples."""
        column_of = getattr(self.partition.component, "column", None)
        if not column_of or self.gradient_hook or "local_test_fraction" in self.data.model_fields_set:
            return self
        data = self.data.model_copy(update={"local_test_fraction": schema.OWN})
        if not any(check_worker_tests(self.model_copy(update={"data": data}))):
            refuse_untrusted_root(data)
            with contextlib.suppress(DataError):  # the run reports it
                train, test = load_dataset_once(*data.source(self.partition))
                if train.drawn_by is None and column_of(train.ids) in test.ids:
                    data.model_fields_set.discard("local_test_fraction")
                    object.__setattr__(self, "data", data)  # the model is frozen
        return self

    @property
    def awaits_data(self) -> bool:
        """Whether the task or the model has preliminary defaults, because the data is not downloaded yet."""
        return self._awaits_data

    @model_validator(mode="after")
    def _await_noise_of_samples(self) -> Experiment:
        local, target = self.local, self.privacy.target_epsilon
        if target is None or self.protects != "sample":
            return self
        if "noise" not in local.params:
            raise ExperimentError(
                f"privacy.target_epsilon = {target:g}: is reached by the client algorithm's parameter `noise`, but "
                f"{local.setting} has no such parameter; add the parameter, or omit privacy.target_epsilon"
            )
        if "noise" in local.model_fields_set and local.params["noise"] is not None:
            noise = local.params["noise"]
            raise ExperimentError(
                f"local.noise = {noise:g}: is computed from privacy.target_epsilon; omit one of the two"
            )
        object.__setattr__(self, "local", local.model_copy(update={"noise": None}))  # until it is found
        return self

    @model_validator(mode="after")
    def _clip_equally(self) -> Experiment:
        """Use the rule `mean` by default where the server clips all updates equally, for privacy."""
        if self.privacy.component.at_server and "rule" not in self.aggregate.model_fields_set:
            aggregate = self.aggregate.model_copy(update={"rule": "mean"})
            aggregate.model_fields_set.discard("rule")
            object.__setattr__(self, "aggregate", aggregate)  # the model is frozen
        return self

    @model_validator(mode="after")
    def _name_by_content(self) -> Experiment:
        if not self.name:
            object.__setattr__(self, "name", default_name(self))
        return self

    @model_validator(mode="after")
    def _check_as_a_whole(self) -> Experiment:
        if lines := problems_with(self):
            raise ExperimentError(*lines)
        return self

    def own(self) -> Experiment:
        """Return a copy for one run, without the data set and the loggers. The components are copies too.

        Raises ExperimentError if an object cannot be copied.
        """
        data, records = self.data.model_copy(update={"name": ""}), self.records.model_copy(update={"loggers": []})
        copied = self.model_copy(update={"data": data, "records": records})
        for table in copied.tables():
            if isinstance(table, ComponentTable) and not isinstance(table, schema.TopAggregate) and table != data:
                table.component  # noqa: B018  # created here, so that the copy includes the component
        copied.rule  # noqa: B018
        return own_copy(copied)

    def resolved(self) -> dict[str, Any]:
        """Return the values of all keys as nested tables, including defaults, without keys whose value is None.

        Keys that configure groups are only included if there are groups.
        """
        unused = {"group_rounds", "top_aggregate", "top_attack"} if self.groups is None else set()
        return _without_unset(self.model_dump(mode="json", exclude=unused))


VOCABULARY.keys_called, VOCABULARY.owners_of = partial(keys_called, Experiment), partial(owners_of, Experiment)
VOCABULARY.settings_of = settings_of
VOCABULARY.component_keys = frozenset(
    key for keys, _ in COMPONENTS.values() for key in keys.partition(", before")[0].replace(".name", "").split(", ")
)


def count_workers(tables: Mapping[str, Any]) -> int | None:
    """Return the number of workers that the partition in `tables` prescribes (such as `natural`), otherwise None.

    Without a partition, the number is the length of the list `groups`, or 4 times `groups` if `groups` is a number.
    """
    if "partition" not in tables:
        groups = tables.get("groups")
        return len(groups) if isinstance(groups, list) else 4 * groups if type(groups) is int and groups > 0 else None
    try:
        partition = schema.Partition.model_validate(tables["partition"])
        data = schema.Data.model_validate(tables.get("data", {}))
    except (ValidationError, ExperimentError):  # reported together with the errors of the other tables
        return None
    count = getattr(partition.component, "count_workers", None)

    def ids() -> Mapping[str, np.ndarray]:
        refuse_untrusted_root(data)
        source = data.source(partition)
        train = load_dataset_once(*source)[0]
        if not train.ids or not data.validation_fraction:
            return train.ids
        strata, seed = strata_of(train, **source[2]), tables.get("seed", 0)
        remaining, _ = validation_positions(len(train), data.validation_fraction, seed, strata=strata)
        return {name: column[remaining] for name, column in train.ids.items()}

    return None if count is None else count(ids)


def _sample_shape(partition: schema.Partition, data: schema.Data) -> SampleShape | None:
    """Return the shape of a data set's samples, or None if the data set is not downloaded yet."""
    if shape := known_shape(*(source := data.source(partition))):
        return shape
    refuse_untrusted_root(data)
    if lacks_files(data.name, data.root or default_root(), **data.params):
        return None
    return sample_shape(*source)


def refuse_untrusted_root(data: schema.Data) -> None:
    """Raise ExperimentError if an untrusted experiment file would download data outside the working directory.

    An untrusted file may come from somebody else (see `untrusted_config`).
    """
    if data.root is None or not is_untrusted(data.root):
        return
    if is_outside(user_path(data.root), Path.cwd()) and lacks_files(data.name, data.root, **data.params):
        raise ExperimentError(
            f"data.root = {show(data.root)}: does not contain {data.name}, and an experiment file must not download "
            "data to a folder outside the working directory; set the key on the command line"
        )


def _without_unset(value: Any) -> Any:
    """Return nested tables without keys whose value is None.

    Unlike pydantic's `exclude_none`, this function also removes the keys from tables in lists.
    """
    if isinstance(value, dict):
        return {key: _without_unset(item) for key, item in value.items() if item is not None}
    return [_without_unset(item) for item in value] if isinstance(value, list) else value


def default_name(experiment: Experiment, varied: Collection[str] = ()) -> str:
    """Return the default name of an experiment, such as `net-mnist5k-weighted_mean` or `net-mnist5k-hogwild-race`.

    The name consists of the model, the data, the client algorithm (except sgd), the rule or asynchronous policy,
    and `race` for a race.

    Args:
        experiment: experiment with checked tables.
        varied: dotted keys that a comparison varies. The name omits the parts that depend on these keys.
    """
    policy, rule, algorithm = experiment.policy, experiment.aggregate.rule, experiment.local.algorithm
    stages = rule if isinstance(rule, list) else [rule]
    rules = [stage if isinstance(stage, str) else stage["rule"] for stage in stages]
    parts = [
        ({"model.name"}, [experiment.model.name]),
        ({"data.name"}, [experiment.data.name]),
        ({"local.algorithm"}, [algorithm] if algorithm != schema.Local.model_fields["algorithm"].default else []),
        (
            {"aggregate.rule", "policy.name", "mode", "privacy.mechanism"},
            rules if experiment.in_rounds else [policy.name],
        ),
        ({"mode"}, ["race"] if experiment.mode == "race" else []),
    ]
    words = [
        "_".join(name.rpartition(":")[2].strip("<>") for name in names)
        for keys, names in parts
        if keys.isdisjoint(varied)
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(filter(None, words))).lstrip("._-")
    return name[:MAX_NAME] or "experiment"
