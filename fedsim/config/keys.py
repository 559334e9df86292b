"""The keys of an experiment with their types, defaults and descriptions, for the command line and the documentation."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedsim.config.components import COMPONENTS, registry_of
from fedsim.config.experiment import Experiment
from fedsim.core.base_table import ComponentTable, Name, Table
from fedsim.errors import show
from fedsim.hints.names import has_words

COLUMNS = 100  # width of the list if stdout is not a terminal
WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "unset", Any: "any value"}
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
NAME_CHECK = get_args(Name)[1]
HUGE = 2**53  # larger limits are technical and not shown


@dataclass(frozen=True)
class Key:
    """A key of an experiment. The path of a key in a list of tables contains []: `processors[].name`."""

    path: str
    type: str
    default: str
    description: str

    @property
    def head(self) -> str:
        """The key with its default and type, as text."""
        return f"{self.path} = {self.default}  ({self.type.replace('`', '')})"


@dataclass(frozen=True)
class KeyTable:
    """A table of an experiment: dotted path ("" for top-level keys), description and keys.

    If the table selects a component, `components` is its kind, and the component's parameters are further keys.
    """

    path: str
    description: str
    keys: list[Key]
    components: str | None = None


def key_tables() -> list[KeyTable]:
    """Return all tables of an experiment in their order, starting with the top-level keys.

    >>> next(key for table in key_tables() for key in table.keys if key.path == "rounds").default
    '10'
    """
    return list(_tables(Experiment, ""))


def _tables(table: type[Table], path: str) -> Iterator[KeyTable]:
    described = attribute_docstrings(table)
    kind = None  # kind of component that the table names, as in `fedsim list`
    if issubclass(table, ComponentTable):
        kind = next(kind for kind in COMPONENTS if registry_of(kind) is table.registry)
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
        if kind and issubclass(table, ComponentTable) and name == table.named_by and not description:
            description = f"One of `fedsim list {kind}`, or an import path."
        keys.append(Key(place, type_text(field), _default(field.default), description))
    yield KeyTable(path, "" if table is Experiment else inspect.cleandoc(table.__doc__ or ""), keys, kind)
    for below, place in inner:
        yield from _tables(below, place)


def table_of(annotation: Any) -> type[Table] | None:
    """Return the table class in the annotation of a table or a list of tables, or None for other annotations."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if Table in getattr(kind, "__mro__", ())), None)


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "unset" if value is None else show(value)


def list_keys(columns: int | None = None, search: str = "") -> str:
    """Return a list of the keys of an experiment as text, wrapped to `columns`.

    Only keys with all words of `search` in their path, their description or that of their table are listed. The text
    is "" if there are none.
    """
    width = columns or COLUMNS
    blocks = ["keys of an experiment (key=value on the command line)"]
    for table in key_tables():
        keys = [key for key in table.keys if has_words(search, key.path, key.description, table.description)]
        if not keys:
            continue
        lines = [f"[{table.path}]"] if table.path else []
        lines += _wrapped(" ".join(table.description.split()), width, "")
        for key in keys:
            lines += _wrapped(key.head, width, "  ")
            lines += _wrapped(key.description, width, "      ")
        if table.components:
            lines += _wrapped(f"and the parameters of the component: fedsim list {table.components}", width, "  ")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) if len(blocks) > 1 else ""


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def type_text(field: FieldInfo) -> str:
    """Describe the type of a pydantic field in words.

    >>> type_text(Experiment.model_fields["cohort"])
    'integer above 0, or unset'
    """
    return "name" if NAME_CHECK in field.metadata else _with_limits(_words(field.annotation), field.metadata)


def _words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return "name" if NAME_CHECK in inner else _with_limits(_words(inner[0]), inner[1:])
    if origin is Literal:
        return ", ".join(f"`{show(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        members = [_words(member) for member in inner if member is not type(None)]
        return " or ".join(members) + (", or unset" if type(None) in inner else "")
    if origin in (list, tuple, set, frozenset):
        items = next((_words(member) for member in inner if member is not ...), "any value")
        return f"list of: {items}"
    if origin is dict or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "name or table"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _with_limits(text: str, metadata: Any) -> str:
    limits = []
    for constraint in (part for entry in metadata for part in getattr(entry, "metadata", [entry])):
        for name, words in LIMITS.items():
            value = getattr(constraint, name, None)
            if value is not None and abs(value) < HUGE:
                limits.append(f"{words} {value:g}")
        if least := getattr(constraint, "min_length", None):
            limits.append(f"at least {least} of them")
    return f"{text} {' and '.join(limits)}" if limits else text


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the description of each annotated field of a class: the string literal below the field, on one line.

    Fields of base classes are included.

    The source is read on demand, so descriptions do not slow down the import of fedsim.

    >>> from fedsim.config.schema import Checkpoint
    >>> attribute_docstrings(Checkpoint)["keep"]
    'Number of newest checkpoints to keep.'
    """
    docstrings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "fedsim":
            docstrings |= _in_source(base)
    return docstrings


@functools.cache
def _in_source(kind: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
