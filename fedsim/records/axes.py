"""The axes of a comparison: the keys that it varies, and their values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.config.overrides import Change, naming_key, parse_value, parse_word, split_word
from fedsim.config.source_catalog import component_tables
from fedsim.core.input_limits import MAX_DEPTH, leaves_of, problem_with_words
from fedsim.core.suggestions import as_range
from fedsim.errors import ExperimentError, cut, show
from fedsim.records.rows import canonical

VARIANT = "variant"  # the axis whose values are tables of the whole experiment
LABEL = "label"  # the name of a table on an axis; it is not a key of the experiment

Axes = dict[str, list[Any]]

OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"


def axes_of_tables(tables: Any, place: str = "comparison") -> Axes:
    """Return the axes in a [comparison] table, which has dotted keys or nested tables of lists of values."""
    if not isinstance(tables, Mapping):
        raise ExperimentError(f"{place} = {show(tables)}: must be a table of lists, such as seed = [0, 1, 2]")
    axes: Axes = {}
    for name, values in leaves_of(tables):
        key = axis_called(name)
        if key in axes:
            raise ExperimentError(f"{place}.{key}: is given twice")
        axes[key] = _checked(key, values, f"{place}.{key}")
    return axes


def axis_called(key: str) -> str:
    """Return the axis that a key names.

    >>> from fedsim.records.axes import axis_called
    >>> axis_called("server.name"), axis_called("local.lr")
    ('server.name', 'local.lr')
    """
    return ".".join(naming_key(key.split(".", MAX_DEPTH)))


def split_words(words: Iterable[str]) -> tuple[Axes, list[str]]:
    """Split `key=value` words into axes, which have a comma outside brackets and quotes, and the other words.

    If two words have the same key, the later one counts.
    """
    axes: Axes = {}
    others: dict[str, str] = {}
    for word in words:
        keys, text = split_word(word)
        key, pieces = ".".join(naming_key(keys)), split_at_commas(text)
        axes.pop(key, None)
        others.pop(key, None)
        if numbers := as_range(text):
            raise ExperimentError(f"{show(word)}: {text} is not a number; write {key}={numbers}")
        if len(pieces) == 1:
            others[key] = word
            continue
        if not all(piece.strip() for piece in pieces):
            raise ExperimentError(f"{show(word)}: a value is missing beside a comma")
        axes[key] = _checked(key, [parse_value(piece.strip(), key) for piece in pieces], key)
    return axes, list(others.values())


def apply_words(axes: Axes, words: Iterable[str], changes: Iterable[Change] = ()) -> tuple[Axes, Axes, list[Change]]:
    """Apply the words of a command line, and further changes of all runs, to the axes in a [comparison] table.

    Returns all axes, those of the words, and the changes of all runs; these replace an axis in the table.
    """
    word_axes, others = split_words(words)
    in_all = [*map(parse_word, others), *changes]
    set_in_all = {".".join(naming_key(keys)) for keys, _ in in_all}
    return {key: values for key, values in axes.items() if key not in set_in_all} | word_axes, word_axes, in_all


def split_at_commas(text: str) -> list[str]:
    """Split a text at its commas, except those inside brackets, braces and quotes."""
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
    """Return the changes of an experiment that a value on an axis makes.

    A table changes each of its keys; a variant changes keys of several tables.
    """
    keys = key.split(".")
    if not isinstance(value, dict):
        return [(keys, value)]
    changes = {name: each for name, each in value.items() if name != LABEL}
    if key == VARIANT:
        return [(name.split("."), each) for name, each in leaves_of(changes)]
    return [([*keys, name], each) for name, each in changes.items()]


def label(value: Any) -> str:
    """Return the short name of a value, or its own `label`: krum, 0.1, nnm+median, krum,f=4."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(map(label, value)) or "none"
    if not isinstance(value, dict):
        return str(value)
    if isinstance(value.get(LABEL), str):
        return value[LABEL]
    component_keys = {table.named_by for table in component_tables().values()}
    keys = sorted(value, key=lambda key: key not in component_keys)  # the component's name first
    return (
        ",".join(label(value[key]) if key in component_keys else f"{key}={label(value[key])}" for key in keys) or "base"
    )


def describe_point(point: Mapping[str, Any]) -> str:
    """Return a point as on the command line: aggregate.rule=krum seed=0."""
    return " ".join(f"{key}={label(value)}" for key, value in point.items())


def shape_of(axes: Axes) -> str:
    """Return the number of values on each axis: `3 aggregate.rule x 2 seed`."""
    return " x ".join(f"{len(values)} {key}" for key, values in axes.items())


def with_points(line: str, points: list[dict[str, Any]], total: int) -> str:
    """Return an error line preceded by the first combination that causes it, or the line alone if all cause it."""
    if len(points) == total:
        return line
    more = f" (and {len(points) - 1} more of {total} runs)" if len(points) > 1 else ""
    return f"{cut(describe_point(points[0]))}: {line}{more}"


def readable_id(point: Mapping[str, Any]) -> str:
    """Return a folder name for a point: krum-lr0.1-seed0."""
    parts = []
    for key, value in point.items():
        name = key.rpartition(".")[2]
        prefix = f"{name}=" if isinstance(value, bool) else name if isinstance(value, (int, float)) else ""
        parts.append(prefix + label(value))
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "_", "-".join(parts)).lstrip("._+=,-") or "run"  # matches ID


def _checked(key: str, values: Any, place: str) -> list[Any]:
    """Return the values of an axis as JSON values. Raises ExperimentError for other and for repeated values."""
    if not all(part.strip() for part in key.split(".")):
        raise ExperimentError(f"{place}: is not a key of an experiment")
    values = list(values) if isinstance(values, tuple) else values
    if not _is_json(values, exact=True):  # of a Python program
        from fedsim.core.objects import plain  # here, since it imports PyTorch

        values = plain(values)
    if not isinstance(values, list) or not values:
        raise ExperimentError(f"{place} = {show(values)}: must be a list of one or more values, such as [1, 2]")
    if problem := problem_with_words(values, place):
        raise ExperimentError(problem)
    names = set()
    for index, value in enumerate(values):
        where = f"{place}[{index}]"
        if not _is_json(value):
            raise ExperimentError(f"{where} = {show(value)}: must be a string, a number, a list or a table")
        labelled = isinstance(value, dict) and LABEL in value
        if key == VARIANT and not labelled:
            raise ExperimentError(
                f'{where} = {show(value)}: must be a table with a label, such as {{label = "b", local = {{steps = 5}}}}'
            )
        text = value[LABEL] if labelled else None
        if labelled and not (isinstance(text, str) and text.strip()):
            raise ExperimentError(f"{where}.{LABEL} = {show(text)}: must be a string that is not empty")
        name = (labelled, text if labelled else canonical(value))
        if name in names:
            raise ExperimentError(f"{place}: {f'the label {show(text)}' if labelled else show(value)} is repeated")
        names.add(name)
    return values


def _is_json(value: Any, *, exact: bool = False) -> bool:
    """Whether a value is JSON without null; with `exact`, of Python's own types and not of subclasses."""
    if isinstance(value, list):
        return all(_is_json(each, exact=exact) for each in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each, exact=exact) for key, each in value.items())
    return type(value) in (str, bool, int, float) if exact else isinstance(value, (str, bool, int, float))
