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
from fedsim.synonyms import ANSWERS, IGNORED, SAME

MOST_IN_RANGE = 100  # maximum length of a range that a hint writes out, such as 0..99
SHORT = 4  # characters; shorter names are not completed
CERTAIN = 0.85  # difflib ratio from which only the most similar name is suggested
CUTOFF = 0.8  # difflib ratio from which a name counts as a misspelling

NOTE = re.compile(r"<[\w, ]+>")  # name of an object without an import path
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
    if "," in name:
        return f"for several values use fedsim compare; for a list write {cut(as_list(name))}"
    matches = same(name, allowed)
    if table is not None and not matches:
        text = answer(f"{table}_{name}") or answer(name)
        matches = list(dict.fromkeys(word for word in re.findall(r"=([\w.]+)", text) if word in allowed))
        if not matches and (hint := _of_component(name) or text * ("VALUE" not in text)):
            return hint
    return did_you_mean(matches or closest(name, allowed)) or f"allowed: {', '.join(allowed) or 'none'}"


def nearest_key(name: str, allowed: Iterable[str], place: str | None = None, value: Any = None) -> str:
    """Return the hint for an unknown key.

    Args:
        name: unknown key.
        allowed: keys of the table.
        place: table that contains the key, such as `local`. "" for top-level keys. None for keys outside experiments.
        value: value of the key, which the hint repeats.
    """
    allowed, form = list(dict.fromkeys(allowed)), normalized(name)
    if place is None or "," in name or len(name) > MAX_NAME or same(name, allowed):
        return nearest(name, allowed)
    if place and VOCABULARY.keys_called(form) == [form]:
        return f"{form} is a top-level key; in a file write it above the first [table]"
    similar = did_you_mean(closest(name, allowed))
    if isinstance(value, Mapping):  # an unknown table
        inner = [meaning(form if key == "name" else f"{form}.{key}", item) for key, item in value.items()]
        hint = similar or "; ".join(filter(None, dict.fromkeys(inner)))
    else:
        hint = meaning(f"{place}.{name}" if place else name, value, similar)
    return hint or f"allowed: {', '.join(allowed) or 'none'}"


def meaning(name: str, value: Any = None, similar: str = "") -> str:
    """Return the hint for a name that is not a key at its place, or "" if nothing is known about it.

    Args:
        name: key, which may be dotted.
        value: value of the key.
        similar: hint with similar keys at its place, which is preferred to keys of other tables.
    """
    place, _, last = normalized(name).rpartition(".")
    hint = answer(name, value) or (answer(last, value) if place else "")
    if hint and not ("VALUE" in hint and _of_component(last)):
        return hint
    keys = VOCABULARY.keys_called(last) if not place or "_" in last else []  # names of one word differ between tables
    if keys and not (place and similar):
        return f"write {' or '.join(f'{key}={_as_word(value)}' for key in keys)}"
    if place:
        return similar or _of_component(last)
    return _of_component(last) or similar or VOCABULARY.owners_of(last)


def answer(name: str, value: Any = None) -> str:
    """Return what to write instead of a key or name of another library, or "" if the name is unknown."""
    is_fraction = isinstance(value, float) and 0 < value < 1
    kind = value if isinstance(value, str) else "fraction" if is_fraction else "list" * isinstance(value, list)
    names = (f"{name}_{kind}", name) if kind else (name,)
    text = next((text for each in names if (text := _answers().get(words_of(each)))), "")
    if isinstance(value, str) and (keys := re.findall(r"([\w.]+)=\{\}", text)):
        settings = VOCABULARY.settings_of(value)
        if matching := [setting for setting in settings if setting.partition("=")[0] in keys]:
            text = " or ".join(matching)
        elif VOCABULARY.component_keys & {*keys} or any(f"{key}=" in answer(value) for key in keys):
            other = answer(value) or _of_component(value)
            if other.startswith("write ") and "VALUE" not in other:
                return other
    elif isinstance(value, (int, float)):  # not the name of a component
        options = text.split(" or ")
        text = " or ".join(
            [each for each in options if each.partition("=")[0] not in VOCABULARY.component_keys] or options
        )
    text = text.replace("{}", _as_word(value))
    return f"write {text}" if SETTING.match(text) else text


@functools.cache
def _answers() -> dict[frozenset[str], str]:
    return {words_of(phrase): text for phrase, text in ANSWERS.items()}


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name, without those that do not matter, and in a form that is equal for synonyms.

    >>> words_of("num_clients") == words_of("numberOfWorkers") == words_of("node-count")
    True
    """
    if name.lower() not in ANSWERS:  # FedAvg is one word
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    text = "_".join(re.split(r"[\s._-]+", name.lower())).strip("_")
    for pair in (same for same in SAME if "_" in same):
        text = text.replace(pair, SAME[pair])
    words = [word[:-1] if len(word) >= SHORT and re.search("[^su]s$", word) else word for word in text.split("_")]
    return frozenset(SAME.get(word, word) for word in words if word not in IGNORED) or frozenset(words)


def _of_component(name: str) -> str:
    settings = VOCABULARY.settings_of(name)
    return f"write {' or '.join(settings)}" if settings else ""


def did_you_mean(names: Iterable[str]) -> str:
    """Return a hint with at most two names, or "" without names."""
    names = [*names][:2]
    return f"did you mean {' or '.join(map(show, names))}?" if names else ""


def _as_word(value: Any) -> str:
    """Return a value as in `key=value` on the command line, or VALUE for a value without a short form."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, list)) or value in ("", []):
        return "VALUE"
    return cut(value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str))


def same(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the allowed name that differs from `name` only in case and separators, in a list that may be empty."""
    form = re.sub(r"[\s_-]", "", name.lower())
    return [each for each in allowed if re.sub(r"[\s_-]", "", each.lower()) == form][:1]


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """Return at most two allowed names that are similar to `name`.

    Similar means: nearly the same spelling, the same words, the initials of `name`, or a part of it.
    """
    form, forms = normalized(name), {normalized(each): each for each in allowed}
    if len(name) > MAX_NAME:
        return []
    tests: list[Callable[[str], object]] = [
        lambda each: each.replace("_", "") == form.replace("_", ""),
        lambda each: words_of(each) == words_of(form),
        lambda each: _initials(each) == form or _initials(form) == each,
        lambda each: len(form) >= SHORT and each.startswith(form),
        lambda each: len(form) >= SHORT and f"_{form}" in each,
        lambda each: each[:1] == form[:1] and sorted(each) == sorted(form),
        lambda each: each[:1] == form[:1] and len(each) == len(form) >= SHORT and sum(map(str.__ne__, each, form)) == 1,
    ]
    matches = next((found for test in tests if (found := [*filter(test, forms)])), [])
    matches = matches or difflib.get_close_matches(name.replace("-", "_"), forms, n=1, cutoff=CUTOFF)  # not MyNet: net
    matches = difflib.get_close_matches(form, matches, n=2, cutoff=0.0)
    is_certain = matches and difflib.SequenceMatcher(None, matches[0], form).ratio() >= CERTAIN
    return [forms[each] for each in (matches[:1] if is_certain else matches)]


def has_words(search: str, *texts: str) -> bool:
    """Whether every word of `search` occurs in the texts, ignoring case. True if there are no words."""
    return all(word in "\n".join(texts).lower() for word in search.lower().split())


def normalized(name: str) -> str:
    """Return a name in lower case, with underscores only as separators, to compare spellings."""
    return re.sub(r"[\s-]", "_", name.lower()).strip("_")


def _initials(name: str) -> str | None:
    """Return the initials of a name of several words, `bs` for `batch_size`, or None for a single word."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else None


def as_range(text: str) -> str | None:
    """Return a range such as `0..2` as the list `0,1,2`, or None if the text is not a range or the list is too long."""
    ends = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text.strip())
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
    if settings := _called(name, place, components) or _with_path(name, place, components):
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
    if not call or not (called := same(call[1], components)):
        return ""
    names = iter(components[called[0]].parameter_names)
    table, settings = place.removesuffix(".name"), [f"{place.removesuffix('.name')}={called[0]}"]
    for argument in filter(None, re.split(r"[\s,]+", call[2] or call[3] or call[4] or "")):
        key, equals, value = argument.rpartition("=")
        settings.append(f"{table.partition('.')[0]}.{key if equals else next(names, 'PARAMETER')}={value}")
    return " ".join(settings)


def _with_path(name: str, place: str, components: Mapping[str, Any]) -> str:
    """Return the settings for a file or folder of data that is written instead of a component's name, or ""."""
    with_path = [each for each, component in components.items() if "path" in component.parameter_names]
    suffix = name.rpartition(".")[2].lower()
    if not with_path or not (suffix in with_path or re.search(r"[/\\]", name)) or ":" in name or suffix == "py":
        return ""
    table = place.removesuffix(".name")
    kind = suffix if suffix in with_path else "KIND"
    kinds = "" if kind == suffix else f", where KIND is {', '.join(with_path[:-1])} or {with_path[-1]}"
    return f"{table}={kind} {table}.path={name}{kinds}"


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
        return f"{module}:{attribute} (with a colon)"
    if not re.search(r"[/\\]|\.py$", file):
        return None
    path = PureWindowsPath(file)  # accepts both kinds of slashes
    inside = PurePosixPath(os.path.relpath(path.as_posix()))
    if path.drive or ".." in inside.parts:
        return f"{path.stem}:{attribute}, and start fedsim in {path.parent.as_posix()} or add this folder to PYTHONPATH"
    return f"{'.'.join(inside.with_suffix('').parts)}:{attribute} (without slashes and .py)"
