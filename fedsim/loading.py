"""From a TOML file and `key=value` words to an Experiment."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.errors import ExperimentError, show
from fedsim.experiment import Experiment, Local, PlugTable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_experiment(
    source: Experiment | Mapping[str, Any] | str | Path | None = None, overrides: Iterable[str] = ()
) -> Experiment:
    """The experiment that `source` describes, with `overrides` such as "local.lr=0.1" applied.

    Args:
        source: an Experiment, nested tables, the path of a TOML file, or None for the default experiment.
        overrides: words `key=value` with dotted keys; values as in TOML, and bare words are strings.

    Raises ExperimentError, one line per problem, each with its place.
    """
    if isinstance(source, (str, Path)):
        description = read_toml(Path(source))
    elif isinstance(source, Experiment):
        description = source.resolved()
    else:
        description = copy.deepcopy(dict(source or {}))
    for word in overrides:
        _override(description, *_parse(word))
    try:
        return Experiment(**description)
    except ExperimentError as error:
        if not isinstance(source, (str, Path)):
            raise
        raise ExperimentError(*(f"{source}: {line}" for line in error.lines)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ExperimentError where it is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExperimentError(f"{path}: no such file; expected an experiment (TOML) or key=value") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExperimentError(f"{path}: cannot be read as TOML: {error}") from None


def to_toml(experiment: Experiment) -> str:
    """The resolved experiment as TOML; reading it again gives an equal experiment."""
    return tomli_w.dumps(experiment.resolved())


def _parse(word: str) -> tuple[list[str], Any]:
    """A word `a.b=value` as its key and value."""
    key, equals, text = word.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ExperimentError(f"{show(word)}: expected key=value, such as rounds=5 or local.lr=0.1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = text
    return parts, value


def _override(description: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set one key of nested tables.

    Naming another plug leaves the parameters of the one named before behind, and `local.steps` takes the place of
    `local.epochs` (and the reverse), because what is on the command line is what is wanted.
    """
    *parents, last = keys
    table = description
    for depth, key in enumerate(parents, start=1):
        plug = _PLUG_TABLES.get(".".join(keys[:depth]))
        if plug and isinstance(table.get(key), str):
            table[key] = {plug.named_by: table[key]}
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ExperimentError(f"{'.'.join(keys)} = {show(value)}: {'.'.join(keys[:depth])} is not a table")
    plug = _PLUG_TABLES.get(".".join(keys))
    if plug and isinstance(value, str) and isinstance(table.get(last), dict):  # partition=iid
        table, last = table[last], plug.named_by
    else:
        plug = _PLUG_TABLES.get(".".join(parents))
    if plug and last == plug.named_by and table.get(last, plug.model_fields[last].default) != value:
        for name in set(table) - set(plug.model_fields):
            del table[name]
    if plug is Local and last in Local.alternatives:
        for name in Local.alternatives:
            table.pop(name, None)
    table[last] = value


_PLUG_TABLES: dict[str, type[PlugTable]] = {
    name: item.annotation
    for name, item in Experiment.model_fields.items()
    if isinstance(item.annotation, type) and issubclass(item.annotation, PlugTable)
}
