"""Hints for unknown names and parameters of components."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import PureWindowsPath
from typing import Any

from fedsim.errors import cut, show
from fedsim.hints.meanings import answer, nearest
from fedsim.hints.names import did_you_mean, named, with_words

NOTE = re.compile(r"<[\w, ]+>")  # name of an object without an import path
IMPORT_PATH = re.compile(r"[\w.]+:[^\W\d][\w.]*")  # `cnn:Net` of a file cnn.py, unlike `dirichlet:0.1`


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
            f"{where}: stands for an object of a Python program, which a file cannot contain; repeat fedsim.run with "
            "resume=True, or fedsim.compare, in Python with this object; to read only results: fedsim.Comparison.read"
        )
    if ":" in name:
        return None
    if re.fullmatch(r"[a-z_]\w*=[\w.+-]+", name):  # krum,f=1 among several values
        table = f'{{{place.rpartition(".")[2]}="NAME",{name}}}'
        return f"{where}: no such {kind}; to set a parameter of one value write {table} (in single quotes in a shell)"
    hint = nearest(name, sorted(components), re.sub(r"\[\d*\]|\.name$", "", place))
    own = ', or the import path of your own, "package.module:name"' if hint.startswith("allowed") else ""
    return f"{where}: no such {kind}; {hint}{own}"


def _called(name: str, place: str, components: Mapping[str, Any]) -> str:
    """Return the settings for a component with its parameters, such as `dirichlet(0.1)` or `krum,f=1`, or ""."""
    call = re.fullmatch(r"\s*([\w-]+?)\s*(?:(?:[(:=@]|,(?=\s*\w+=))([^():/\\]*)\)?|[_-]?(\d[\d.e-]*))\s*", name)
    if not call or IMPORT_PATH.fullmatch(name) or not (called := named(call[1], components)):
        return ""
    names = iter(components[called[0]].parameter_names)
    arguments = filter(None, re.split(r"[\s,]+", call[2] or call[3] or ""))
    settings = [each if "=" in each else f"{next(names, 'PARAMETER')}={each}" for each in arguments]
    if "[" in place:  # a list of components
        return f"{{{','.join([f'name={show(called[0])}', *settings])}}} (in single quotes in a shell)"
    table = place.rpartition(".")[0]
    settings = [f"{table}.{setting}".lstrip(".") for setting in settings]
    return " ".join([f"{place.removesuffix('.name')}={called[0]}", *settings])


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


def parameter_hint(name: str, value: Any, place: str, known: Collection[str], beside: Iterable[str]) -> str:
    """Return the hint for a parameter that a component does not have, or "" if nothing is known about it.

    Args:
        name: unknown parameter.
        value: value of the parameter, which the hint repeats.
        place: dotted key of the table that contains the parameter, or "" outside experiments.
        known: parameters of the component.
        beside: other keys of the table.
    """
    hint, general = answer(f"{place}.{name}", value) if place else "", answer(name, value)
    hint = next(filter(None, (_of_table(text, place, known, beside) for text in (hint, general))), hint)
    if hint.startswith(f"write {place}.{name}="):  # the key of another component
        hint = ""
    return did_you_mean(with_words(name, dict.fromkeys([*beside, *sorted(known)]))) or hint


def _of_table(hint: str, place: str, known: Collection[str], beside: Iterable[str]) -> str:
    """Return the parameters that a hint sets, as in "write krum=1", or "" if the table `place` lacks one of them.

    The table has the parameters `known` and the keys `beside`.
    """
    prefix = f"{place}." if place else ""
    pattern = re.escape(prefix) if place else r"(?:[\w.]+\.)?"
    found = re.findall(rf"(?<![\w.]){pattern}([\w.]+)=(\S+)", hint)
    found = [each for each in found if each[0] not in beside] or ([] if place else found)
    if not all(key in known or key in beside for key, _ in found):
        return ""
    settings = dict.fromkeys(f"{prefix}{key}={value.rstrip(',;') or value}" for key, value in found)
    return f"write {' or '.join(settings)}" if settings else ""
