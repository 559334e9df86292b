"""Experiments as YAML files: read, never written.

The scalars are those of YAML's core schema (YAML 1.2): `no` and `2024-01-01` are strings, `1e-3` is a number. Anchors,
aliases, tags and repeated keys are refused, so that a file is as large as it looks and executes nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.config.toml import read_text
from fedsim.core.input_limits import MAX_DEPTH, problem_with_words
from fedsim.errors import ExperimentError, cut, show
from fedsim.system.packages import import_extra

YAML_SUFFIXES = (".yaml", ".yml")

CONSTANTS = dict.fromkeys(("", "~", "null", "Null", "NULL")) | {
    each: value for text, value in (("true", True), ("false", False)) for each in (text, text.title(), text.upper())
}
INTEGER = re.compile(r"[-+]?[0-9]+")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_yaml(path: Path) -> dict[str, Any]:
    """The tables of a YAML file; a key may be dotted. An empty file has none.

    Raises ExperimentError if the file cannot be read, is not YAML, or holds values that no experiment holds, and
    MissingPackageError if PyYAML is not installed.
    """
    yaml = import_extra("yaml", extra="yaml", purpose=f"{path}")
    where, text = cut(str(path)), read_text(path, "YAML")
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        documents = list(_documents(events))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        reason = getattr(error, "problem", None) or "has characters that YAML does not allow"
        raise ExperimentError(f"{where}:{line} cannot be read as YAML: {cut(reason)}") from None
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{where}: {cut(str(error))}") from None
    tables = documents[0] if documents else {}
    if len(documents) > 1 or not (tables is None or isinstance(tables, dict)):
        raise ExperimentError(f"{where}: must be one table of keys and values, such as rounds: 3")
    if problem := problem_with_words(tables or {}):
        raise ExperimentError(f"{where}: {problem}")
    return tables or {}


def _documents(events: Iterator[Any]) -> Iterator[Any]:
    for event in events:
        if type(event).__name__ == "DocumentStartEvent":
            yield _value(next(events), events, 0)


def _value(event: Any, events: Iterator[Any], depth: int) -> Any:
    """The value that begins with an event of PyYAML's parser. Raises ValueError, with the line, for what is refused."""
    kind, line = type(event).__name__, f"line {event.start_mark.line + 1}"
    if kind == "AliasEvent" or event.anchor:
        raise ValueError(f"{line}: anchors (&) and aliases (*) are not allowed; write the value again")
    if event.tag not in (None, "!"):
        raise ValueError(f"{line}: {show(event.tag)}: tags (!) are not allowed")
    if depth > MAX_DEPTH:
        raise ValueError(f"{line}: more than {MAX_DEPTH} nested tables and lists")
    if kind == "ScalarEvent":
        return _scalar(event.value) if event.implicit[0] else event.value
    if kind == "SequenceStartEvent":
        return [_value(each, events, depth + 1) for each in _until("SequenceEndEvent", events)]
    table: dict[str, Any] = {}
    for key in _until("MappingEndEvent", events):
        place = f"line {key.start_mark.line + 1}"
        if type(key).__name__ != "ScalarEvent" or key.anchor or key.tag not in (None, "!"):
            raise ValueError(f"{place}: a key must be a name")
        if key.value in table:
            raise ValueError(f"{place}: {show(key.value)} is there twice")
        table[key.value] = _value(next(events), events, depth + 1)
    return table


def _until(end: str, events: Iterator[Any]) -> Iterator[Any]:
    """The events before the next one of the type `end`."""
    return itertools.takewhile(lambda event: type(event).__name__ != end, events)


def _scalar(text: str) -> Any:
    """The value of a plain scalar."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text):
        return float(re.sub(r"\.(?=[in])", "", text.lower()))  # .inf is inf
    return text
