"""The tables of an experiment by dotted key, and the keys that a name may mean, for hints in error messages.

The argument `root` is the class `Experiment`, which is not imported here because it imports this module.
"""

from __future__ import annotations

import functools
from collections import defaultdict

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.core.base_table import ComponentTable, Table
from fedsim.hints.names import named, with_words


def _inner_tables(table: type[Table]) -> dict[str, type[Table]]:
    """Return the nested tables by key, except tables in lists. Every nested table has a default."""
    return {key: type(field.default) for key, field in table.model_fields.items() if isinstance(field.default, Table)}


@functools.cache
def component_tables(root: type[Table]) -> dict[str, type[ComponentTable]]:
    """Return the tables in `root` that select a component, by dotted key (such as `clock.slowdown`), without lists."""
    tables: dict[str, type[ComponentTable]] = {}
    for table in _inner_tables(root).values():
        if issubclass(table, ComponentTable):
            tables[table.place] = table
        tables |= component_tables(table)
    return tables


def settings_of(name: str) -> list[str]:
    """Return the settings that select the component `name`: ["server=adam"]."""
    settings: dict[str, str] = {}
    for kind, (text, _) in COMPONENTS.items():
        for known in named(name, registry_of(kind).names()):
            keys, _, first_stage = text.partition(", before")
            for key in keys.replace(".name", "").split(", "):
                settings.setdefault(key, f'{key}=\'["{known}","mean"]\'' if first_stage else f"{key}={known}")
    return list(settings.values())


@functools.cache
def _owners(root: type[Table]) -> dict[str, dict[str, list[str]]]:
    """Return {last part of a key: {dotted key in `root`: names of the components that have this parameter}}.

    The name is "" for the default component, and for a key that does not depend on a component.
    """
    owners: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for place, table in (_inner_tables(root) | component_tables(root)).items():
        for key in table.model_fields:
            owners[key][f"{place}.{key}"].append("")
        components = (table.registry, table.default_component()) if issubclass(table, ComponentTable) else ((), None)
        for registration in components[0]:
            owner = "" if registration.name == components[1] else registration.name
            for parameter in registration.parameter_names:
                owners[parameter][f"{place}.{parameter}"].append(owner)
    return owners


def keys_called(root: type[Table], name: str) -> list[str]:
    """Return the keys of `root` that `name` may mean: `name` itself, or the keys whose last part contains its words.

    Of the component parameters, only those of default components are returned.
    """
    if name.partition(".")[0] in root.model_fields:
        return [name]
    lasts = with_words(name, _owners(root))
    return [key for last in lasts for key, components in _owners(root)[last].items() if "" in components]


def owners_of(root: type[Table], name: str) -> str:
    """Return a text about the components in `root` that have the parameter `name`, or "" if there are none."""
    owners = [owner for last in with_words(name, _owners(root)) for owner in _owners(root)[last].items()]
    texts = (f"{key} of {', '.join(components)}" for key, components in owners)
    return f"it may be {' or '.join(texts)}" if owners else ""
