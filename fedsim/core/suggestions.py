"""Error lines for unknown keys and names, which end with a hint: the most similar valid name, or all allowed names."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from fedsim.errors import MAX_NAME, ExperimentError, cut, show
from fedsim.synonyms import KEYS, NAMES, NOTES

MOST_IN_RANGE = 100  # maximum length of a range that a hint writes out, such as 0..99
SHORT = 4  # characters; in shorter names one wrong letter matters more
CERTAIN = 0.85  # difflib ratio from which only the most similar name is suggested
CUTOFF, CUTOFF_SHORT = 0.75, 0.65  # difflib ratio from which a name counts as a misspelling

LISTS = ("metrics", "data.augment", "processors", "broadcast", "records.loggers")  # keys of lists of names
FIRST_STAGE = ", before a rule"  # follows the key of pre-aggregators

NOTE = re.compile(r"<[\w, ]+>")  # name of an object without an import path

KeyFinder = Callable[[str], list[str]]  # maps a name to dotted keys of an experiment


@dataclass
class Vocabulary:
    """Functions that look up keys and components, for suggestions in error messages.

    Attributes:
        keys_called: function from a name to the dotted keys that it may mean.
        keys_of_component: function from the name of a component to the dotted keys that can select it.
    """

    keys_called: KeyFinder = lambda name: list(KEYS.get(name, ()))
    keys_of_component: KeyFinder = lambda name: []


VOCABULARY = Vocabulary()


def nearest(name: str, allowed: Iterable[str], *, is_component: bool = False) -> str:
    """Return a hint for an unknown name: `did you mean "x"?`, or the list of allowed names.

    Args:
        name: the unknown name.
        allowed: allowed names.
        is_component: whether the name should be a component's name. Then components of other kinds are suggested too.
    """
    allowed = list(allowed)
    known = [each for each in NAMES.get(normalized(name), ()) if each in allowed]
    return _hint(name, known, {each: [each] for each in allowed}, allowed, may_be_component=is_component)


def attribute_error(owner: object, name: str) -> AttributeError:
    """Return the error for an unknown attribute of an object, which suggests the most similar public attribute."""
    hint = "" if name.startswith("_") else f"; {nearest(name, [known for known in dir(owner) if known[0] != '_'])}"
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}")


def nearest_key(
    name: str, allowed: Iterable[str], place: str = "", elsewhere: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the hint for an unknown key.

    Args:
        name: unknown key.
        allowed: keys of the table.
        place: table that contains the key, such as `local`. "" for top-level keys.
        elsewhere: keys of other tables, each with the dotted keys to suggest.
    """
    allowed, form = list(dict.fromkeys(allowed)), normalized(name)
    known = VOCABULARY.keys_called(form) if place else list(KEYS.get(form, ())) if elsewhere else []
    if place and known == [form]:
        return f"{form} is a top-level key; in a file write it above the first [table]"
    if here := [each.removeprefix(f"{place}.") for each in known if each.startswith(f"{place}.")]:
        known = [each for each in here if each in allowed]  # not keys of other components
    candidates = {**(elsewhere or {}), **{each: [each] for each in allowed}}
    return _hint(name, known, candidates, allowed, may_be_component=form not in candidates)


def _hint(
    name: str,
    known: Sequence[str],
    candidates: Mapping[str, Sequence[str]],
    allowed: Sequence[str],
    *,
    may_be_component: bool,
) -> str:
    """Return the hint for a name that is not allowed.

    Args:
        name: the name.
        known: allowed names that have `name` as a synonym.
        candidates: correct names, each with what to suggest if `name` is similar to it.
        allowed: all allowed names, which are listed if nothing is similar.
        may_be_component: whether `name` may be the name of a component of any kind.
    """
    if "," in name:
        return f"for several values use fedsim compare; for a list write {cut(as_list(name))}"
    if not known and normalized(name) in NOTES:
        return NOTES[normalized(name)]
    if not known and may_be_component and (settings := _settings_of_component(normalized(name))):
        return f"write {' or '.join(settings)}"
    if not known and len(name) <= MAX_NAME:
        known = [each for match in closest(name, candidates) for each in candidates[match]]
    return f"did you mean {' or '.join(map(show, known))}?" if known else f"allowed: {', '.join(allowed) or 'none'}"


def _settings_of_component(name: str) -> list[str]:
    """Return one setting such as `local.algorithm=scaffold` for each key that can select the component `name`."""
    settings: dict[str, str] = {}
    for text in VOCABULARY.keys_of_component(name):
        for key in text.removesuffix(FIRST_STAGE).split(", "):
            value = f'["{name}","mean"]' if text.endswith(FIRST_STAGE) else f'["{name}"]' if key in LISTS else name
            settings.setdefault(key, f"{key}={value}" if value == name else f"{key}='{value}'")
    return list(settings.values())


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """Return at most two allowed names that are similar to `name`.

    Similar means: nearly the same spelling, the same except for - and _, the initials of `name`, or a part of it.
    """
    forms = {normalized(each): each for each in allowed}
    form = normalized(name)
    if form in forms:
        return [forms[form]]
    matches = [each for each in forms if _initials(each) == form or _initials(form) == each]
    if not matches and len(form) >= SHORT:
        matches = [each for each in forms if each.startswith(form)] or [each for each in forms if f"_{form}" in each]
    cutoff = CUTOFF if len(form) >= SHORT else CUTOFF_SHORT
    matches = matches or difflib.get_close_matches(name.replace("-", "_"), forms, n=1, cutoff=cutoff)  # not MyNet: net
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


def component_name_error(kind: str, name: str, where: str, names: Iterable[str]) -> str | None:
    """Return the error line for a name that is not registered, or None if the name is an import path.

    Args:
        kind: kind of component, such as `aggregation rule`.
        name: unregistered name.
        where: start of the line: the key and the name.
        names: names of the registered components.
    """
    if path := _as_import_path(name):
        return f"{where}: write {cut(path)}"
    if NOTE.fullmatch(name):
        return (
            f"{where}: stands for an object of a Python program, which a file cannot contain; resume the run in "
            "Python, with this object in the experiment: fedsim.run(experiment, folder, resume=True)"
        )
    if ":" in name:
        return None
    hint = nearest(name, sorted(names), is_component=True)
    if hint.startswith("allowed"):
        hint = f'{hint}, or the import path of your own, "package.module:name"'
    return f"{where}: no such {kind}; {hint}"


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
