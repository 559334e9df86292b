"""Hints for unknown keys and names: what fedsim calls them, the most similar valid name, or all allowed names."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedsim.errors import MAX_NAME, cut
from fedsim.hints.names import as_list, closest, did_you_mean, named, normalized, squeezed, synonyms, words_of

MAX_TABLE = 500  # maximum number of characters of a table whose keys are explained
CERTAIN = 0.9  # difflib ratio from which a name counts as a misspelled phrase of another library

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
    names = [known for known in synonyms("names").get(normalized(name), "").split() if known in allowed]
    if table is not None and not (names := named(name, allowed)):
        hint = meaning(f"{table}.{name}")
        settings = hint.removeprefix("write ").split(" or ")
        names = [value for setting in settings if (value := setting.partition("=")[2]) in allowed]
        if hint and not names and "VALUE" not in hint:
            return hint
    return did_you_mean(names or closest(name, allowed)) or _listed(allowed)


def nearest_key(name: str, allowed: Iterable[str], place: str | None = None, value: Any = None) -> str:
    """Return the hint for an unknown key.

    Args:
        name: unknown key.
        allowed: keys of the table.
        place: table that contains the key, such as `local`. "" for a key at the top level of an experiment. None for a
            key that is not in an experiment, such as a parameter of a function that is called directly.
        value: value of the key, which the hint repeats.
    """
    allowed, form = list(dict.fromkeys(allowed)), normalized(name)
    if place is None or "," in name or len(name) > MAX_NAME or squeezed(name) in map(squeezed, allowed):
        return nearest(name, allowed)
    if place and VOCABULARY.keys_called(form) == [form]:
        return f"{form} is a top-level key; in a file write it above the first [table]"
    if isinstance(value, Mapping) and len(str(value)) > MAX_TABLE:  # explaining very many keys takes time
        value = None
    hint = meaning(f"{place}.{name}", value) or did_you_mean(closest(name, allowed))
    misspelled = [] if place else difflib.get_close_matches(form, synonyms("answers"), 1, CERTAIN)
    return hint or "".join(answer(phrase, value) for phrase in misspelled) or _listed(allowed)


def _listed(allowed: Iterable[str]) -> str:
    return f"allowed: {', '.join(allowed) or 'none'}"


def meaning(name: str, value: Any = None) -> str:
    """Return the hint for a dotted name that is not a key of an experiment, or "" if there is no hint."""
    place, _, last = normalized(name).rpartition(".")
    if isinstance(value, Mapping):
        inner = (meaning(name if key == "name" else f"{name}.{key}", item) for key, item in value.items())
        return "; ".join(filter(None, dict.fromkeys([_write(VOCABULARY.settings_of(last)), *inner])))
    hint, component = answer(name, value) or answer(last, value), _write(VOCABULARY.settings_of(last))
    if hint and not ("VALUE" in hint and component):
        return hint
    keys = [] if place and "_" not in last else VOCABULARY.keys_called(last)  # short names differ between tables
    word = str(value).lower() if isinstance(value, bool) else _as_word(value)
    if hint := _write([f"{key}={word}" for key in keys]) or component:
        return hint
    return (
        _write([f"{last}={word}"] if last in VOCABULARY.keys_called(last) else [])
        if place
        else VOCABULARY.owners_of(last)
    )


def answer(name: str, value: Any = None) -> str:
    """Return what to write instead of a key or name of another library, or "" if the name is unknown."""
    kinds = {float: "fraction", int: "integer", list: "list", str: value}  # phrases may end with the kind of the value
    kind = kinds.get(type(value)) if "." in name or value not in (0.0, 1.0) else None
    forms = (words_of(f"{name}_{kind}"), words_of(name), frozenset([squeezed(name)]))
    ambiguous = synonyms("exact").get(normalized(name.lstrip(".")), "")
    text = ambiguous or next((_answers()[form] for form in forms if form in _answers()), "")
    if isinstance(value, str) and (keys := re.findall(r"([\w.]+)=", text)):
        settings, names = VOCABULARY.settings_of(value), {k for k in VOCABULARY.component_keys if f"{k}={{}}" in text}
        if settings_of_keys := [setting for setting in settings if setting.partition("=")[0] in keys]:
            return _write(settings_of_keys)
        if value.lower() in ("none", "null", "off"):
            return "omit it"
        other = answer(value) or _write(settings)
        if other and "VALUE" not in other and (names or any(f"{key}=" in other for key in keys)):
            return other
        value = "NAME" if len(names) > 1 or (names and value.isidentifier()) else value
    text = text.replace("{}", _as_word(value))
    return f"write {text}" if SETTING.match(text) else text


@functools.cache
def _answers() -> dict[frozenset[str], str]:
    return {words_of(phrase): text for phrase, text in synonyms("answers").items()}


def _write(settings: Iterable[str]) -> str:
    return f"write {' or '.join(settings)}" if settings else ""


def _as_word(value: Any) -> str:
    """Return a value as in `key=value` on the command line, or VALUE for a value without a short form."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float, list)) or value in ("", []):
        return "VALUE"
    return cut(value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str))
