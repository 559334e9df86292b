"""Axes: which keys a comparison varies, and over which values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.errors import ExperimentError, show
from fedsim.loading import PLUG_TABLES, Change, parse_value, split_word
from fedsim.objects import plain
from fedsim.tables import leaves_of

SEED = "seed"  # the axis over whose values results are averaged
VARIANT = "variant"  # the axis whose values are tables of the whole experiment
LABEL = "label"  # the key of a table on an axis that says how it is called, and changes nothing

Axes = dict[str, list[Any]]

IS_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*\Z")  # a name for a folder that cannot lead out of its parent
OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"


def axes_of_tables(tables: Any, place: str = "grid") -> Axes:
    """The axes that a [grid] table describes: dotted keys, or nested tables, down to lists of values."""
    if not isinstance(tables, Mapping):
        raise ExperimentError(f"{place} = {show(tables)}: must be a table of lists, such as seed = [0, 1, 2]")
    axes: Axes = {}
    for key, values in leaves_of(tables):
        if key in axes:
            raise ExperimentError(f"{place}.{key}: is there twice")
        axes[key] = _checked(key, values, f"{place}.{key}")
    return axes


def split_words(words: Iterable[str]) -> tuple[Axes, list[str]]:
    """The axes among `key=value` words, which have a comma outside brackets and quotes, and the other words.

    Of two words with one key the later counts.
    """
    axes: Axes = {}
    others: dict[str, str] = {}
    for word in words:
        keys, text = split_word(word)
        key, pieces = ".".join(keys), split_at_commas(text)
        axes.pop(key, None)
        others.pop(key, None)
        if len(pieces) == 1:
            others[key] = word
            continue
        if not all(piece.strip() for piece in pieces):
            raise ExperimentError(f"{show(word)}: a value is missing before, between or behind its commas")
        axes[key] = _checked(key, [parse_value(piece.strip(), key) for piece in pieces], key)
    return axes, list(others.values())


def split_at_commas(text: str) -> list[str]:
    """The pieces of a text between its commas, without those inside brackets, braces and quotes."""
    pieces, start, depth, quote = [], 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            pieces.append(text[start:place])
            start = place + 1
    return [*pieces, text[start:]]


def changes_of(key: str, value: Any) -> list[Change]:
    """What a value on an axis changes of an experiment: one key or, where the value is a table, that table's keys.

    A variant changes keys of several tables: those in its tables, down to what is no table.
    """
    keys = key.split(".")
    if not isinstance(value, dict):
        return [(keys, value)]
    changes = {name: each for name, each in value.items() if name != LABEL}
    if key == VARIANT:
        return [(name.split("."), each) for name, each in leaves_of(changes)]
    return [([*keys, name], each) for name, each in changes.items()]


def canonical(value: Any) -> str:
    """A text that is the same for equal values of an axis (or equal points) alone: 1, 1.0 and true are three."""
    return json.dumps(value, sort_keys=True)


def label(value: Any) -> str:
    """A value of an axis in few characters, or as its own `label` says: krum, 0.1, nnm+median, krum,f=4."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(map(label, value)) or "none"
    if isinstance(value, dict) and isinstance(value.get(LABEL), str):
        return value[LABEL]
    if isinstance(value, dict):
        names = {table.named_by for table in PLUG_TABLES.values()}
        first = sorted(value, key=lambda key: key not in names)
        return ",".join(label(value[key]) if key in names else f"{key}={label(value[key])}" for key in first) or "base"
    return str(value)


def describe_point(point: Mapping[str, Any]) -> str:
    """A point of the grid as one would type it: aggregate.rule=krum seed=0."""
    return " ".join(f"{key}={label(value)}" for key, value in point.items())


def readable_id(point: Mapping[str, Any]) -> str:
    """A point as a name for a folder: krum-lr0.1-seed0."""
    parts = []
    for key, value in point.items():
        name = key.rpartition(".")[2]
        if isinstance(value, bool):
            parts.append(f"{name}={label(value)}")
        else:
            parts.append(f"{name}{label(value)}" if isinstance(value, (int, float)) else label(value))
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "_", "-".join(parts)).lstrip("._+=,-") or "run"  # as IS_ID wants it


def _checked(key: str, values: Any, place: str) -> list[Any]:
    if not all(part.strip() for part in key.split(".")):
        raise ExperimentError(f"{place}: is no key of an experiment")
    values = plain(list(values) if isinstance(values, tuple) else values)
    if not isinstance(values, list) or not values:
        raise ExperimentError(f"{place} = {show(values)}: must be a list of one or more values, such as [1, 2]")
    for index, value in enumerate(values):
        _check_value(value, f"{place}[{index}]")
    seen: set[str] = set()
    for value in values:
        if canonical(value) in seen:
            raise ExperimentError(f"{place}: {show(value)} is there twice")
        seen.add(canonical(value))
    _check_labels(key, values, place)
    return values


def _check_labels(key: str, values: list[Any], place: str) -> None:
    """Variants are tables, all of which have a label; no two tables of an axis have the same."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        where = f"{place}[{index}]"
        if key == VARIANT and not (isinstance(value, dict) and LABEL in value):
            raise ExperimentError(
                f'{where} = {show(value)}: must be a table with a label, such as {{label = "b", local = {{steps = 5}}}}'
            )
        if not isinstance(value, dict) or LABEL not in value:
            continue
        name = value[LABEL]
        if not isinstance(name, str) or not name.strip():
            raise ExperimentError(f"{where}.{LABEL} = {show(name)}: must be a word or a few")
        if name in seen:
            raise ExperimentError(f"{place}: the label {show(name)} is there twice")
        seen.add(name)


def _check_value(value: Any, place: str) -> None:
    """Refuse what JSON cannot hold."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_value(each, place)
    elif not isinstance(value, (str, bool, int, float)):
        raise ExperimentError(f"{place} = {show(value)}: must be a string, a number, a list or a table")
