"""Errors for attributes that do not exist, with the attributes to use instead."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fedsim.errors import ExperimentError, show
from fedsim.hints.meanings import nearest
from fedsim.hints.names import is_kind

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
    """Return the hint for a missing attribute. The arguments are those of `attribute_error`."""
    public = [each for each in names if not each.startswith("_")]
    hint = nearest(name.removeprefix("get_").removeprefix("list_"), public)
    return otherwise if otherwise and hint.startswith("allowed") else hint


def hinting(function: F) -> F:
    """Decorate a public function: an unknown or missing keyword raises ExperimentError with the right argument."""
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name not in ("self", "cls")]
    required = [
        each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY and each.default is each.empty
    ]

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        if unknown := [name for name in keywords if name not in names]:
            where = f"{function.__name__}: {unknown[0]} = {show(keywords[unknown[0]])}"
            raise ExperimentError(f"{where}: no such argument; {nearest(unknown[0], names)}")
        if missing := [name for name in required if name not in keywords]:
            raise ExperimentError(f"{function.__qualname__}: {missing[0]}: must be passed by its name")
        return function(*arguments, **keywords)

    return cast(F, checked)


def takes_component(table: str, key: str = "name", **settings: str) -> Callable[[F], F]:
    """Decorate a public function that takes a component by `name`: its errors show arguments instead of settings.

    Args:
        table: table of the component in an experiment, such as `partition`.
        key: key of the component's name in this table.
        settings: setting of each further argument, such as n_workers="workers".
    """
    names = {f"{table}.{key}": "name", table: "name"} | {setting: name for name, setting in settings.items()}

    def decorate(function: F) -> F:
        parameters = [each for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
        known = [each.name for each in parameters if each.name != "self"]
        required = [each.name for each in parameters if each.default is each.empty]
        by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        taken = f"the arguments of {function.__qualname__.removesuffix('.__init__')} are {', '.join(known)}"

        @functools.wraps(function)
        def checked(*given: Any, **keywords: Any) -> Any:
            if by_name and len(given) > len(by_position):
                value = show(given[len(by_position)])
                raise ExperimentError(
                    f"{function.__qualname__}: argument {len(by_position) + 1} = {value}: must be passed by its name, "
                    f"such as {by_name[0]}={value}"
                )
            missing = dict.fromkeys(name for name in required[len(given) :] if name not in keywords)
            try:
                return function(*given, **missing, **keywords)
            except ExperimentError as error:
                lines = [_with_arguments(line, table, names) for line in error.lines]
                if error.key.startswith(f"{table}.{key}") and " name" in lines[0].partition(": must be")[2]:
                    lines = [f"{lines[0]}; {taken}"]
                unknown = [line.partition(" = ")[0] for line in error.lines if ": unknown key" in line]
                for word, value in keywords.items():
                    name = names.get(f"{table}.{word}") or names.get(word) or ("name" if is_kind(word) else "")
                    if name and (f"{table}.{word}" in unknown or ("name" in missing and word not in known)):
                        lines = [f"{word} = {show(value)}: no such argument; write {name}={show(value)}"]
                raise (error if lines == [*error.lines] else ExperimentError(*lines)) from error.__cause__

        return cast(F, checked)

    return decorate


def _with_arguments(line: str, table: str, names: dict[str, str]) -> str:
    """Return an error line with arguments instead of settings: `name="iid"` for `partition=iid`.

    `names` maps settings to arguments. Keys of the `table`, such as `partition.alpha`, become arguments too.
    """
    line, separator, hint = re.sub(" is a top-level key; .*", " is a setting of fedsim.run", line).partition("; ")
    keys = re.findall(r"(?<![\w.])([a-z_]+(?:\.\w+)*)=", hint)
    if all(key in names or key.startswith(f"{table}.") for key in keys):
        line, separator, hint = f"{line}{separator}{hint}", "", ""
    elif hint.startswith("write"):
        hint = f"in the settings of fedsim.run, {hint}"
    for setting, name in {**names, f"{table}.": ""}.items():
        line = re.sub(rf"(?<![\w.]){re.escape(setting)}(?=\w*(?:=| = |: |\[))", name, line)
    line = re.sub(r"(=\S*[^\s,;]) (?=\w+=)", r"\1, ", re.sub(r"\bname=(\w+)", r'name="\1"', line))
    return f"{line}{separator}{hint}"


class HintingAttributes:
    """Base class of results: the error for a missing attribute suggests the attribute to use instead."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the AttributeError of the property again
            raise attribute_error(f"{type(self).__name__!r} object", name, dir(self))
