"""The keys of an experiment with their types, defaults and descriptions, for the command line and the documentation."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from fedsim.config.experiment import Experiment
from fedsim.config.plugs import PLUGS
from fedsim.core.attribute_docstrings import attribute_docstrings
from fedsim.core.base_table import PlugTable, Table
from fedsim.core.suggestions import has_words
from fedsim.core.type_text import type_text
from fedsim.errors import show

COLUMNS = 100  # of the list, if stdout is no terminal


@dataclass(frozen=True)
class Key:
    """A key of an experiment; the keys of a list of tables have [] in their path: `processors[].name`."""

    path: str
    type: str
    default: str
    description: str


@dataclass(frozen=True)
class KeyTable:
    """A table of an experiment: its dotted path ("" for the keys outside tables), what it is, and its keys.

    `plugs` is the kind of plug that the table names: its parameters are further keys.
    """

    path: str
    description: str
    keys: list[Key]
    plugs: str | None = None


def key_tables() -> list[KeyTable]:
    """All tables of an experiment, in its order; first the keys outside tables.

    >>> next(key for table in key_tables() for key in table.keys if key.path == "rounds").default
    '10'
    """
    return list(_tables(Experiment, ""))


def _tables(table: type[Table], path: str) -> Iterator[KeyTable]:
    described = attribute_docstrings(table)
    keys: list[Key] = []
    inner: list[tuple[type[Table], str]] = []
    for name, field in table.model_fields.items():
        place = f"{path}.{name}" if path else name
        below = table_of(field.annotation)
        if below is not None:
            in_list = field.annotation is not below
            inner.append((below, f"{place}[]" if in_list else place))
            if not in_list:
                continue
        description = described.get(name, "")
        if issubclass(table, PlugTable) and name == table.named_by and not description:
            description = f"One of `fedsim list {_kind(table)}`, or an import path."
        keys.append(Key(place, type_text(field), _default(field.default), description))
    plugs = _kind(table) if issubclass(table, PlugTable) else None
    yield KeyTable(path, "" if table is Experiment else inspect.cleandoc(table.__doc__ or ""), keys, plugs)
    for below, place in inner:
        yield from _tables(below, place)


def table_of(annotation: Any) -> type[Table] | None:
    """The table that an annotation is, or is a list of; None for other annotations."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Table):
            return each
    return None


def _kind(table: type[PlugTable]) -> str:
    """The kind of the plugs that a table names, as `fedsim list` calls it."""
    place = f"{table.place}.{table.named_by}"
    return next(kind for kind, (keys, _) in PLUGS.items() if {place, table.place} & set(keys.split(", ")))


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "unset" if value is None else show(value)


def list_keys(columns: int | None = None, search: str = "") -> str:
    """The keys of an experiment as text, wrapped to the columns of a terminal.

    Only those that have all words of `search` in their path or description; "" if there are none.
    """
    width = columns or COLUMNS
    blocks = ["keys of an experiment (key=value on the command line)"]
    for table in key_tables():
        keys = [key for key in table.keys if has_words(search, key.path, key.description)]
        if not keys:
            continue
        lines = [f"[{table.path}]"] if table.path else []
        lines += _wrapped(" ".join(table.description.split()), width, "")
        for key in keys:
            lines += _wrapped(f"{key.path} = {key.default}  ({key.type.replace('`', '')})", width, "  ")
            lines += _wrapped(key.description, width, "      ")
        if table.plugs:
            lines += _wrapped(f"and the parameters of what is named: fedsim list {table.plugs}", width, "  ")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) if len(blocks) > 1 else ""


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
