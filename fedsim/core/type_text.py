"""Types of parameters and keys in words: `integer, at least 1`."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsim.core.objects import Name
from fedsim.errors import show

WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "unset", Any: "any value"}
LIMITS = {Gt: "above", Ge: "at least", Lt: "below", Le: "at most"}
NAME_CHECK = get_args(Name)[1]
HUGE = 2**53  # limits beyond it keep numbers storable, and are not shown


def type_text(field: FieldInfo) -> str:
    """The type of a field of a pydantic model in words.

    >>> class Model(BaseModel):
    ...     count: Annotated[int, Gt(0)] | None = None
    >>> type_text(Model.model_fields["count"])
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
        given = [_words(each) for each in inner if each is not type(None)]
        return " or ".join(given) + (", or unset" if type(None) in inner else "")
    if origin in (list, tuple, set, frozenset):
        each = next((_words(one) for one in inner if one is not ...), "any value")
        return f"list of: {each}"
    if origin is dict or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "name or table"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _with_limits(text: str, metadata: Any) -> str:
    limits = []
    for each in (part for one in metadata for part in getattr(one, "metadata", [one])):
        for kind, words in LIMITS.items():
            value = getattr(each, kind.__name__.lower(), None) if isinstance(each, kind) else None
            if value is not None and abs(value) < HUGE:
                limits.append(f"{words} {value:g}")
        if isinstance(each, (MinLen, MaxLen)) and getattr(each, "max_length", 0) == 0:
            limits.append(f"at least {each.min_length} of them")  # type: ignore[union-attr]
    return f"{text} {' and '.join(limits)}" if limits else text
