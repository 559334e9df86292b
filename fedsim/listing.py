"""All plugs as text: names, parameters with defaults, one line of description."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable

from fedsim.aggregation import pre_aggregator, rule, server_optimizer
from fedsim.asynchronous.delays import noise, speed
from fedsim.asynchronous.policies import policy
from fedsim.augmentation import augmentation
from fedsim.byzantine import attack_strategy
from fedsim.data import dataset, partition_strategy
from fedsim.engines import engine
from fedsim.engines.hooks import hook
from fedsim.errors import show
from fedsim.local import solver
from fedsim.models import model
from fedsim.registry import Plug, Registry
from fedsim.wrapping import hang

PLUGS: dict[str, tuple[str, Registry]] = {  # what `fedsim list` calls a kind: the key that names one, the registry
    "models": ("model.name", model),
    "datasets": ("data.dataset", dataset),
    "augmentations": ("data.augment", augmentation),
    "partitions": ("partition.strategy", partition_strategy),
    "solvers": ("local.solver", solver),
    "attacks": ("attack.name", attack_strategy),
    "rules": ("aggregate.rule", rule),
    "pre-aggregators": ("aggregate.rule, before a rule", pre_aggregator),
    "servers": ("server.optimizer", server_optimizer),
    "policies": ("policy.name", policy),
    "speeds": ("clock.speed.name", speed),
    "noises": ("clock.noise.name", noise),
    "engines": ("engine", engine),
    "hooks": ("distributed.hook.name", hook),
}

WIDTH = 19  # of the column of names

Signatures = dict[str, inspect.Signature]


def partitions() -> Signatures:
    """The names of all partition strategies, each with its parameters."""
    return signatures(partition_strategy)


def attacks() -> Signatures:
    """The names of all attacks, each with its parameters."""
    return signatures(attack_strategy)


def rules() -> Signatures:
    """The names of all aggregation rules, each with its parameters."""
    return signatures(rule)


def pre_aggregators() -> Signatures:
    """The names of all pre-aggregators, each with its parameters."""
    return signatures(pre_aggregator)


def server_optimizers() -> Signatures:
    """The names of all server optimizers, each with its parameters."""
    return signatures(server_optimizer)


def policies() -> Signatures:
    """The names of all asynchronous policies, each with its parameters."""
    return signatures(policy)


def speeds() -> Signatures:
    """The names of all ways to say how fast workers are on the virtual clock, each with its parameters."""
    return signatures(speed)


def noises() -> Signatures:
    """The names of all ways in which the time of a piece of work varies on the clock, each with its parameters."""
    return signatures(noise)


def signatures(registry: Registry) -> Signatures:
    """The names of a registry's plugs, each with the parameters that configure it."""
    return {plug.name: _configuration(plug) for plug in registry}


def _configuration(plug: Plug) -> inspect.Signature:
    parameters = inspect.signature(plug.target, eval_str=True).parameters.values()
    return inspect.Signature([p for p in parameters if p.name in plug.parameters.model_fields])


def list_plugs(kinds: Iterable[str], columns: int | None = None) -> str:
    """The plugs of these kinds, as lines, broken so as not to need more than so many columns."""
    blocks = []
    for kind in kinds:
        key, registry = PLUGS[kind]
        lines = [f"{kind} ({key})"]
        for plug in registry:
            lines.append(hang(f"  {plug.name:<{WIDTH}} ", plug.summary, columns))
            if described := describe_parameters(plug):
                lines.append(textwrap.indent(described, " " * (WIDTH + 3)))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def describe_parameters(plug: Plug) -> str:
    """`name = default` for each parameter, one a line."""
    return "\n".join(
        f"{name} (required)" if field.is_required() else f"{name} = {show_toml(field.default)}"
        for name, field in plug.parameters.model_fields.items()
    )


def show_toml(value: object) -> str:
    """A default as an experiment file would say it."""
    return "unset" if value is None else show(value)
