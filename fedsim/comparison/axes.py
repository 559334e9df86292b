"""Axes of a comparison: the keys that the comparison varies, and their values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fedsim.comparison.rows import canonical
from fedsim.config.experiment import Experiment
from fedsim.config.overrides import (
    Change,
    component_table,
    naming_key,
    parse_value,
    parse_word,
    refuse_repeated,
    split_word,
)
from fedsim.config.tables import component_tables
from fedsim.core.base_table import ComponentTable
from fedsim.core.input_limits import MAX_DEPTH, leaves_of, problem_with_words
from fedsim.core.objects import plain
from fedsim.core.registry import with_key
from fedsim.errors import ExperimentError, cut, show
from fedsim.hints.names import as_range

VARIANT = "variant"  # axis whose values are tables that may change any key of the experiment
LABEL = "label"  # key that names a table on an axis; not a key of the experiment

Axes = dict[str, list[Any]]

OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"


def axes_of_tables(tables: Any, place: str = "comparison") -> Axes:
    """Read a [comparison] table, and return the list of values to compare for each dotted key.

    `place` is the name of the table in error messages.
    """
    if not isinstance(tables, Mapping):
        raise ExperimentError(f"{place} = {show(tables)}: must be a table of lists, such as seed = [0, 1, 2]")
    axes: Axes = {}
    for name, values in leaves_of(tables):
        key = axis_called(name)
        if key in axes:
            raise ExperimentError(f"{place}.{key}: is set twice; remove one of the two")
        axes[key] = _checked(key, values, f"{place}.{key}")
    return axes


def axis_called(key: str) -> str:
    """Return the key of a compared setting without synonyms: "aggregate.rule" for its synonym "aggregate.name".

    >>> from fedsim.comparison.axes import axis_called
    >>> axis_called("aggregate.name"), axis_called("local.lr")
    ('aggregate.rule', 'local.lr')
    """
    return ".".join(naming_key(key.split(".", MAX_DEPTH)))


def split_words(words: Iterable[str]) -> tuple[Axes, list[str]]:
    """Split `key=value` words of a command line into settings with several values (`seed=0,1`) and other words."""
    axes: Axes = {}
    others: list[str] = []
    for word in words:
        keys, text = split_word(word)
        key, pieces = ".".join(naming_key(keys)), split_at_commas(text)
        if numbers := as_range(text):
            raise ExperimentError(f"{show(word)}: {text} is not a number; write {key}={numbers}")
        if len(pieces) == 1:
            others.append(word)
            continue
        if key in axes:
            raise ExperimentError(f"{key}: is set twice; remove one of the two")
        if not all(piece.strip() for piece in pieces):
            raise ExperimentError(f"{show(word)}: a value before or after a comma is missing")
        axes[key] = _checked(key, [parse_value(piece.strip(), key) for piece in pieces], key)
    return axes, others


def apply_words(axes: Axes, words: Iterable[str], changes: Iterable[Change] = ()) -> tuple[Axes, Axes, list[Change]]:
    """Combine `axes` from a [comparison] table with the `key=value` words of a command line, which take precedence.

    Returns (all axes, axes given by the words, settings to change in all runs). The settings to change include
    `changes`.
    """
    word_axes, others = split_words(words)
    of_words = list(map(parse_word, others))
    refuse_repeated([*of_words, *((key.split("."), None) for key in word_axes)])
    in_all = [*of_words, *changes]
    set_in_all = {".".join(naming_key(keys)) for keys, _ in in_all}
    return {key: values for key, values in axes.items() if key not in set_in_all} | word_axes, word_axes, in_all


def split_at_commas(text: str) -> list[str]:
    """Split a text at its commas, except commas inside brackets, braces and quotes."""
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


def split_labels(text: str, values: Iterable[Any]) -> list[str]:
    """Split a text at its commas, except those inside a label of `values`, such as "alie,z=1.5"."""
    names = sorted(map(label, values), key=len, reverse=True)
    name = next((name for name in names if f"{text},".startswith(f"{name},")), text.partition(",")[0])
    return [name, *(split_labels(text[len(name) + 1 :], values) if len(text) > len(name) else [])]


def changes_of(key: str, value: Any) -> list[Change]:
    """Return the changes that set `key` to `value` in an experiment.

    If `value` is a dict, there is one change for each of its keys.
    """
    keys = key.split(".")
    if not isinstance(value, dict):
        return [(keys, value)]
    changes = {name: setting for name, setting in value.items() if name != LABEL}
    if key == VARIANT:
        return [(name.split("."), setting) for name, setting in leaves_of(changes)]
    return [([*keys, name], setting) for name, setting in changes.items()]


def label(value: Any) -> str:
    """Return the short text for a compared value, such as "krum", "0.1", "nnm+median" or "krum,f=4".

    A dict with the key `label` is shown as this label.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "+".join(map(label, value)) or "none"
    if not isinstance(value, dict):
        return str(value)
    if isinstance(value.get(LABEL), str):
        return value[LABEL]
    component_keys = {table.named_by for table in component_tables(Experiment).values()}
    keys = sorted(value, key=lambda key: key not in component_keys)  # the name of the component comes first
    return (
        ",".join(label(value[key]) if key in component_keys else f"{key}={label(value[key])}" for key in keys) or "base"
    )


def describe_point(point: Mapping[str, Any]) -> str:
    """Return a combination of values as on the command line, such as "aggregate.rule=krum seed=0"."""
    return " ".join(f"{key}={label(value)}" for key, value in point.items())


def shape_of(axes: Axes) -> str:
    """Return the number of values of each compared setting, such as "3 aggregate.rule x 2 seed"."""
    return " x ".join(f"{len(values)} {key}" for key, values in axes.items())


def with_points(line: str, points: list[dict[str, Any]], all_points: list[dict[str, Any]]) -> str:
    """Prefix a message with the first combination of values to which it applies, and adapt its advice to the axes.

    Args:
        line: message about one experiment.
        points: combinations to which the message applies. If these are all combinations, there is no prefix.
        all_points: all combinations.
    """
    line = _advice_on_axes(line, points[0], all_points)
    if len(points) == len(all_points):
        return line
    more = f" (and {len(points) - 1} more of {len(all_points)} runs)" if len(points) > 1 else ""
    return f"{cut(describe_point(points[0]))}: {line}{more}"


def _advice_on_axes(line: str, point: Mapping[str, Any], all_points: Iterable[Mapping[str, Any]]) -> str:
    """Return a message whose advice to set a parameter, as in attack.z=1.5, is correct if the components differ.

    Then only a table can set it, as in attack='{name="alie",z=1.5},ipm'.
    """
    for axis in point:
        table, within = component_table(axis.split("."))
        if table is None or within not in ([], [table.named_by]):
            continue
        place = axis.removesuffix(f".{table.named_by}") if within else axis
        advice = re.search(rf"({place}=(\w+) )?{place}\.(\w+)=([^\s,;)]+)", line)
        if advice is None or advice[3] in table.model_fields:
            continue
        name, added = advice[2] or _as_table(point[axis], table).get(table.named_by), parse_value(advice[4], place)
        values = {canonical(each[axis]): each[axis] for each in all_points}.values()
        tables = [_as_table(value, table) for value in values]
        texts = [
            _typed({**each, advice[3]: added} if each.get(table.named_by) == name else value)
            for value, each in zip(values, tables, strict=True)
        ]
        replaced = [axis] * bool(within) + [f"{place}.{advice[3]}"] * bool(advice[1])
        instead = f" instead of {' and '.join(replaced)}" if replaced else ""
        return line.replace(advice[0], f"{place}='{','.join(texts)}'{instead}")
    return line


def _as_table(value: Any, table: type[ComponentTable]) -> dict[str, Any]:
    value = {table.named_by: value} if isinstance(value, str) else value
    return with_key(value, table.named_by, table.place) if isinstance(value, dict) else {}


def _typed(value: Any, *, inside: bool = False) -> str:
    """Return a value as on the command line, such as {name="alie",z=1.5}. `inside`: as in a TOML table."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}={_typed(item, inside=True)}" for key, item in value.items()) + "}"
    return value if isinstance(value, str) and not inside else json.dumps(value)


def readable_id(point: Mapping[str, Any]) -> str:
    """Return a folder name for a combination of values, such as "krum-lr0.1-seed0"."""
    parts = []
    for key, value in point.items():
        name = key.rpartition(".")[2]
        prefix = f"{name}=" if isinstance(value, bool) else name if isinstance(value, (int, float)) else ""
        parts.append(prefix + label(value))
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "_", "-".join(parts)).lstrip("._+=,-") or "run"  # matches ID


def _checked(key: str, values: Any, place: str) -> list[Any]:
    """Return the list of values of a compared setting, or raise ExperimentError if a value is invalid or repeated."""
    if not all(part.strip() for part in key.split(".")):
        raise ExperimentError(f"{place}: has an empty name before or after a dot")
    values = list(values) if isinstance(values, tuple) else values
    if not _is_json(values, exact=True):  # Python objects, passed by a program
        values = plain(values)
    if not isinstance(values, list) or not values:
        raise ExperimentError(f"{place} = {show(values)}: must be a list with at least one value, such as [1, 2]")
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
            raise ExperimentError(f"{where}.{LABEL} = {show(text)}: must be a non-empty string")
        name = (labelled, text if labelled else canonical(value))
        if name in names:
            raise ExperimentError(
                f"{place}: the {'label' if labelled else 'value'} {show(text if labelled else value)} is repeated; "
                "remove one of the two"
            )
        names.add(name)
    return values


def _is_json(value: Any, *, exact: bool = False) -> bool:
    """Whether `value` can be written as JSON. With `exact`, subclasses of str, bool, int and float are refused."""
    if isinstance(value, list):
        return all(_is_json(item, exact=exact) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item, exact=exact) for key, item in value.items())
    return type(value) in (str, bool, int, float) if exact else isinstance(value, (str, bool, int, float))
