"""The tables of an experiment by dotted key, and the keys that a name may mean, for hints in error messages.

The argument `root` is the class `Experiment`, which is not imported here because it imports this module.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.core.base_table import ComponentTable, Table
from fedsim.synonyms import KEYS


def _inner_tables(table: type[Table]) -> dict[str, type[Table]]:
    """Return the nested tables by key, except tables in lists. Every nested table has a default."""
    return {key: type(field.default) for key, field in table.model_fields.items() if isinstance(field.default, Table)}


@functools.cache
def component_tables(root: type[Table]) -> dict[str, type[ComponentTable]]:
    """Return the tables that select a component, by dotted key (such as `clock.slowdown`), except tables in lists."""
    tables: dict[str, type[ComponentTable]] = {}
    for table in _inner_tables(root).values():
        if issubclass(table, ComponentTable):
            tables[table.place] = table
        tables |= component_tables(table)
    return tables


def keys_of_component(name: str) -> list[str]:
    """Return the keys of an experiment that can name the component `name`."""
    return [key for kind, (key, _) in COMPONENTS.items() if name in registry_of(kind).names()]


def keys_called(root: type[Table], name: str) -> list[str]:
    """Return the dotted keys that `name` may mean: `name` itself, keys that end with it, or keys with this synonym."""
    if name.partition(".")[0] in root.model_fields:
        return [name]
    return list(KEYS.get(name) or keys_of_tables(root, {}).get(name, []))


def keys_of_tables(root: type[Table], tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the dotted keys that end with each key, for hints: {"lr": ["local.lr", "server.lr"], ...}.

    For a parameter, these are the dotted keys in the components that the experiment `tables` selects. If no selected
    component has this parameter, they are the dotted keys in all other components.
    """
    of_selected: dict[str, list[str]] = defaultdict(list)
    of_others: dict[str, list[str]] = defaultdict(list)
    for place, table in _inner_tables(root).items():
        for key in table.model_fields:
            of_selected[key].append(f"{place}.{key}")
        if issubclass(table, ComponentTable):
            name = tables.get(place)
            name = name.get(table.named_by) if isinstance(name, Mapping) else name
            selected = name if isinstance(name, str) and name in table.registry.names() else table.default_component()
            for registration in table.registry:
                keys = of_selected if registration.name == selected else of_others
                for key in registration.parameter_names:
                    if f"{place}.{key}" not in keys[key]:
                        keys[key].append(f"{place}.{key}")
    return {**of_others, **of_selected}
