"""Plugs: functions and dataclasses that an experiment names.

A plug is registered under its standard name in the literature, and its keyword parameters ARE its configuration:

    @rule("krum")
    def krum(updates, weights, *, f: int) -> Tensor: ...

An experiment that says `aggregate.rule = "krum"`, `aggregate.f = 2` is checked against that signature. A name of the
form "package.module:attribute" imports a plug instead of looking it up, so a user's own needs no registration. Which
of these a file may name says `fedsim.permission`. Python code may give the function or class itself (`fedsim.objects`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedsim.errors import MOST_PROBLEMS, ExperimentError, cut, explain, nearest, nearest_key, one_line, show
from fedsim.objects import NOTE, ObjectName, holds_objects, name_of, names_in, plain
from fedsim.permission import ImportRefusedError, require_importable, require_own
from fedsim.system.vision import import_torchvision


@dataclass(frozen=True)
class Plug:
    """A registered (or imported) callable together with the parameters that configure it."""

    kind: str
    name: str
    target: Callable[..., Any]
    parameters: type[BaseModel]
    takes: dict[str, bool] = dataclasses.field(default_factory=dict)  # what it is given; whether it needs that
    siblings: Iterable[Plug] = dataclasses.field(default=(), repr=False, compare=False)  # all that are registered

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.target) or "").split("\n", 1)[0]

    def check(self, values: dict[str, Any], place: str = "", beside: Iterable[str] = ()) -> dict[str, Any]:
        """`values` checked against the signature, with the defaults filled in (not those that no file can hold).

        `place` is the table of the experiment that holds them, `beside` the other keys that table allows.
        Raises ExperimentError with one line per unknown name, missing parameter or impossible value.
        """
        values = plain(values)
        known = set(self.parameters.model_fields)
        where = f"{place}." if place else ""
        accepts_any = self.parameters.model_config.get("extra") == "allow"
        unknown = [] if accepts_any else [name for name in values if name not in known]
        objects = [name for name, value in values.items() if any(names_in(value)) and name not in unknown]
        lines = [
            f"{where}{name} = {show(values[name])}: a parameter cannot be an object; "
            f"give the {self.kind} as a function that sets it"
            for name in objects
        ]
        lines += [
            f"{where}{name} = {show(values[name])}: unknown key (the {self.kind} is {self.name}); "
            + (goes_with(name, self.siblings) or nearest_key(name, [*beside, *self.parameters.model_fields], place))
            for name in unknown[:MOST_PROBLEMS]
        ]
        try:
            skipped = {*unknown, *objects}
            checked = self._validated({name: value for name, value in values.items() if name not in skipped})
        except ValidationError as error:
            raise ExperimentError(*lines, *explain(error, self.parameters, place)) from None
        if lines:
            raise ExperimentError(*lines)
        named = {
            name: getattr(checked, name)
            for name, field in self.parameters.model_fields.items()
            if name in values or not holds_objects(field.default)
        }
        return {**named, **(checked.model_extra or {})}

    def _validated(self, values: dict[str, Any]) -> BaseModel:
        try:
            return self.parameters(**values)
        except ValidationError as error:
            try:  # a file has arrays for tuples, and strings for paths and enumerations, as JSON does
                return self.parameters.model_validate_json(json.dumps(values, default=_as_in_a_file))
            except (TypeError, ValueError):
                raise error from None

    def bind(self, params: dict[str, Any]) -> Any:
        """The plug with its parameters, which can be pickled to another process: of a dataclass, an instance.

        What it is given it takes by name: see `given`.
        """
        if dataclasses.is_dataclass(self.target):
            return self.target(**params) if isinstance(self.target, type) else self.target
        if isinstance(self.name, ObjectName) or ":" in self.name:
            return Imported(self.name, params)
        return functools.partial(self.target, **params)

    def given(self, **menu: Any) -> dict[str, Any]:
        """Of all that is there to be given, what this plug takes."""
        return {name: menu[name] for name in self.takes}


def goes_with(name: str, plugs: Iterable[Plug]) -> str:
    """`m goes with multi_krum`, of a parameter that some of the plugs have; else nothing."""
    those = dict.fromkeys(plug.name for plug in plugs if name in plug.parameters.model_fields)
    return f"{name} goes with {', '.join(those)}" if those else ""


class Imported:
    """A plug given by its import path, or as an object, with its parameters.

    Another process imports the path again. An object goes along with its name.
    """

    def __init__(self, path: str, params: dict[str, Any]) -> None:
        self._path, self._params = path, params
        self._target = import_object(path)

    def __call__(self, **given: Any) -> Any:
        return self._target(**{**self._params, **given})

    def __repr__(self) -> str:
        return f"Imported({self._path!r}, {self._params!r})"

    def __reduce__(self) -> tuple[type[Imported], tuple[str, dict[str, Any]]]:
        return Imported, (self._path, self._params)


class Registry:
    """All plugs of one kind, by name.

    `given` names what the simulator has to give. A plug takes what it wants of that, in positional parameters of those
    names, and what is keyword-only is its configuration. Where nothing is given (models, solvers), every parameter is.
    A dataclass takes what it is given when it is called; its fields are its configuration.
    `accepts` says in errors which objects can be a plug of this kind.
    """

    def __init__(self, kind: str, *, given: tuple[str, ...] = (), accepts: str = "a function or a class") -> None:
        self.kind = kind
        self._given = given
        self._accepts = accepts
        self._plugs: dict[str, Plug] = {}

    def __call__(self, name: str) -> Callable[[Callable[..., Any]], Any]:
        """Decorator that registers a function or class under `name` and returns it unchanged."""

        def register(target: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._plugs:
                raise ValueError(f"the {self.kind} {name!r} is registered already")
            self._plugs[name] = self._plug(name, target)
            return target

        return register

    def __iter__(self) -> Iterator[Plug]:
        return iter(self._plugs.values())

    def names(self) -> list[str]:
        return list(self._plugs)

    def get(self, name: Any, place: str = "") -> Plug:
        """The plug called `name`, or the one that a name "package.module:attribute" imports, or that an object is.

        Raises ExperimentError with the nearest right name where there is none.
        """
        name = plain(name)
        where = f"{place or self.kind} = {show(name)}"
        if not isinstance(name, str):
            raise ExperimentError(f"{where}: must be a name")
        if name in self._plugs:
            return self._plugs[name]
        if not isinstance(name, ObjectName):
            self._require_path(name, where)
        try:
            target = import_object(name)
            return self._plug(name_of(target) if name.startswith("__main__:") else name, target)
        except ImportRefusedError as error:
            raise ImportRefusedError(f"{where}: {error}") from None
        except TypeError as error:
            raise ExperimentError(f"{where}: cannot be used: {cut(' '.join(str(error).split()))}") from error
        except Exception as error:
            verb = "used" if isinstance(name, ObjectName) else "imported"
            raise ExperimentError(f"{where}: cannot be {verb}: {one_line(error)}") from error

    def _require_path(self, name: str, where: str) -> None:
        """Raise ExperimentError, with what to write, unless a name that is not registered may be an import path."""
        if path := _as_import_path(name):
            raise ExperimentError(f"{where}: write {cut(path)}")
        if NOTE.fullmatch(name):
            raise ExperimentError(
                f"{where}: stands for an object of a Python program, which a file cannot hold; use Python and give the "
                "object: fedsim.run(experiment, folder, resume=True)"
            )
        if ":" not in name:
            raise ExperimentError(f"{where}: no such {self.kind}; {self._nearest(name)}")

    def _nearest(self, name: str) -> str:
        """The hint for a name that this registry does not have."""
        hint = nearest(name, self._plugs)
        if not hint.startswith("allowed"):
            return hint
        from fedsim.listing import PLUGS, registry_of  # which imports all that registers plugs

        others = [key for kind, (key, _) in PLUGS.items() if name in registry_of(kind).names()]
        return f"{name} goes with {' or '.join(others)}" if others else f'{hint}, or your own as "package.module:name"'

    def _plug(self, name: str, target: Callable[..., Any]) -> Plug:
        if not callable(target) and (self._given or not dataclasses.is_dataclass(target)):
            raise TypeError(f"a {type(target).__name__} is not {self._accepts}")
        if not _has_signature(target):
            raise TypeError(f"has no signature; write a function of ({', '.join(self._given)}) that calls it")
        if not self._given:
            return Plug(self.kind, name, target, _parameters(target, keyword_only=False), siblings=self)
        is_dataclass = dataclasses.is_dataclass(target)
        takes = taken_by_name(target.__call__ if is_dataclass else target, self._given)
        return Plug(self.kind, name, target, _parameters(target, keyword_only=not is_dataclass), takes, self)


def _as_in_a_file(value: Any) -> Any:
    """An enumeration's value, or a path as a string. Raises TypeError for other types."""
    return value.value if isinstance(value, enum.Enum) else os.fspath(value)


def _has_signature(target: Callable[..., Any]) -> bool:
    """Whether Python knows the parameters of a function; not so of some that are written in C."""
    try:
        inspect.signature(target)
    except (TypeError, ValueError):
        return dataclasses.is_dataclass(target)
    return True


def taken_by_name(target: Callable[..., Any], given: Sequence[str]) -> dict[str, bool]:
    """Which of the `given` names a function takes by position, and whether it has to be given them.

    Raises TypeError where it takes anything else by position.
    """
    parameters = inspect.signature(target).parameters.values()
    takes = {p.name: p.default is p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}
    if strange := [name for name in takes if name not in given]:
        raise TypeError(
            f"the argument {strange[0]} is not one that fedsim passes ({', '.join(given)}); "
            "parameters that configure it come after *"
        )
    return takes


def _as_import_path(name: str) -> str | None:
    """How a name that is the path of a file, or has a dot for the colon, is written as an import path; else None."""
    file, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        file, attribute = name, "NAME"
    if ":" not in name and "." in name and not re.search(r"[/\\]|\.py$", name):
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute}, with a colon"
    if not re.search(r"[/\\]|\.py$", file):
        return None
    path = PureWindowsPath(file)  # it takes slashes of both kinds
    inside = PurePosixPath(os.path.relpath(path.as_posix()))
    if path.drive or ".." in inside.parts:
        return f"{path.stem}:{attribute}, and start fedsim in {path.parent.as_posix()} or add that folder to PYTHONPATH"
    return f"{'.'.join(inside.with_suffix('').parts)}:{attribute}, without slashes and .py"


def import_object(path: str) -> Callable[..., Any]:
    """The callable that "package.module:attribute" names, the working directory's own modules included.

    Raises ImportRefusedError where a file names it that may not; see `fedsim.permission`.
    """
    if isinstance(path, ObjectName):
        return path.target
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # console scripts, unlike `python script.py`, start without it
    require_importable(path)
    if module.partition(".")[0] == "torchvision":
        import_torchvision()
    target: Any = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
        require_own(path, target)
    if not callable(target):
        raise TypeError(f"{path} is of type {type(target).__name__}, not a function or class")
    return target


def _parameters(target: Callable[..., Any], *, keyword_only: bool) -> type[BaseModel]:
    """A pydantic model of the parameters of `target` that configure it; an instance of a dataclass has none."""
    fields: dict[str, Any] = {}
    extra = "forbid"
    is_dataclass = dataclasses.is_dataclass(target)
    if is_dataclass and not isinstance(target, type):
        return create_model("no_parameters", __config__=ConfigDict(extra=extra))
    hints = get_type_hints(target, include_extras=True) if is_dataclass else {}  # of each base in its own module
    for parameter in inspect.signature(target, eval_str=not is_dataclass).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind is parameter.KEYWORD_ONLY or (
            not keyword_only and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            empty = parameter.empty
            annotation = hints.get(parameter.name, Any if parameter.annotation is empty else parameter.annotation)
            fields[parameter.name] = (annotation, ... if parameter.default is empty else parameter.default)
    config = ConfigDict(
        extra=extra, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )
    return create_model(f"{getattr(target, '__name__', 'plug')}_parameters", __config__=config, **fields)
