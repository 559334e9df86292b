"""What a shell offers when a user presses TAB: experiments, files, keys, values and plugs.

typer makes the shells' part (`fedsim --install-completion`) and calls these functions. Keys and plugs are read from
fedsim's source, since the import of PyTorch takes seconds.
"""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterable, Iterator

import typer

from fedsim.config.catalog import experiments
from fedsim.config.plugs import PLUGS
from fedsim.config.source_catalog import SourceTable, experiment_table, source_plugs

EXPERIMENT_FILES = (".toml", ".yaml", ".yml")


def complete_words(context: typer.Context, incomplete: str) -> list[str]:
    """The experiments, files and `key=value` words that begin so.

    Shells differ in what is one word: bash gives `key`, `=` and `value`, others `key=value`.
    """
    before = [str(word) for word in context.params.get("words") or []]
    if before[-1:] == ["="]:
        return _values(before[-2], incomplete)
    if before and before[-1] in known_values():  # a key without a value: bash has dropped an = at the end
        return _values(before[-1], incomplete)
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={word}" for word in _values(key, value)]
    named = [] if before else _starting_with(incomplete, experiments())
    return [*named, *_files(incomplete), *_keys(incomplete)]


def complete_plugs(incomplete: str) -> list[str]:
    """The kinds and plugs that begin so, for `fedsim list`."""
    plugs = (name for kind in PLUGS for name in source_plugs(kind))
    return _starting_with(incomplete, dict.fromkeys([*PLUGS, "experiments", "keys", *plugs]))


@functools.cache
def known_values() -> dict[str, list[str]]:
    """The values that are offered for each key of an experiment, parameters of plugs included."""

    def inner(table: SourceTable, place: str) -> Iterator[tuple[str, list[str]]]:
        prefix = f"{place}." if place else ""
        for key in table.keys:
            if key in table.tables:
                yield from inner(table.tables[key], f"{prefix}{key}")
            else:
                yield f"{prefix}{key}", table.values[key]
        if table.kind:
            plugs = source_plugs(table.kind)
            yield from ((key, list(plugs)) for key in (f"{prefix}{table.named_by}", place))
            parameters = {name for plug in plugs.values() for name in plug.parameter_names if name not in table.keys}
            yield from ((f"{prefix}{name}", []) for name in sorted(parameters))

    return dict(inner(experiment_table(), "")) | {"engine": list(source_plugs("engines"))}


def _keys(incomplete: str) -> list[str]:
    """The keys that begin so, up to the next dot; a single key with its values.

    A shell adds a space after a word that is the only one, so a word that ends with . or = is never the only one.
    """
    ends = {key: key.find(".", len(incomplete)) + 1 for key in _starting_with(incomplete, known_values())}
    words = list(dict.fromkeys(key[:end] if end else f"{key}=" for key, end in ends.items()))
    if len(words) != 1:
        return words
    (word,) = words
    return _keys(word) if word.endswith(".") else [word, *(f"{word}{value}" for value in _values(word[:-1], ""))]


def _values(key: str, incomplete: str) -> list[str]:
    """The values of a key that begin so; of several values with commas, as `fedsim compare` takes them, the last."""
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{value}" for value in _starting_with(last, known_values().get(key, ()))]


def _files(incomplete: str) -> list[str]:
    """The files of experiments, and folders, whose path begins so."""
    paths = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    folders = [f"{path}/" for path in paths if incomplete and os.path.isdir(path)]
    return folders + [path for path in paths if path.endswith(EXPERIMENT_FILES)]


def _starting_with(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
