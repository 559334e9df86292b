"""Changes to an experiment: `key=value` words, dotted keys, and nested tables."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedsim.config.experiment import Experiment
from fedsim.config.tables import component_tables
from fedsim.core.base_table import ComponentTable
from fedsim.core.input_limits import MAX_BITS, MAX_DEPTH, is_harmless, leaves_of, problem_with_words, refuse_long_chains
from fedsim.core.registry import with_key
from fedsim.errors import MAX_TEXT, ExperimentError, cut, show
from fedsim.hints.meanings import meaning
from fedsim.models.base import dimensions_of
from fedsim.toml import tomllib

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

    Numbers such as `.1` and `1.`, which TOML does not have, and Python's `True` and `False` are values too.

    `place` is the key, for error messages. Raises ExperimentError for a list or table that is not valid TOML.
    """
    if text.strip() in ("nan", "inf"):
        return text.strip()
    if re.fullmatch(r"\s*[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?\s*", text):
        return float(text)
    if text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        refuse_long_chains(text)
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        if text.startswith(("[", "{")):
            values = cut(text.strip("[] "))
            several = (
                f"; to compare several values with fedsim compare: {place}={values}"
                if re.match(r"\[[\w.+, -]+\]$", text)
                else ""
            )
            raise ExperimentError(
                f"{place} = {cut(text)}: is not a valid TOML list or table; put names in double quotes, and in a shell "
                """put the value in single quotes: '["nnm","median"]', '{name="net",dropout=0.1}'"""
                f"{several}"
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
    refuse_repeated(changes)
    keys_set, lines = {key_changed(*change) for change in changes}, list[str]()
    for keys, value in changes:
        parents = keys_set.intersection(".".join(keys[:depth]) for depth in range(1, len(keys)))
        lines += [f"{'.'.join(keys)} = {show(value)}: {parent} is not a table" for parent in sorted(parents)]
    if lines:
        raise ExperimentError(*lines)
    return changes


def refuse_repeated(changes: Iterable[Change]) -> None:
    """Raise ExperimentError if two changes set the same key."""
    if lines := [f"{key}: is set twice; remove one of the two" for key in repeated(changes)]:
        raise ExperimentError(*lines)


def repeated(changes: Iterable[Change]) -> list[str]:
    """Return the keys that are set by several changes."""
    count = Counter(key_changed(*change) for change in changes)
    return [key for key in count if count[key] > 1]


class Removed(NamedTuple):
    """A setting that a change has removed without replacing it.

    Attributes:
        value: the setting's value.
        table: dotted key of the setting's table, such as "server".
        named_by: dotted key that names the table's component, such as "server.name". "" if the table has no component.
        before: name of the component before the change.
    """

    value: Any
    table: str
    named_by: str
    before: Any


class RemovedTogether(NamedTuple):
    """Removed settings of one table, which one warning line lists.

    Attributes:
        table, named_by, before: as in `Removed`, with `before` as text.
        remain: whether the new component also has these settings.
        settings: the settings as text, such as "server.lr = 0.1".
    """

    table: str
    named_by: str
    before: str
    remain: bool
    settings: tuple[str, ...]


def removed_warnings(changed: Iterable[tuple[Mapping[str, Removed], Mapping[str, Any]]]) -> list[str]:
    """Return one line of text for each component whose settings are removed in an experiment.

    Settings whose value is the default of the old or of the new component are not mentioned.

    Args:
        changed: for each experiment, the settings that `override` has removed, by key, and all settings that the
            experiment has after the change, including defaults, as nested tables.
    """
    components = dict[RemovedTogether, list[str]]()  # names of the new components
    for removed, tables in changed:
        now, texts = _settings_in(tables), dict[tuple[str, str, str, bool], list[str]]()
        for key, setting in removed.items():
            if (key not in now or now[key] != setting.value) and not _is_default(key, setting):
                group = setting.table, setting.named_by, show(setting.before), key in now
                texts.setdefault(group, []).append(f"{key} = {show(setting.value)}")
        for group, settings in texts.items():
            together = RemovedTogether(*group, tuple(settings))
            components.setdefault(together, []).append(show(now.get(together.named_by)))
    lines = []
    for together, names in components.items():
        one = len(together.settings) == 1
        do, they, them, were = ("does", "it", "it", "was") if one else ("do", "they", "them", "were")
        line = f"{cut(', '.join(together.settings))}: {do} not apply"
        if new := [name for name in dict.fromkeys(names) if name != together.before]:
            line += f" to {together.named_by} = {', '.join(new)}, because {they} {were} set for {together.before}"
            line += f"; set {them} again" if together.remain else ""
        else:
            line += f", because a new table replaces {together.table}; write {them} into the new table"
        lines.append(line)
    return lines


def _is_default(key: str, setting: Removed) -> bool:
    """Whether a removed setting had its component's default or the value derived from the data."""
    table, within = component_table(key.split("."))
    if table is None or len(within) != 1:
        return False
    with contextlib.suppress(ExperimentError):
        registration = table.registry.get(setting.before)
        field = registration.parameters.model_fields.get(within[0])
        return field is not None and (field.default == setting.value or within[0] in dimensions_of(registration))
    return False


def override(description: dict[str, Any], changes: Iterable[Change]) -> dict[str, Removed]:
    """Apply changes to nested tables in place. Changes of a component's name and parameters may come in any order.

    New values replace contradicting old values: a different component removes the parameters of the previous component,
    and `local.steps` replaces `local.epochs`.

    Returns the settings that are removed without being replaced, by key (see `removed_warnings`).

    Raises ExperimentError if the changes contradict each other, as local.epochs and local.steps do.
    """
    before = _settings_in(description)
    changes = sorted(
        ((naming_key(keys), value) for keys, value in changes), key=lambda change: not _names_component(change[0])
    )
    _refuse_alternatives(changes)
    for keys, value in changes:
        _set(description, keys, value)
    return _removed(before, _settings_in(description))


def _settings_in(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in nested tables by key, such as `partition.name` for `partition = "iid"`."""
    return {key_changed(key.split("."), value): value for key, value in leaves_of(description)}


def _removed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Removed]:
    """Return the settings in `before` that `after` neither has nor replaces."""
    present = after.keys() | {parent for key in after for parent in _parents(key)}
    removed = {}
    for key, value in before.items():
        table, within = component_table(key.split("."))
        place = key.removesuffix(f".{'.'.join(within)}") if table else key.rpartition(".")[0]
        rivals = table.alternatives if table and within[0] in table.alternatives else ()
        replacements = {key, *(f"{place}.{rival}" for rival in rivals)}
        if present.isdisjoint(replacements) and after.keys().isdisjoint(_parents(key)):
            named_by, default = (f"{place}.{table.named_by}", table.default_component()) if table else ("", None)
            removed[key] = Removed(value, place, named_by, before.get(named_by, default))
    return removed


def _parents(key: str) -> set[str]:
    """Return the dotted keys of the tables that contain a key."""
    return {key[:index] for index, letter in enumerate(key) if letter == "."}


def component_table(keys: Sequence[str]) -> tuple[type[ComponentTable] | None, list[str]]:
    """Return the class of the component table that contains a key, and the parts of the key inside this table.

    Returns [] as the parts if the key is the table itself, and (None, []) if no such table contains the key.
    """
    for depth in range(len(keys), 0, -1):
        if table := component_tables(Experiment).get(".".join(keys[:depth])):
            return table, list(keys[depth:])
    return None, []


def naming_key(keys: Sequence[str]) -> list[str]:
    """Return the parts of a key. A final `name` becomes the table's own key for it: aggregate.name, aggregate.rule."""
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
    for place, table in component_tables(Experiment).items():
        if len(keys_set & {f"{place}.{key}" for key in table.alternatives}) > 1:
            raise table.not_both()


def _set(description: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set one key of nested tables in place, and remove the values that contradict it.

    These are the parameters of a component that is replaced, and mutually exclusive keys such as `local.epochs` and
    `local.steps`.
    """
    of_component, within = component_table(keys)
    if of_component and len(within) == 2 and within[1] in ("uniform", "choice"):  # a value such as {uniform = [1, 5]}
        keys, within, value = keys[:-1], within[:1], {within[1]: value}
    if of_component and not within and of_component.is_name(value):
        keys, within = [*keys, of_component.named_by], [of_component.named_by]
    table = description
    for depth, key in enumerate(keys[:-1], start=1):
        holder = component_tables(Experiment).get(".".join(keys[:depth]))
        if holder and holder.is_name(table.get(key)):
            table[key] = {holder.named_by: table[key]}
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            meant = "" if keys[0] in Experiment.model_fields else meaning(".".join(keys), value)
            not_table = f"{'.'.join(keys[:depth])} is not a table, so it cannot contain this key"
            hint = f"unknown key; {meant}" if meant else not_table
            raise ExperimentError(f"{'.'.join(keys)} = {show(value)}: {hint}")
        if holder:
            inner = table[key] = with_key(inner, holder.named_by, ".".join(keys[:depth]))
        table = inner
    key = keys[-1]
    if of_component and len(within) == 1:
        if key == of_component.named_by and value != table.get(key, of_component.default_component()):
            for parameter in set(table) - set(of_component.model_fields):
                del table[parameter]
        if key in of_component.alternatives:
            for alternative in of_component.alternatives:
                table.pop(alternative, None)
    table[key] = value
