"""Translate pydantic's validation errors into error lines that name keys of the experiment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fedsim.core.numbers import Example
from fedsim.errors import MAX_PROBLEMS, ExperimentError, plural, show
from fedsim.hints.meanings import nearest_key
from fedsim.hints.values import value_hint


def explain(error: ValidationError, model: type[BaseModel], place: str = "") -> list[str]:
    """Translate a pydantic validation error into one error line per problem.

    Args:
        error: validation error from pydantic.
        model: pydantic model that was validated.
        place: dotted key of the table that contains the model's keys.
    """
    lines: list[str] = []
    requirements: dict[str, tuple[Any, list[str]]] = {}  # by place: the value, and the allowed alternatives
    table_keys: dict[str, list[str]] = {}  # by place
    for problem in error.errors(include_url=False):
        kind, value, cause = problem["type"], problem["input"], problem.get("ctx", {}).get("error")
        location, expected = _key_at(problem["loc"], model)
        where = _dotted([place, *location])
        if isinstance(cause, ExperimentError):  # from a fedsim validator: complete except for list indices
            unnumbered = _dotted([place, *(part for part in location if isinstance(part, str))])
            lines.extend(re.sub(rf"^{re.escape(unnumbered)}(\[\]|\b)", where, line) for line in cause.lines)
        elif kind == "extra_forbidden":
            *path, last = location
            shown = len(lines) <= MAX_PROBLEMS  # a file may have very many unknown keys, and hints take time
            allowed = _keys_of(_key_at(problem["loc"][:-1], model)[1]) if shown else []
            hint = nearest_key(str(last), allowed, _dotted([place, *path]), value) if shown else ""
            lines.append(f"{where} = {show(value)}: unknown key; {hint}")
        elif kind == "missing":
            field = model.model_fields.get(str(location[-1]))
            example = next((mark for mark in field.metadata if isinstance(mark, Example)), None) if field else None
            such_as = f", such as {location[-1]} = {show(example.value)}{example.alternative}" if example else ""
            lines.append(f"{where}: is required{such_as}")
        else:
            requirements.setdefault(where, (value, []))[1].append(_requirement(problem["msg"]))
            if kind == "model_type":
                table_keys[where] = _keys_of(expected)
    lines += _unmet(requirements, table_keys)
    return [*dict.fromkeys(lines)]


def _unmet(requirements: Mapping[str, tuple[Any, list[str]]], table_keys: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield one error line for each value that has the wrong type or range.

    Args:
        requirements: value and allowed alternatives of each key, by dotted key.
        table_keys: keys of each table that a hint names, by the table's dotted key.
    """
    outer = {key[: part.start()] for key in requirements for part in re.finditer(r"[.\[]", key)}
    alike: dict[tuple[str, ...], list[str]] = {}  # places with the same requirement: a key, or elements of one list
    for where, (_, wanted) in requirements.items():
        if where not in outer:  # inner keys are more specific
            alike.setdefault((re.sub(r"(\[\d+\])+$", "[]", where), *wanted), []).append(where)
    for where, *others in alike.values():
        value, wanted = requirements[where]
        hint = value_hint(where, value, wanted)
        hint = f"; its keys are {', '.join(table_keys[where])}" if where in table_keys else hint
        also = f" (as must {plural(len(others), 'other value')})" if others else ""
        yield f"{where} = {show(value)}: must be {' or '.join(wanted)}{also}{hint}"


def _key_at(location: Iterable[int | str], model: type[BaseModel]) -> tuple[list[int | str], Any]:
    """Return the key (in parts) whose value pydantic has refused, and the type of this key.

    `location` is the path to the problem in pydantic's words. For a value of a union type, it also contains the type
    that was tried: ("inputs", "dict[str,str]", "x") becomes ("inputs", "x").
    """
    parts, kind = list[int | str](), cast(Any, model)
    for part in location:
        kinds = _alternatives(kind)
        if len(kinds) > 1:
            tried = str(part).partition("[")[0]
            kind = next((each for each in kinds if getattr(get_origin(each) or each, "__name__", "") == tried), Any)
            continue
        fields, inner = getattr(kinds[0], "model_fields", {}), [each for each in get_args(kinds[0]) if each is not ...]
        kind = fields[part].annotation if part in fields else inner[-1] if inner else Any
        parts += [] if part == "[key]" else [part]  # an invalid key in the table
    return parts, kind


def _alternatives(kind: Any) -> list[Any]:
    """Return the members of a union type without None, or the type itself."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return [kind]
    return [inner for each in get_args(kind) if each is not NoneType for inner in _alternatives(each)]


def _keys_of(kind: Any) -> list[str]:
    """Return the keys of a table, or of the tables in a list."""
    kinds = [inner for each in _alternatives(kind) for inner in (each, *get_args(each))]
    return list(next((each.model_fields for each in kinds if BaseModel in getattr(each, "__mro__", ())), ()))


def _dotted(parts: Iterable[int | str]) -> str:
    """Join the parts of a key: ("data", "augment", 0, "pixels") becomes `data.augment[0].pixels`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part != "")
    return text.removeprefix(".")


def _requirement(message: str) -> str:
    """Return pydantic's error message as a text that can follow "must be"."""
    message = re.sub(
        r"a valid dictionary( or instance of \w+)?|an object", "a table", message.replace(" after validation", "")
    )
    message = re.sub(r"^(String|List|Tuple|Set) should have ", lambda it: f"a {it[1].lower()} that has ", message)
    message = re.sub(r"^String should match ", "a string that matches the ", message)
    message = re.sub(r"^(Input should be|Value error, must be|Value error,) ", "", message)
    message = re.sub("a valid (list|tuple|array)", "a list", message)
    return re.sub('(?<!")\'(?!")', '"', message.replace("a valid boolean", "true or false"))
