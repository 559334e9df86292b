"""All plugs as text: names, parameters with defaults, one line of description."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fedsim.errors import ExperimentError, nearest, one_line, show
from fedsim.wrapping import hang

if TYPE_CHECKING:
    from fedsim.registry import Plug, Registry

PLUGS = {  # what `fedsim list` calls a kind: the key that names one, and where its registry is
    "models": ("model.name", "fedsim.models:model"),
    "datasets": ("data.dataset", "fedsim.data:dataset"),
    "augmentations": ("data.augment", "fedsim.augmentation:augmentation"),
    "partitions": ("partition.strategy", "fedsim.data:partition_strategy"),
    "solvers": ("local.solver", "fedsim.local:solver"),
    "attacks": ("attack.name", "fedsim.byzantine:attack_strategy"),
    "rules": ("aggregate.rule", "fedsim.aggregation:rule"),
    "pre-aggregators": ("aggregate.rule, before a rule", "fedsim.aggregation:pre_aggregator"),
    "servers": ("server.optimizer", "fedsim.aggregation:server_optimizer"),
    "policies": ("policy.name", "fedsim.asynchronous.policies:policy"),
    "speeds": ("clock.speed.name", "fedsim.asynchronous.delays:speed"),
    "noises": ("clock.noise.name", "fedsim.asynchronous.delays:noise"),
    "engines": ("engine", "fedsim.engines:engine"),
    "hooks": ("distributed.hook.name", "fedsim.engines.hooks:hook"),
}

WIDTH = 19  # of the column of names

Signatures = dict[str, inspect.Signature]


def partitions() -> Signatures:
    """The names of all partition strategies, each with its parameters."""
    return signatures(registry_of("partitions"))


def attacks() -> Signatures:
    """The names of all attacks, each with its parameters."""
    return signatures(registry_of("attacks"))


def rules() -> Signatures:
    """The names of all aggregation rules, each with its parameters."""
    return signatures(registry_of("rules"))


def pre_aggregators() -> Signatures:
    """The names of all pre-aggregators, each with its parameters."""
    return signatures(registry_of("pre-aggregators"))


def server_optimizers() -> Signatures:
    """The names of all server optimizers, each with its parameters."""
    return signatures(registry_of("servers"))


def policies() -> Signatures:
    """The names of all asynchronous policies, each with its parameters."""
    return signatures(registry_of("policies"))


def speeds() -> Signatures:
    """The names of all ways to say how fast workers are on the virtual clock, each with its parameters."""
    return signatures(registry_of("speeds"))


def noises() -> Signatures:
    """The names of all ways in which the time of a piece of work varies on the clock, each with its parameters."""
    return signatures(registry_of("noises"))


def registry_of(kind: str) -> Registry:
    """The registry of a kind of plug, imported here, so that the names of the kinds can be had without PyTorch."""
    module, _, attribute = PLUGS[kind][1].partition(":")
    return getattr(importlib.import_module(module), attribute)


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
        lines = [f"{kind} ({PLUGS[kind][0]})"]
        for plug in registry_of(kind):
            lines.append(hang(f"  {plug.name:<{WIDTH}} ", plug.summary, columns))
            if described := describe_parameters(plug):
                lines.append(textwrap.indent(described, " " * (WIDTH + 3)))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def describe_plug(name: str, kinds: Iterable[str] = PLUGS) -> str:
    """The plugs with this name, or the one that an import path leads to, with parameters and docstring.

    `kinds` are what else a name may be, for the hint of an error. Raises ExperimentError if there is no such plug, or
    the path cannot be imported.
    """
    if ":" in name:
        return _described(*_imported(name))
    found = [(kind, plug) for kind in PLUGS for plug in registry_of(kind)]
    blocks = [
        _described(f"{name} ({PLUGS[kind][0]})", plug.target, describe_parameters(plug))
        for kind, plug in found
        if plug.name == name
    ]
    if not blocks:
        hint = nearest(name, dict.fromkeys([*kinds, *(plug.name for _, plug in found)]))
        hint = hint if hint.startswith("did you mean") else nearest(name, kinds)  # not the names of all plugs
        raise ExperimentError(f"{show(name)}: no such kind or plug; {hint}")
    return "\n\n".join(blocks)


def _imported(path: str) -> tuple[str, Any]:
    """The head of what is shown of an imported plug, its path and parameters, and the plug."""
    from fedsim.registry import import_object

    try:
        target = import_object(path)
        signature = inspect.signature(target)
    except Exception as error:
        raise ExperimentError(f"{show(path)}: cannot be imported: {one_line(error)}") from error
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"{path}{inspect.Signature(bare)}", target


def _described(head: str, target: Any, parameters: str = "") -> str:
    parts = [textwrap.indent(parameters, "  "), textwrap.indent(inspect.getdoc(target) or "no docstring", "  ")]
    return head + "\n" + "\n\n".join(filter(None, parts))


def describe_parameters(plug: Plug) -> str:
    """`name = default` for each parameter, one a line."""
    return "\n".join(
        f"{name} (required)" if field.is_required() else f"{name} = {show_toml(field.default)}"
        for name, field in plug.parameters.model_fields.items()
    )


def show_toml(value: object) -> str:
    """A default as an experiment file would say it."""
    return "unset" if value is None else show(value)
