"""Hints for unknown keys and names: what fedsim calls them, the most similar valid name, or all allowed names."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from fedsim.errors import MAX_NAME, ExperimentError, cut, show
from fedsim.synonyms import synonyms

MOST_IN_RANGE = 100  # maximum length of a range that a hint writes out, such as 0..99
SHORT = 4  # characters; shorter names are not completed
CUTOFF = 0.75  # difflib ratio from which a name with the right first letter counts as a misspelling
CERTAIN = 0.9  # the same for a phrase of another library

NOTE = re.compile(r"<[\w, ]+>")  # name of an object without an import path
ALTERNATIVES = re.compile(r"write ([\w.]+=\w+( or [\w.]+=\w+)*)")  # settings without further words
SETTING = re.compile(r"[\w.]+=|--|fedsim ")  # start of an answer that is to be written as it stands


@dataclass
class Vocabulary:
    """What names mean in an experiment, for hints.

    Attributes:
        keys_called: function from a name to the dotted keys that are this name or end with it.
        settings_of: function from the name of a component to settings that select it, such as `server=adam`.
        owners_of: function from the name of a parameter to a text about the components that have it, or "".
        component_keys: keys whose values are names of components.
    """

    keys_called: Callable[[str], list[str]] = lambda name: []
    settings_of: Callable[[str], list[str]] = lambda name: []
    owners_of: Callable[[str], str] = lambda name: ""
    component_keys: frozenset[str] = frozenset()


VOCABULARY = Vocabulary()


def nearest(name: str, allowed: Iterable[str], table: str | None = None) -> str:
    """Return a hint for an unknown name: `did you mean "x"?`, or the list of allowed names.

    Args:
        name: the unknown name.
        allowed: allowed names.
        table: table whose component should have this name, such as `partition`. Then the hint may be what fedsim calls
            a component of another library, or a setting with a component of another kind. None for other names.
    """
    allowed = list(allowed)
    if "+" in name:  # as figures and tables show a chain
        return f"write {cut(as_list(name.replace('+', ',')))} (in single quotes in a shell)"
    if "," in name:
        return f"for several values use fedsim compare; for a list write {cut(as_list(name))}"
    names = [known for known in synonyms("names").get(normalized(name), "").split() if known in allowed]
    if table is not None and not (names := named(name, allowed)):
        texts = [text for text in (answer(f"{table}_{name}"), _of_component(name), answer(name)) if "VALUE" not in text]
        values = (value for text in texts if ALTERNATIVES.fullmatch(text) for value in re.findall(r"=(\w+)", text))
        names = [value for value in values if value in allowed]
        if not names and (hint := next(filter(None, texts), "")):
            return hint
    return did_you_mean(names or closest(name, allowed)) or f"allowed: {', '.join(allowed) or 'none'}"


def nearest_key(name: str, allowed: Iterable[str], place: str | None = None, value: Any = None) -> str:
    """Return the hint for an unknown key.

    Args:
        name: unknown key.
        allowed: keys of the table.
        place: table that contains the key, such as `local`. "" for top-level keys. None for keys outside experiments.
        value: value of the key, which the hint repeats.
    """
    allowed, form = list(dict.fromkeys(allowed)), normalized(name)
    is_spelled = any(squeezed(each) == squeezed(name) for each in allowed)
    if place is None or "," in name or len(name) > MAX_NAME or is_spelled:
        return nearest(name, allowed)
    if place and VOCABULARY.keys_called(form) == [form]:
        return f"{form} is a top-level key; in a file write it above the first [table]"
    hint = meaning(f"{place}.{name}" if place else name, value) or did_you_mean(closest(name, allowed))
    misspelled = difflib.get_close_matches(form, synonyms("answers"), 1, CERTAIN)
    hint = hint or (answer(misspelled[0], value) if misspelled and not place else "")
    return hint or f"allowed: {', '.join(allowed) or 'none'}"


def meaning(name: str, value: Any = None) -> str:
    """Return the hint for a dotted name that is not a key at its place, or "" if nothing is known about it."""
    place, _, last = normalized(name).rpartition(".")
    if isinstance(value, Mapping):
        inner = (meaning(name if key == "name" else f"{name}.{key}", item) for key, item in value.items())
        return "; ".join(filter(None, dict.fromkeys(inner)))
    hint, component = answer(name, value) or answer(last, value), _of_component(last)
    if hint and not ("VALUE" in hint and component):
        return hint
    keys = [] if place and "_" not in last else VOCABULARY.keys_called(last)  # short names differ between tables
    word = str(value).lower() if isinstance(value, bool) else _as_word(value)
    settings = " or ".join(f"{key}={word}" for key in keys)
    return f"write {settings}" if settings else component or ("" if place else VOCABULARY.owners_of(last))


def answer(name: str, value: Any = None) -> str:
    """Return what to write instead of a key or name of another library, or "" if the name is unknown."""
    kinds = {float: "fraction", int: "integer", list: "list", str: value}  # phrases may end with the kind of the value
    text = (
        _answers().get(words_of(f"{name}_{kinds.get(type(value))}")) if "." in name or value not in (0.0, 1.0) else None
    )
    text = text or _answers().get(words_of(name)) or _answers().get(frozenset([squeezed(name)]), "")
    if isinstance(value, str) and (keys := re.findall(r"([\w.]+)=", text)):
        other, names = answer(value) or _of_component(value), VOCABULARY.component_keys.intersection(keys)
        if settings := [each for each in VOCABULARY.settings_of(value) if each.partition("=")[0] in keys]:
            text = " or ".join(settings)
        elif value.lower() in ("none", "null", "off"):
            return "omit it"
        elif "VALUE" not in other and (("{}" in text and names) or any(f"{key}=" in other for key in keys)):
            text = other.removeprefix("write ") or text
        value = "NAME" if len(names) > 1 or (names and value.isidentifier()) else value
    text = text.replace("{}", _as_word(value))
    return f"write {text}" if SETTING.match(text) else text


@functools.cache
def _answers() -> dict[frozenset[str], str]:
    return {words_of(phrase): text for phrase, text in synonyms("answers").items()}


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name, without those that do not matter, and in a form that is equal for synonyms.

    >>> words_of("num_clients") == words_of("numberOfWorkers") == words_of("node-count")
    True
    """
    same = synonyms("same")
    if name.lower() not in synonyms("answers"):  # FedAvg is one word
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    text = "_".join(re.split(r"[\s._-]+", name.lower())).strip("_")
    for pair in (each for each in same if "_" in each):
        text = text.replace(pair, same[pair])
    words = [
        word[:-1] if len(word) >= SHORT and re.search("(?<!ou)(?<!tu)(?<!s)s$", word) else word
        for word in text.split("_")
    ]
    return frozenset(filter(None, (same.get(word, word) for word in words))) or frozenset(words)


def _of_component(name: str) -> str:
    settings = VOCABULARY.settings_of(name)
    return f"write {' or '.join(settings)}" if settings else ""


def did_you_mean(names: Iterable[str]) -> str:
    """Return a hint with at most two names, or "" without names."""
    names = [*dict.fromkeys(names)][:2]
    return f"did you mean {' or '.join(map(show, names))}?" if names else ""


def _as_word(value: Any) -> str:
    """Return a value as in `key=value` on the command line, or VALUE for a value without a short form."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, list)) or value in ("", []):
        return "VALUE"
    return cut(value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str))


def with_words(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed names with the words of `name`: ["layers"] for `num_layers`."""
    return [each for each in allowed if squeezed(each) == squeezed(name) or words_of(each) == words_of(name)]


def named(name: str, components: Iterable[str]) -> list[str]:
    """Return the components with this name, in any case and possibly followed by a word such as `Loss`."""
    forms = {squeezed(name).removesuffix(kind) for kind in ("", *synonyms("kinds"))}
    return [each for each in components if squeezed(each) in forms][:1]


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """Return at most two allowed names that are similar to `name`.

    Similar means: the same words, nearly the same spelling, or `name` is a part of the allowed name.
    """
    form, forms = normalized(name), {normalized(each): each for each in allowed}
    tests: list[Callable[[str], object]] = [
        lambda each: with_words(form, [each]),
        lambda each: len(form) >= SHORT and (each.startswith(form) or f"_{form}" in each),
    ]
    matches = next((found for test in tests if (found := [*filter(test, forms)])), [])
    spelled = difflib.get_close_matches(form, [each for each in forms if each[:1] == form[:1]], n=1, cutoff=CUTOFF)
    return [forms[each] for each in difflib.get_close_matches(form, matches or spelled, n=2, cutoff=0.0)]


def has_words(search: str, *texts: str) -> bool:
    """Whether every word of `search` occurs in the texts, ignoring case. True if there are no words."""
    return all(word in "\n".join(texts).lower() for word in search.lower().split())


def normalized(name: str) -> str:
    """Return a name in lower case, with underscores only as separators, to compare spellings."""
    return re.sub(r"[\s-]", "_", name.lower()).strip("_")


def squeezed(name: str) -> str:
    """Return a name in lower case, without separators."""
    return re.sub(r"[\s_-]", "", name.lower())


def as_range(text: str) -> str | None:
    """Return a range, `0..2` or `0-2`, as the list `0,1,2`, or None if the text is no range or the list is too long."""
    ends = re.fullmatch(r"(\d{1,9})(?:\.\.|-|:)(\d{1,9})", text.strip())
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    return ",".join(map(str, numbers)) if 0 < len(numbers) <= MOST_IN_RANGE else None


def as_list(text: str) -> str:
    """Return a comma-separated text as a TOML list: `[0,1]` for `0,1`. Names are quoted."""
    pieces = (piece.strip() for piece in text.split(","))
    return f"[{','.join(piece if piece.isdecimal() else json.dumps(piece) for piece in pieces)}]"


def component_name_error(kind: str, name: str, where: str, place: str, components: Mapping[str, Any]) -> str | None:
    """Return the error line for a name that is not registered, or None if the name is an import path.

    Args:
        kind: kind of component, such as `aggregation rule`.
        name: unregistered name.
        where: start of the line: the key and the name.
        place: the key, such as `partition.name`.
        components: registered components (`Registration`) by name.
    """
    if settings := _called(name, place, components):
        return f"{where}: write {cut(settings)}"
    if path := _as_import_path(name):
        return f"{where}: write {cut(path)}"
    if NOTE.fullmatch(name):
        return (
            f"{where}: stands for an object of a Python program, which a file cannot contain; resume the run in "
            "Python, with this object in the experiment: fedsim.run(experiment, folder, resume=True)"
        )
    if ":" in name:
        return None
    hint = nearest(name, sorted(components), re.sub(r"\[\d+\]|\.name$", "", place))
    if hint.startswith("allowed"):
        hint = f'{hint}, or the import path of your own, "package.module:name"'
    return f"{where}: no such {kind}; {hint}"


def _called(name: str, place: str, components: Mapping[str, Any]) -> str:
    """Return the settings for a component that is written with its parameters, such as `dirichlet(0.1)`, or ""."""
    call = re.fullmatch(r"\s*([\w-]+?)\s*(?:\(([^()]*)\)|[:=@]([^:/\\]*)|[_-]?(\d[\d.e-]*))\s*", name)
    if not call or not (called := named(call[1], components)):
        return ""
    names = iter(components[called[0]].parameter_names)
    table, settings = place.removesuffix(".name"), [f"{place.removesuffix('.name')}={called[0]}"]
    for argument in filter(None, re.split(r"[\s,]+", call[2] or call[3] or call[4] or "")):
        key, equals, value = argument.rpartition("=")
        settings.append(f"{table.partition('.')[0]}.{key if equals else next(names, 'PARAMETER')}={value}")
    if "[" in table:  # a list of components
        parameters = ",".join(each.rpartition(".")[2] for each in settings[1:])
        return f"{table.partition('[')[0]}='{{name=\"{called[0]}\",{parameters}}}'"
    return " ".join(settings)


def with_key(table: dict[str, Any], named_by: str, place: str) -> dict[str, Any]:
    """Return a component's table with the key `name` renamed to `named_by`, such as `rule`.

    Raises ExperimentError if the table has both keys.
    """
    if named_by == "name" or "name" not in table:
        return table
    if named_by in table:
        raise ExperimentError(
            f"{place}.name = {show(table['name'])}: is a synonym of {place}.{named_by}, which is also set; "
            "remove one of the two"
        )
    return {named_by if key == "name" else key: value for key, value in table.items()}


def _as_import_path(name: str) -> str | None:
    """Return a hint how to write a file path or dotted name as an import path, or None if `name` is neither."""
    file, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        file, attribute = name, "NAME"
    if ":" not in name and "." in name and not re.search(r"[/\\]|\.py$", name):
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute} (with a colon)" if attribute.isidentifier() else None
    if not re.search(r"[/\\]|\.py$", file):
        return None
    path = PureWindowsPath(file)  # accepts both kinds of slashes
    inside = PurePosixPath(os.path.relpath(path.as_posix()))
    if path.drive or ".." in inside.parts:
        return f"{path.stem}:{attribute}, and start fedsim in {path.parent.as_posix()} or add this folder to PYTHONPATH"
    return f"{'.'.join(inside.with_suffix('').parts)}:{attribute} (without slashes and .py)"
