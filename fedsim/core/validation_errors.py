"""Translate pydantic's validation errors into error lines that name keys of the experiment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

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
        *path, last = problem["loc"] or ("",)
        path = [part for part in path if not _is_union_member(part)]
        location = path if kind != "extra_forbidden" and _is_union_member(last) else [*path, last]
        where = _dotted([place, *location])
        if isinstance(cause, ExperimentError):  # from a fedsim validator: complete except for list indices
            unnumbered = _dotted([place, *(part for part in location if isinstance(part, str))])
            lines.extend(re.sub(rf"^{re.escape(unnumbered)}(\[\]|\b)", where, line) for line in cause.lines)
        elif kind == "extra_forbidden":
            table = _dotted([place, *path])
            shown = len(lines) <= MAX_PROBLEMS  # a file may have very many unknown keys, and hints take time
            hint = nearest_key(str(last), _keys_at(model, path), table, value) if shown else ""
            lines.append(f"{where} = {show(value)}: unknown key; {hint}")
        elif kind == "missing":
            field = model.model_fields.get(str(last))
            example = next((mark for mark in field.metadata if isinstance(mark, Example)), None) if field else None
            such_as = f", such as {last} = {show(example.value)}{example.alternative}" if example else ""
            lines.append(f"{where}: is required{such_as}")
        else:
            requirements.setdefault(where, (value, []))[1].append(_requirement(problem["msg"]))
            if kind == "model_type":
                table_keys[where] = _keys_at(model, location)
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


def _is_union_member(part: int | str) -> bool:
    """Whether `part` of the location in a pydantic error names a type of a union, and not a key."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-") or part in ("bool", "float"))


def _dotted(parts: Iterable[int | str]) -> str:
    """Join the parts of a key: ("data", "augment", 0, "pixels") becomes `data.augment[0].pixels`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts if part != "")
    return text.removeprefix(".")


def _requirement(message: str) -> str:
    """Return pydantic's error message as a text that can follow "must be"."""
    message = re.sub(r"a valid dictionary or instance of \w+", "a table", message.replace(" after validation", ""))
    message = re.sub(r"^(String|List|Tuple|Set) should have ", lambda it: f"a {it[1].lower()} that has ", message)
    message = re.sub(r"^String should match ", "a string that matches the ", message)
    message = re.sub(r"^(Input should be|Value error, must be|Value error,) ", "", message)
    message = re.sub("a valid (list|tuple)", "a list", message)
    return re.sub('(?<!")\'(?!")', '"', message.replace("a valid boolean", "true or false"))


def _keys_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the keys of a nested table. `location` is the path to this table from `model`: ("local", "schedule")."""
    for part in (part for part in location if part and isinstance(part, str)):
        annotation = model.model_fields[part].annotation
        kinds = (annotation, *get_args(annotation))
        model = next((kind for kind in kinds if BaseModel in getattr(kind, "__mro__", ())), model)
    return list(model.model_fields)
