"""Errors for attributes that do not exist, with the attributes to use instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show

F = TypeVar("F", bound=Callable[..., Any])


def attribute_error(owner: str, name: str, names: Iterable[str], otherwise: str = "") -> AttributeError:
    """Return the error for a missing attribute, with a hint: similar attributes, or all of them.

    Args:
        owner: text about the object, such as "module 'fedsim'".
        name: the missing attribute.
        names: attributes of the object, of which only public ones are suggested.
        otherwise: hint if no attribute is similar; "" to list all attributes.
    """
    is_private = name.startswith("_")  # Python and its tools try many private names
    hint = "" if is_private else f"; {attribute_hint(name, names, otherwise)}"
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")


def attribute_hint(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of `attribute_error`."""
    public = [each for each in names if not each.startswith("_")]
    hint = nearest(name.removeprefix("get_").removeprefix("list_"), public)
    return otherwise if otherwise and hint.startswith("allowed") else hint


def hinting(function: F) -> F:
    """Decorate a public function: an unknown keyword raises ExperimentError with the nearest argument."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        if unknown := [name for name in keywords if name not in names]:
            where = f"{function.__name__}: {unknown[0]} = {show(keywords[unknown[0]])}"
            raise ExperimentError(f"{where}: no such argument; {nearest(unknown[0], names)}")
        return function(*arguments, **keywords)

    return cast(F, checked)


class HintingAttributes:
    """Base class of results: the error for a missing attribute suggests the attribute to use instead."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the AttributeError of the property again
            raise attribute_error(f"{type(self).__name__!r} object", name, dir(self))
