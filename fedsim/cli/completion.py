"""What a shell offers when a user presses TAB: experiments, files, keys, values and plugs.

typer makes the shells' part (`fedsim --install-completion`) and calls these functions. They must not import PyTorch,
which takes a second. So keys and plugs are collected once and kept in a file in the user's cache folder, together with
a fingerprint of fedsim's source: after any change of that they are collected again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from fedsim.config.catalog import experiments
from fedsim.config.plugs import PLUGS

PACKAGE = Path(__file__).parent.parent
MOST_CHARACTERS = 70  # of a description: typer would wrap a longer one, and shells take each line as a word
EXPERIMENT_FILES = (".toml", ".yaml", ".yml")

Completions = list[tuple[str, str]]  # each with a description


def complete_words(context: typer.Context, incomplete: str) -> Completions:
    """The experiments, files and `key=value` words that begin so.

    Shells differ in what is one word: bash gives `key`, `=` and `value`, others `key=value`.
    """
    before = [str(word) for word in context.params.get("words") or []]
    known = vocabulary()
    if before[-1:] == ["="]:
        return _values(known, before[-2], incomplete)
    if before and before[-1] in known["keys"]:  # a key without a value: bash has dropped an = at the end
        return _values(known, before[-1], incomplete)
    key, equals, value = incomplete.partition("=")
    if equals:
        return [(f"{key}={word}", text) for word, text in _values(known, key, value)]
    named = [] if before else [(name, "experiment") for name in experiments()]
    return _starting_with(incomplete, [*named, *_files(incomplete)]) + _keys(known, incomplete)


def complete_plugs(incomplete: str) -> Completions:
    """The kinds and plugs that begin so, for `fedsim list`."""
    kinds = [(kind, f"all {kind}") for kind in (*PLUGS, "experiments", "keys")]
    return _starting_with(incomplete, [*kinds, *vocabulary()["plugs"].items()])


def _keys(known: dict[str, Any], incomplete: str) -> Completions:
    """The keys that begin so, up to the next dot; a single key with its values.

    A shell adds a space after a word that is the only one, so a word that ends with . or = is never the only one.
    """
    found = dict[str, str]()
    for key, text in _starting_with(incomplete, known["keys"].items()):
        dot = key.find(".", len(incomplete)) + 1
        found[key[:dot] if dot else f"{key}="] = "a table of keys" if dot else text
    if len(found) != 1:
        return list(found.items())
    word = next(iter(found))
    if word.endswith("."):
        return _keys(known, word)
    return [(word, found[word])] + [(f"{word}{value}", text) for value, text in _values(known, word[:-1], "")]


def _values(known: dict[str, Any], key: str, incomplete: str) -> Completions:
    """The values of a key that begin so; of several values with commas, as `fedsim compare` takes them, the last."""
    done, comma, last = incomplete.rpartition(",")
    return [
        (f"{done}{comma}{value}", text) for value, text in _starting_with(last, known["values"].get(key, {}).items())
    ]


def _files(incomplete: str) -> Completions:
    """The files of experiments, and folders, whose path begins so."""
    paths = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    folders = [(f"{path}/", "folder") for path in paths if incomplete and os.path.isdir(path)]
    return folders + [(path, "file") for path in paths if path.endswith(EXPERIMENT_FILES)]


def _starting_with(incomplete: str, words: Iterable[tuple[str, str]]) -> Completions:
    return [(word, text) for word, text in words if word.startswith(incomplete)]


def vocabulary() -> dict[str, Any]:
    """All keys with descriptions, values by key, and plugs with summaries; empty if fedsim cannot be imported."""
    path, fingerprint = _cache(), _fingerprint()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one
        kept = json.loads(path.read_text())
        if kept["fingerprint"] == fingerprint:
            return kept
    try:
        found = {"fingerprint": fingerprint, **collect()}
    except (ImportError, OSError):  # a line about it would stand amid what the user types
        return {"keys": {}, "values": {}, "plugs": {}}
    with contextlib.suppress(OSError):
        _write(path, json.dumps(found))
    return found


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "fedsim" / "completion.json"


def _write(path: Path, text: str) -> None:
    """Write a file as a whole, since other shells may read it now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _fingerprint() -> str:
    """A hash of the paths, sizes and times of fedsim's source files."""
    files = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(PACKAGE.rglob("*.py"))]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def collect() -> dict[str, dict[str, Any]]:
    """What `vocabulary` returns, from the code; imports PyTorch."""
    from fedsim.config.keys import key_tables
    from fedsim.config.plugs import registry_of

    plugs = {kind: {plug.name: _description(plug.summary) for plug in registry_of(kind)} for kind in PLUGS}
    keys, values = dict[str, str](), dict[str, dict[str, str]]()
    for table in key_tables():
        if "[]" in table.path:
            continue
        for key in table.keys:
            keys[key.path] = _description(key.description)
            values[key.path] = dict(_values_of_type(key.type, key.default))
        if table.plugs:
            names = PLUGS[table.plugs][0].split(", ")
            named_by = next(name for name in names if name.startswith(f"{table.path}."))
            keys[table.path] = f"the same as {named_by}"
            values[table.path] = values[named_by] = plugs[table.plugs]
            for plug in registry_of(table.plugs):
                for parameter in plug.parameters.model_fields:
                    keys.setdefault(f"{table.path}.{parameter}", f"parameter of {plug.name}")
    values["engine"] = plugs["engines"]
    return {
        "keys": keys,
        "values": values,
        "plugs": {name: text for each in plugs.values() for name, text in each.items()},
    }


def _description(text: str) -> str:
    """The beginning of a text, on one line; typer takes [x] as markup."""
    return textwrap.shorten(text, MOST_CHARACTERS, placeholder=" ...").replace("[", r"\[")


def _values_of_type(type: str, default: str) -> Iterator[tuple[str, str]]:
    """The values that a type in words allows if they are few, else the default."""
    yield from ((value, "") for value in re.findall(r'`"(.+?)"`', type))
    if type.startswith("true or false"):
        yield from (("true", ""), ("false", ""))
    elif "`" not in type and default not in ("unset", '""', "[]", "{}"):
        yield default.strip('"'), "default"
