"""All kinds of components, and text lists of the components with names, parameters, defaults and descriptions."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.text_wrapping import hang
from fedsim.errors import ExperimentError, cut, one_line, show
from fedsim.hints.names import has_words
from fedsim.system.files import read_bounded

if TYPE_CHECKING:
    from fedsim.core.registry import Registration, Registry

MAX_MODULE_BYTES = 2**24  # maximum size of a Python file that is listed
COMPONENTS = {  # kind: key that names a component, and registry, which is imported on demand
    "tasks": ("task.name", "fedsim.core.learning_task:learning_task"),
    "metrics": ("metrics", "fedsim.core.metrics:metric"),
    "models": ("model.name", "fedsim.models:model"),
    "datasets": ("data.name", "fedsim.data:dataset"),
    "augmentations": ("data.augment", "fedsim.data.augmentation:augmentation"),
    "partitions": ("partition.name", "fedsim.data:partition_strategy"),
    "sampling": ("sampling.name", "fedsim.server:sampling_strategy"),
    "client-algorithms": ("local.algorithm", "fedsim.clients:client_algorithm"),
    "schedules": ("local.schedule.name, server.schedule.name", "fedsim.clients:lr_schedule"),
    "attacks": ("attack.name", "fedsim.byzantine:attack_strategy"),
    "rules": ("aggregate.rule", "fedsim.aggregation:rule"),
    "pre-aggregators": ("aggregate.rule, before a rule", "fedsim.aggregation:pre_aggregator"),
    "processors": ("processors, downlink", "fedsim.processing:processor"),
    "privacy": ("privacy.mechanism", "fedsim.privacy:privacy_mechanism"),
    "server-optimizers": ("server.name", "fedsim.server:server_optimizer"),
    "policies": ("policy.name", "fedsim.asynchronous.policies:policy"),
    "topologies": ("policy.topology.name", "fedsim.asynchronous.policies.topologies:topology"),
    "slowdowns": ("clock.slowdown.name", "fedsim.delays:slowdown"),
    "noises": ("clock.noise.name", "fedsim.delays:noise"),
    "loggers": ("records.loggers", "fedsim.loggers:logger"),
    "engines": ("engine", "fedsim.engines:engine"),
    "hooks": ("distributed.hook.name", "fedsim.processes.hooks:hook"),
}

NAME_COLUMNS = 19


def registry_of(kind: str) -> Registry:
    """Return the registry with all components of a kind, such as "rules"."""
    module, _, attribute = COMPONENTS[kind][1].partition(":")
    return getattr(importlib.import_module(module), attribute)


def list_components(kinds: Iterable[str], columns: int | None = None, search: str = "") -> str:
    """Return a list of the components of these kinds with their parameters, as text wrapped to `columns`.

    The list contains only components with all words of `search` in their name or documentation. The text is "" if there
    are none.
    """
    blocks = []
    for kind in kinds:
        components = [
            registration
            for registration in registry_of(kind)
            if has_words(search, registration.name, inspect.getdoc(registration.target) or "")
        ]
        families = {
            f"{prefix}:NAME": (inspect.getdoc(make) or "").split("\n", 1)[0]
            for prefix, make in registry_of(kind).families.items()
            if has_words(search, prefix, inspect.getdoc(make) or "")
        }
        if not components and not families:
            continue
        lines = [f"{kind} ({COMPONENTS[kind][0]})"]
        for registration in components:
            lines.append(hang(f"  {registration.name:<{NAME_COLUMNS}} ", registration.summary, columns))
            lines += [f"{'':<{NAME_COLUMNS + 3}}{line}" for line in _parameter_lines(registration)]
        lines += [hang(f"  {name:<{NAME_COLUMNS}} ", summary, columns) for name, summary in families.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def list_module(path: Path, columns: int | None = None) -> str:
    """Return the import paths of the functions and classes in a Python file as text, without running the file.

    The text is wrapped to `columns`, or not wrapped if this is None.

    Raises ExperimentError if the file is not valid Python.
    """
    try:
        body = ast.parse(read_bounded(path, MAX_MODULE_BYTES)).body
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise ExperimentError(f"{path}: cannot be read as Python: {one_line(error)}") from None
    module = ".".join(path.with_suffix("").parts)
    docstrings = {
        f"{module}:{node.name}": ast.get_docstring(node) or "no docstring"
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    width = max(map(len, docstrings), default=0)
    lines = [hang(f"  {name:<{width}} ", cut(text.partition("\n")[0]), columns) for name, text in docstrings.items()]
    check = hang("  ", f"The file was not run. To check a component: fedsim run KEY={module}:NAME --dry-run", columns)
    return "\n".join([str(path), *lines, check])


def describe(kind: str, registration: Registration) -> str:
    """Return the parameters and the docstring of a component of this kind as text."""
    head = f"{registration.name} ({COMPONENTS[kind][0]})"
    return described(head, registration.target, _parameter_lines(registration))


def described(head: str, target: Any, parameters: Iterable[str] = ()) -> str:
    """Return a text that describes a component: `head`, then its parameters, then its docstring."""
    parts = ["\n".join(parameters), inspect.getdoc(target) or "no docstring"]
    return head + "\n" + "\n\n".join(textwrap.indent(part, "  ") for part in parts if part)


def _parameter_lines(registration: Registration) -> list[str]:
    """Return one line `name = default` for each parameter of a component, and the line of `trait_line`."""
    from fedsim.models.base import dimensions_of

    lines, dimensions = [], dimensions_of(registration)
    for name, field in registration.parameters.model_fields.items():
        default = "unset" if field.default is None else show(field.default)
        text = f"{name} (required)" if field.is_required() else f"{name} = {default}"
        lines.append(f"{name} (from the data)" if name in dimensions else text)
    return lines + ([line] if (line := trait_line(registration.target)) else [])


def trait_line(target: Any) -> str | None:
    """Return the line about the cost of a client algorithm or the training of a model. None for other components.

    The line of a client algorithm is its number of gradients, such as `gradients per step: 2`. The line of a model says
    how the engine `batched` trains the models of several workers at once.
    """
    if hasattr(target, "full_gradient"):
        algorithm = object.__new__(target)  # class attributes are the defaults
        full = ", and a full gradient per round" * algorithm.full_gradient
        return f"gradients per step: {algorithm.gradients_per_step}{full}"
    how = {"merged": "trains worker stacks on one merged batch", "vmap": "trains worker stacks with torch.func.vmap"}
    stacked = getattr(target, "stacked", None)
    return stacked and f"engine batched: {how.get(stacked, f'cannot train stacks of workers: {stacked}')}"
