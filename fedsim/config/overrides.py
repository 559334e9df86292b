"""Changes to an experiment: `key=value` words, dotted keys, and nested tables."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsim.config.source_catalog import SourceTable, component_tables
from fedsim.core.input_limits import MAX_BITS, MAX_DEPTH, is_harmless, leaves_of, problem_with_words, refuse_long_chains
from fedsim.core.suggestions import both_given_error, with_key
from fedsim.errors import MAX_TEXT, ExperimentError, cut, show

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_ENGINE = "auto"

Change = tuple[list[str], Any]  # parts of a dotted key, and the new value


def parse_word(word: str) -> Change:
    """Return the parts of the key and the parsed value of an override `a.b=value`, such as "local.lr=0.1"."""
    keys, text = split_word(word)
    return keys, parse_value(text, ".".join(keys))


def split_word(word: str) -> tuple[list[str], str]:
    """Return the parts of the key and the text of the value of an override `a.b=value`."""
    key, equals, text = word.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise ExperimentError(f"{show(word)}: expected key=value, such as rounds=5 or local.lr=0.1")
    if len(keys) > MAX_DEPTH or len(key) > MAX_TEXT or not is_harmless(word):
        raise ExperimentError(
            f"{show(word)}: keys must have at most {MAX_DEPTH} parts and {MAX_TEXT} characters, and all "
            "characters must be printable"
        )
    return keys, text


def parse_value(text: str, place: str) -> Any:
    """Return the TOML value of a text, or the text itself if it is not TOML, or is the name of an attack (nan, inf).

    `place` is the key, for error messages. Raises ExperimentError for a list or table that is not valid TOML.
    """
    if text.strip() in ("nan", "inf"):
        return text.strip()
    try:
        refuse_long_chains(text)
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        if text.startswith(("[", "{")):
            raise ExperimentError(
                f"{place} = {cut(text)}: is not a valid TOML list or table; put names in double quotes, and in a shell "
                """put the whole word in single quotes: '["nnm","median"]', '{name="net",dropout=0.1}'"""
            ) from None
        value = text
    except (ValueError, RecursionError):
        raise ExperimentError(
            f"{place} = {show(text)}: must not contain numbers of more than {MAX_BITS} bits or lists nested more than "
            f"{MAX_DEPTH} levels deep"
        ) from None
    if problem := problem_with_words(value, place):
        raise ExperimentError(problem)
    return value


def changes_in(tables: Mapping[str, Any]) -> list[Change]:
    """Return the changes in nested or dotted tables: {"local": {"lr": 0.1}} and {"local.lr": 0.1} are equivalent.

    Raises ExperimentError if two changes set the same key.
    """
    changes = [(key.split("."), value) for key, value in leaves_of(tables)]
    count = Counter(key_changed(*change) for change in changes)
    lines = [f"{key}: is set twice; remove one of the two" for key in count if count[key] > 1]
    for keys, value in changes:
        parents = (".".join(keys[:depth]) for depth in range(1, len(keys)))
        lines += [f"{'.'.join(keys)} = {show(value)}: {parent} is not a table" for parent in parents if parent in count]
    if lines:
        raise ExperimentError(*lines)
    return changes


def override(description: dict[str, Any], changes: Iterable[Change]) -> None:
    """Apply changes to nested tables in place. A component's name and its parameters may come in any order.

    New values replace contradicting old values: a different component removes the parameters of the previous component,
    and `local.steps` replaces `local.epochs`.

    Raises ExperimentError if the changes contradict each other, as local.epochs and local.steps do.
    """
    changes = sorted(
        ((naming_key(keys), value) for keys, value in changes), key=lambda change: not _names_component(change[0])
    )
    _refuse_alternatives(changes)
    for keys, value in changes:
        _set(description, keys, value)


def component_table(keys: Sequence[str]) -> tuple[SourceTable | None, list[str]]:
    """Return the table of a component that contains a key, and the parts of the key inside this table.

    Returns [] as the parts if the key is the table itself, and (None, []) if no such table contains the key.
    """
    for depth in range(len(keys), 0, -1):
        if table := component_tables().get(".".join(keys[:depth])):
            return table, list(keys[depth:])
    return None, []


def naming_key(keys: Sequence[str]) -> list[str]:
    """Return the parts of a key, where a final `name` is replaced: aggregate.name becomes aggregate.rule."""
    table, within = component_table(keys)
    return [*keys[:-1], table.named_by] if table and within == ["name"] else list(keys)


def key_changed(keys: Sequence[str], value: Any) -> str:
    """Return the dotted key that a change sets, such as `partition.name` for `partition=iid`."""
    keys = naming_key(keys)
    table, within = component_table(keys)
    if table and not within and not isinstance(value, dict):
        keys = [*keys, table.named_by]
    return ".".join(keys)


def _names_component(keys: list[str]) -> bool:
    table, within = component_table(keys)
    return table is not None and within in ([], [table.named_by])


def _refuse_alternatives(changes: Iterable[Change]) -> None:
    keys_set = {".".join(keys[:depth]) for keys, _ in changes for depth in (2, len(keys))}
    tables = ((keys[0], value) for keys, value in changes if len(keys) == 1 and isinstance(value, dict))
    keys_set |= {f"{table}.{key}" for table, value in tables for key in value}
    for place, table in component_tables().items():
        if len(keys_set & {f"{place}.{key}" for key in table.alternatives}) > 1:
            raise ExperimentError(both_given_error(place, table.alternatives))


def _set(description: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set one key of nested tables in place, and remove the values that contradict it.

    These are the parameters of a component that is replaced, and mutually exclusive keys such as `local.epochs` and
    `local.steps`.
    """
    of_component, within = component_table(keys)
    if (
        of_component and len(within) == 2 and within[0] in of_component.alternatives
    ):  # a value such as {uniform = [1, 5]}
        keys, within, value = keys[:-1], within[:1], {within[1]: value}
    if of_component and not within and of_component.is_name(value):
        keys, within = [*keys, of_component.named_by], [of_component.named_by]
    table = description
    for depth, key in enumerate(keys[:-1], start=1):
        holder = component_tables().get(".".join(keys[:depth]))
        if holder and holder.is_name(table.get(key)):
            table[key] = {holder.named_by: table[key]}
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ExperimentError(
                f"{'.'.join(keys)} = {show(value)}: {'.'.join(keys[:depth])} is not a table, so it cannot contain "
                "this key"
            )
        if holder:
            inner = table[key] = with_key(inner, holder.named_by, ".".join(keys[:depth]))
        table = inner
    key = keys[-1]
    if of_component and len(within) == 1:
        if key == of_component.named_by and value != table.get(key, of_component.default):
            for parameter in set(table) - set(of_component.keys):
                del table[parameter]
        if key in of_component.alternatives:
            for alternative in of_component.alternatives:
                table.pop(alternative, None)
    table[key] = value
