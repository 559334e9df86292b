"""Plugs: functions and dataclasses that an experiment names.

A plug is registered under its standard name in the literature, and its keyword parameters ARE its configuration:

    @rule("krum")
    def krum(updates, weights, *, f: int) -> Tensor: ...

An experiment that says `aggregate.rule = "krum"`, `aggregate.f = 2` is checked against that signature. A name of the
form "package.module:attribute" imports a plug instead of looking it up, so a user's own needs no registration.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedsim.errors import ExperimentError, explain, nearest, one_line, show
from fedsim.vision import import_torchvision


@dataclass(frozen=True)
class Plug:
    """A registered (or imported) callable together with the parameters that configure it."""

    kind: str
    name: str
    target: Callable[..., Any]
    parameters: type[BaseModel]

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.target) or "").split("\n", 1)[0]

    def check(self, values: dict[str, Any], place: str = "", beside: Iterable[str] = ()) -> dict[str, Any]:
        """`values` checked against the signature, with the defaults filled in.

        `place` is the table of the experiment that holds them, `beside` the other keys that table allows.
        Raises ExperimentError with one line per unknown name, missing parameter or impossible value.
        """
        known = set(self.parameters.model_fields)
        where = f"{place}." if place else ""
        accepts_any = self.parameters.model_config.get("extra") == "allow"
        unknown = [] if accepts_any else [name for name in values if name not in known]
        lines = [
            f"{where}{name} = {show(values[name])}: unknown key (the {self.kind} is {self.name}); "
            + nearest(name, [*beside, *self.parameters.model_fields])
            for name in unknown
        ]
        try:
            checked = self._validated({name: value for name, value in values.items() if name not in unknown})
        except ValidationError as error:
            raise ExperimentError(*lines, *explain(error, self.parameters, place)) from None
        if lines:
            raise ExperimentError(*lines)
        named = {name: getattr(checked, name) for name in self.parameters.model_fields}
        return {**named, **(checked.model_extra or {})}

    def _validated(self, values: dict[str, Any]) -> BaseModel:
        try:
            return self.parameters(**values)
        except ValidationError as error:
            try:  # a file has arrays for tuples, and strings for paths and enumerations, as JSON does
                return self.parameters.model_validate_json(json.dumps(values))
            except (TypeError, ValueError):
                raise error from None

    def bind(self, params: dict[str, Any]) -> Any:
        """The plug with its parameters, which can be pickled to another process: of a dataclass, an instance."""
        if dataclasses.is_dataclass(self.target):
            return self.target(**params)
        if ":" in self.name:
            return Imported(self.name, params)
        return functools.partial(self.target, **params)


class Imported:
    """A plug given by its import path, with its parameters; it travels as that path, and is imported there anew."""

    def __init__(self, path: str, params: dict[str, Any]) -> None:
        self._path, self._params = path, params
        self._target = import_object(path)

    def __call__(self, *given: Any) -> Any:
        return self._target(*given, **self._params)

    def __reduce__(self) -> tuple[type[Imported], tuple[str, dict[str, Any]]]:
        return Imported, (self._path, self._params)


class Registry:
    """All plugs of one kind, by name.

    `given` names the positional parameters that the simulator passes itself, of which a plug may leave out the last:
    only what is keyword-only is configuration then. Of dataclasses and model factories, which are given nothing, every
    parameter is.
    """

    def __init__(self, kind: str, *, given: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._given = given
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

    def get(self, name: str, place: str = "") -> Plug:
        """The plug called `name`, or the one that a name "package.module:attribute" imports.

        Raises ExperimentError with the nearest right name where there is none.
        """
        if name in self._plugs:
            return self._plugs[name]
        where = f"{place or self.kind} = {show(name)}"
        if ":" not in name:
            hint = nearest(name, self._plugs)
            raise ExperimentError(f'{where}: no such {self.kind}; {hint}, or your own as "package.module:name"')
        try:
            return self._plug(name, import_object(name))
        except Exception as error:
            raise ExperimentError(f"{where}: cannot be imported: {one_line(error)}") from error

    def _plug(self, name: str, target: Callable[..., Any]) -> Plug:
        positional = positional_parameters(target) if self._given else []
        if tuple(positional) != self._given[: len(positional)]:
            raise TypeError(
                f"takes ({', '.join(positional)}) by position, but what is given to this kind of plug is "
                f"({', '.join(self._given)}); parameters that configure it come after *"
            )
        return Plug(self.kind, name, target, _parameters(target, keyword_only=bool(self._given)))


def positional_parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `target` that can be passed by position, by name."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: p for name, p in inspect.signature(target).parameters.items() if p.kind in by_position}


def import_object(path: str) -> Callable[..., Any]:
    """The callable that "package.module:attribute" names, the working directory's own modules included."""
    module, _, attribute = path.partition(":")
    if module.partition(".")[0] == "torchvision":
        import_torchvision()
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # console scripts, unlike `python script.py`, start without it
    target = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    if not callable(target):
        raise TypeError(f"{path} is a {type(target).__name__}, not a function or class")
    return target


def _parameters(target: Callable[..., Any], *, keyword_only: bool) -> type[BaseModel]:
    """A pydantic model of the parameters of `target` that configure it."""
    fields: dict[str, Any] = {}
    extra = "forbid"
    for parameter in inspect.signature(target, eval_str=True).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind is parameter.KEYWORD_ONLY or (
            not keyword_only and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            empty = parameter.empty
            annotation = Any if parameter.annotation is empty else parameter.annotation
            fields[parameter.name] = (annotation, ... if parameter.default is empty else parameter.default)
    config = ConfigDict(
        extra=extra, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )
    return create_model(f"{getattr(target, '__name__', 'plug')}_parameters", __config__=config, **fields)
