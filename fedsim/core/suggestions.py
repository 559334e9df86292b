"""Hints for unknown keys and names: what fedsim calls them, the most similar valid name, or all allowed names."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any

from fedsim.errors import MAX_NAME, ExperimentError, cut, show
from fedsim.synonyms import synonyms

MAX_TABLE = 500  # maximum number of characters of a table whose keys are explained
SHORT = 4  # characters; shorter names are not completed
CUTOFF = 0.75  # difflib ratio from which a name with the right first letter counts as a misspelling
CERTAIN = 0.9  # the same for a phrase of another library

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
    if "+" in name:  # as figures and tables show a chain
        return f"write {cut(as_list(name.replace('+', ',')))} (in single quotes in a shell)"
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
        place: table that contains the key, such as `local`. "" for top-level keys. None for keys outside experiments.
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
    """Return the hint for a dotted name that is not a key at its place, or "" if nothing is known about it."""
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


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name, without those that do not matter, and in a form that is equal for synonyms.

    >>> words_of("num_clients") == words_of("numberOfWorkers") == words_of("node-count")
    True
    """
    same = synonyms("same")
    if name.lower() not in synonyms("answers"):  # FedAvg is one word
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    text = normalized(name.replace(".", "_"))
    for pair in (each for each in same if "_" in each):
        text = text.replace(pair, same[pair])
    words = re.sub(r"(?<=[^_]{3})(?<!ou)(?<!tu)(?<!s)s(?=_|$)", "", text).split("_")  # singular
    return frozenset(filter(None, (same.get(word, word) for word in words))) or frozenset(words)


def _write(settings: Iterable[str]) -> str:
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


def is_kind(name: str) -> bool:
    """Whether a name ends with a kind of component, such as `rule` and `partition_strategy`."""
    return normalized(name).rpartition("_")[2] in synonyms("kinds")


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """Return at most two allowed names that are similar to `name`.

    Similar means: the same words, nearly the same spelling, or `name` is a part of the allowed name.
    """
    form, forms = normalized(name), {normalized(each): each for each in allowed}
    matches = with_words(form, forms) or [each for each in forms if len(form) >= SHORT and f"_{form}" in f"_{each}"]
    alike = [each for each in forms if each[:1] == form[:1]]
    swapped = [each for each in alike if sorted(each) == sorted(form)]  # "modle" is model, although mode is nearer
    spelled = swapped or difflib.get_close_matches(form, alike, n=1, cutoff=CUTOFF)
    return [forms[each] for each in difflib.get_close_matches(form, matches or spelled, n=2, cutoff=0.0)]


def has_words(search: str, *texts: str) -> bool:
    """Whether every word of `search` occurs in the texts, ignoring case. True if there are no words."""
    return all(word in "\n".join(texts).lower() for word in search.lower().split())


def normalized(name: str) -> str:
    """Return a name in lower case, with underscores instead of spaces and hyphens, to compare spellings."""
    return re.sub(r"[\s-]", "_", name.lower()).strip("_")


def squeezed(name: str) -> str:
    """Return a name in lower case, without separators."""
    return normalized(name).replace("_", "")


def as_range(text: str) -> str | None:
    """Return a range, `0..2` or `0-2`, as the list `0,1,2`, or None if it is not a range or is too long."""
    ends = re.fullmatch(r"(\d{1,9})(?:\.\.|-|:)(\d{1,9})", text.strip())
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
    return ",".join(map(str, numbers)) if 0 < len(numbers) <= 100 else None


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
    if remedy := _called(name, place, components) or _as_import_path(name):
        return f"{where}: write {cut(remedy)}"
    if NOTE.fullmatch(name):
        return (
            f"{where}: stands for an object of a Python program, which a file cannot contain; resume the run in "
            "Python, with this object in the experiment: fedsim.run(experiment, folder, resume=True)"
        )
    if ":" in name:
        return None
    if re.fullmatch(r"[a-z_]\w*=[\w.+-]+", name):  # krum,f=1 among several values
        table = f'{{{place.rpartition(".")[2]}="NAME",{name}}}'
        return f"{where}: no such {kind}; for a parameter of one value write {table} (in single quotes in a shell)"
    hint = nearest(name, sorted(components), re.sub(r"\[\d*\]|\.name$", "", place))
    own = ', or the import path of your own, "package.module:name"' if hint.startswith("allowed") else ""
    return f"{where}: no such {kind}; {hint}{own}"


def _called(name: str, place: str, components: Mapping[str, Any]) -> str:
    """Return the settings for a component with its parameters, such as `dirichlet(0.1)` or `krum,f=1`, or ""."""
    call = re.fullmatch(r"\s*([\w-]+?)\s*(?:(?:[(:=@]|,(?=\s*\w+=))([^():/\\]*)\)?|[_-]?(\d[\d.e-]*))\s*", name)
    if not call or not (called := named(call[1], components)):
        return ""
    names = iter(components[called[0]].parameter_names)
    arguments = filter(None, re.split(r"[\s,]+", call[2] or call[3] or ""))
    settings = [each if "=" in each else f"{next(names, 'PARAMETER')}={each}" for each in arguments]
    if "[" in place:  # a list of components
        return f"{{{','.join([f'name={show(called[0])}', *settings])}}} (in single quotes in a shell)"
    table = place.rpartition(".")[0]
    settings = [f"{table}.{setting}".lstrip(".") for setting in settings]
    return " ".join([f"{place.removesuffix('.name')}={called[0]}", *settings])


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


def _as_import_path(name: str) -> str:
    """Return a hint how to write a file path or dotted name as an import path, or "" if `name` is neither."""
    if not re.search(r"[/\\]|\.py(:|$)", name):
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute} (with a colon)" if module and ":" not in name and attribute.isidentifier() else ""
    file, attribute = re.sub(r":(?=\w*$)", "\n", name).partition("\n")[::2]
    path, attribute = PureWindowsPath(file).with_suffix(""), attribute or "NAME"  # accepts both kinds of slashes
    if path.root or ".." in path.parts:
        start = f"start fedsim in {path.parent.as_posix()} or add this folder to PYTHONPATH"
        return f"{path.name}:{attribute}, and {start}"
    return f"{'.'.join(path.parts)}:{attribute} (without slashes and .py)"
