"""The error lines for wrong keys and names, for the check of an experiment and the earlier one without PyTorch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Protocol

from fedsim.core.suggestions import nearest, nearest_key
from fedsim.errors import MAX_PROBLEMS, ExperimentError, cut, show

NOTE = re.compile(r"<[\w, ]+>")  # the name of an object without an import path


class Configurable(Protocol):
    """A plug whose parameters are known."""

    @property
    def name(self) -> str: ...

    @property
    def parameter_names(self) -> Sequence[str]: ...

    @property
    def accepts_any(self) -> bool: ...


def unknown_key_error(key: str, value: Any, hint: str) -> str:
    """The error line for a dotted key that no table has."""
    return f"{key} = {show(value)}: unknown key; {hint}"


def plug_name_error(kind: str, name: str, where: str, names: Iterable[str]) -> str | None:
    """The error line for a name that is neither a registered plug nor an import path; None for an import path.

    Args:
        kind: what the plug is: `aggregation rule`.
        name: the name, which is not registered.
        where: the key and the name, at the beginning of the line.
        names: of the registered plugs.
    """
    if path := _as_import_path(name):
        return f"{where}: write {cut(path)}"
    if NOTE.fullmatch(name):
        return (
            f"{where}: stands for an object of a Python program, which a file cannot hold; use Python and give the "
            "object: fedsim.run(experiment, folder, resume=True)"
        )
    if ":" in name:
        return None
    hint = nearest(name, sorted(names), is_plug=True)
    if hint.startswith("allowed"):
        hint = f'{hint}, or your own as "package.module:name"'
    return f"{where}: no such {kind}; {hint}"


def parameter_errors(
    values: Mapping[str, Any],
    plugs: Sequence[Configurable],
    kind: str,
    siblings: Iterable[Configurable],
    place: str = "",
    beside: Iterable[str] = (),
) -> list[str]:
    """The error lines for parameters that no plug has.

    Args:
        values: the parameters by name.
        plugs: those that are configured.
        kind: what they are: `aggregation rule`.
        siblings: all registered plugs of their kind, for hints.
        place: the table of the experiment that holds the parameters.
        beside: the other keys of that table, for hints.
    """
    known = {name for plug in plugs for name in plug.parameter_names}
    unknown = [] if any(plug.accepts_any for plug in plugs) else [name for name in values if name not in known]
    names, keys = " + ".join(plug.name for plug in plugs), dict.fromkeys([*beside, *sorted(known)])
    lines = []
    for name in unknown[:MAX_PROBLEMS]:
        owners = sorted({plug.name for plug in siblings if name in plug.parameter_names})
        hint = f"{name} goes with {', '.join(owners)}" if owners else nearest_key(name, keys, place)
        where = f"{place}." if place else ""
        lines.append(f"{where}{name} = {show(values[name])}: unknown key (the {kind} is {names}); {hint}")
    return lines


def both_given_error(place: str, alternatives: Iterable[str]) -> str:
    """The error line for a table with more than one of these keys."""
    return f"{place}: give {' or '.join(alternatives)}, not both"


def with_key(table: dict[str, Any], named_by: str, place: str) -> dict[str, Any]:
    """A table that names a plug by the key `named_by`, where it may have the key `name` instead.

    Raises ExperimentError if the table has both keys.
    """
    if named_by == "name" or "name" not in table:
        return table
    if named_by in table:
        raise ExperimentError(
            f"{place}.name = {show(table['name'])}: stands for {place}.{named_by}, which is given too; omit one of them"
        )
    return {named_by if key == "name" else key: value for key, value in table.items()}


def _as_import_path(name: str) -> str | None:
    """Return the import path that a file path or a dotted name stands for, with a remark. None for other names."""
    file, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        file, attribute = name, "NAME"
    if ":" not in name and "." in name and not re.search(r"[/\\]|\.py$", name):
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute}, with a colon"
    if not re.search(r"[/\\]|\.py$", file):
        return None
    path = PureWindowsPath(file)  # accepts slashes of both kinds
    inside = PurePosixPath(os.path.relpath(path.as_posix()))
    if path.drive or ".." in inside.parts:
        return f"{path.stem}:{attribute}, and start fedsim in {path.parent.as_posix()} or add that folder to PYTHONPATH"
    return f"{'.'.join(inside.with_suffix('').parts)}:{attribute}, without slashes and .py"
