"""What fedsim raises, and how a failed check becomes one clear line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


class FedsimError(Exception):
    """Base of every error that fedsim raises on purpose."""


class ExperimentError(FedsimError, ValueError):
    """The experiment cannot be run as described: one line per problem, with place, value and what is allowed."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class DataError(FedsimError):
    """A data set is missing, cannot be downloaded or is damaged."""


class RecordError(FedsimError):
    """A run folder cannot be made, written or read."""


class MissingPackageError(FedsimError, ImportError):
    """A package of one of fedsim's extras is needed, and not installed."""


class WorkerError(FedsimError, RuntimeError):
    """A worker, or the process that ran it, failed: says which worker, process and round, and how."""


def show(value: Any) -> str:
    """A value as an error line shows it: short, strings in quotes."""
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error: BaseException) -> str:
    """An exception of somebody else's as `Type: message`, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`did you mean "x"? allowed: ...` for a name that is not among `allowed`."""
    allowed = list(allowed)
    matches = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=0.5)
    guess = f'did you mean "{matches[0]}"? ' if matches else ""
    return f"{guess}allowed: {', '.join(allowed) or 'none'}"


def explain(error: ValidationError, model: type[BaseModel], place: str = "") -> list[str]:
    """One line per problem that pydantic found in `model`, whose keys stand under `place` in the experiment."""
    lines: list[str] = []
    wanted: dict[str, tuple[Any, list[str]]] = {}  # by place: the value, and what would do instead of it
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ExperimentError):  # raised by one of our own validators: complete already
            lines.extend(cause.lines)
            continue
        location = [str(part) for part in problem["loc"] if not _is_choice(part)]
        where = ".".join(([place] if place else []) + location)
        if problem["type"] == "extra_forbidden":
            allowed = _keys_at(model, location[:-1])
            lines.append(f"{where} = {show(problem['input'])}: unknown key; {nearest(location[-1], allowed)}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: is required")
        else:
            wanted.setdefault(where, (problem["input"], []))[1].append(_requirement(problem["msg"]))
    for where, (value, requirements) in wanted.items():
        if not any(other.startswith(f"{where}.") for other in wanted):  # else what is wrong within says more
            lines.append(f"{where} = {show(value)}: must be {' or '.join(requirements)}")
    return list(dict.fromkeys(lines))


def _is_choice(part: int | str) -> bool:
    """Whether a part of pydantic's location names one type of a union rather than a key."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-"))


def _requirement(message: str) -> str:
    """What pydantic's message asks for, in the words of experiment files."""
    message = re.sub(r"a valid dictionary or instance of \w+", "a table", message)
    return re.sub(r"^(Input should be|Value error,) ", "", message).replace("'", '"')


def _keys_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The keys allowed in the (sub)table of `model` that `location` leads to."""
    for part in location:
        annotation = model.model_fields[part].annotation
        for candidate in (annotation, *get_args(annotation)):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
                break
    return list(model.model_fields)
