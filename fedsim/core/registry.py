"""Components: the functions and dataclasses that an experiment names.

A component is registered under its standard name in the literature. Its keyword parameters are its configuration:

    @rule("krum")
    def krum(updates, weights, *, f: int) -> Tensor: ...

An experiment with `aggregate.rule = "krum"` and `aggregate.f = 2` is checked against that signature. A name
"package.module:attribute" imports a component instead, so components of users need no registration.
`fedsim.core.import_policy` decides which modules a file may import. In Python a name may be the function or class
itself (`fedsim.core.objects`).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedsim.core.import_policy import ImportRefusedError, import_object
from fedsim.core.objects import ObjectName, holds_objects, name_of, names_in, plain
from fedsim.core.suggestions import component_name_error, parameter_errors
from fedsim.core.validation_errors import explain
from fedsim.errors import ExperimentError, cut, one_line, show

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Registration:
    """A registered or imported callable, with the parameters that configure it.

    Attributes:
        kind: what the component is, for errors: `aggregation rule`.
        name: its registered name, or its import path.
        target: the function, the class, or the instance of a dataclass.
        takes: the names of the inputs that the simulator passes to it, and whether it requires each of them.
        siblings: all registered components of its kind.
    """

    kind: str
    name: str
    target: Any
    takes: dict[str, bool] = dataclasses.field(default_factory=dict)
    siblings: Iterable[Registration] = dataclasses.field(default=(), repr=False, compare=False)

    @functools.cached_property
    def parameters(self) -> type[BaseModel]:
        """A pydantic model of the configuration, made when it is first used."""
        return _parameters(self.target, () if dataclasses.is_dataclass(self.target) else self.takes)

    @property
    def parameter_names(self) -> Sequence[str]:
        return list(self.parameters.model_fields)

    @property
    def accepts_any(self) -> bool:
        """Whether it has a parameter `**params`."""
        return self.parameters.model_config.get("extra") == "allow"

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.target) or "").split("\n", 1)[0]

    def check(self, values: dict[str, Any], place: str = "", beside: Iterable[str] = ()) -> dict[str, Any]:
        """Check values of parameters against the signature, and add the defaults that a file can hold.

        Args:
            values: the parameters by name.
            place: the table of the experiment that holds them, for errors.
            beside: the other keys of that table, for hints.

        Raises ExperimentError, one line per unknown name, missing parameter or invalid value.
        """
        values, fields = plain(values), self.parameters.model_fields
        where = f"{place}." if place else ""
        unknown = [] if self.accepts_any else [name for name in values if name not in fields]
        objects = [name for name, value in values.items() if any(names_in(value)) and name not in unknown]
        lines = [
            f"{where}{name} = {show(values[name])}: a parameter cannot be an object; "
            f"give the {self.kind} as a function that sets it"
            for name in objects
        ]
        lines += parameter_errors({k: values[k] for k in unknown}, [self], self.kind, self.siblings, place, beside)
        try:
            checked = self._validated({k: value for k, value in values.items() if k not in {*unknown, *objects}})
        except ValidationError as error:
            raise ExperimentError(*lines, *explain(error, self.parameters, place)) from None
        if lines:
            raise ExperimentError(*lines)
        named = {k: getattr(checked, k) for k in fields if k in values or not holds_objects(fields[k].default)}
        return {**named, **(checked.model_extra or {})}

    def _validated(self, values: dict[str, Any]) -> BaseModel:
        try:
            return self.parameters(**values)
        except ValidationError as error:
            try:  # as JSON does, accept arrays as tuples, and strings as paths and enumerations
                return self.parameters.model_validate_json(json.dumps(values, default=_as_json))
            except (TypeError, ValueError):
                raise error from None

    def bind(self, params: dict[str, Any]) -> Any:
        """The component with its parameters, which can be pickled: an instance if the component is a dataclass."""
        if dataclasses.is_dataclass(self.target):
            return self.target(**params) if isinstance(self.target, type) else self.target
        if isinstance(self.name, ObjectName) or ":" in self.name:
            return Imported(self.name, params)
        return functools.partial(self.target, **params)

    def given(self, **inputs: Any) -> dict[str, Any]:
        """The inputs that this component takes."""
        return {name: inputs[name] for name in self.takes}


@dataclass(frozen=True)
class Component:
    """A component with its parameters, which takes inputs from the simulator when it is called. It can be pickled.

    Attributes:
        function: the function with its parameters, or the instance of the dataclass.
        name: of the component.
        accepts: the names of its inputs, and whether it requires each of them.
    """

    function: Callable[..., Any]
    name: str
    accepts: Mapping[str, bool]

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> Self:
        """The component with checked parameters; `settings` are further fields of the class."""
        return cls(registration.bind(params), registration.name, registration.takes, **settings)

    def on(self, inputs: Mapping[str, Any]) -> Any:
        """Call the function with those of the inputs that it takes."""
        return self.function(**{name: inputs[name] for name in self.accepts})


class Imported:
    """A component given by its import path, or as an object, with its parameters.

    When it is unpickled, the path is imported again; an object is pickled with its name.
    """

    def __init__(self, path: str, params: dict[str, Any]) -> None:
        self._path, self._params = path, params
        self._target = import_object(path)

    def __call__(self, **given: Any) -> Any:
        return self._target(**{**self._params, **given})

    def __repr__(self) -> str:
        return f"Imported({self._path!r}, {self._params!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Imported:
        copied = Imported(self._path, self._params)
        copied._target = copy.deepcopy(self._target, memo)
        return copied

    def __reduce__(self) -> tuple[type[Imported], tuple[str, dict[str, Any]]]:
        return Imported, (self._path, self._params)


@dataclass(eq=False, repr=False)
class Registry:
    """All components of one kind, by name.

    A component declares the inputs that it takes as positional parameters; its keyword-only parameters are its
    configuration. If the simulator gives no inputs (models, client algorithms), all parameters are configuration. The
    fields of a dataclass are its configuration; it takes inputs when it is called.

    Args:
        kind: what the components are, for errors: `aggregation rule`.
        given: the names of the inputs that the simulator can pass.
        traits: attributes of a component that the decorator can set, such as `columnwise` of a rule.
        accepts: the objects that can be a component, for errors.
        base: the class that components must derive from, as dataclasses; None: any callable.
        component: the class of a component with its parameters; None: what `Registration.bind` returns.

    >>> rule = Registry("aggregation rule", given=("updates", "weights"))
    >>> @rule("first")
    ... def first(updates, *, index: int = 0): return updates[index]
    >>> rule.get("first").check({"index": 2})
    {'index': 2}
    """

    kind: str
    _: KW_ONLY
    given: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    accepts: str = "a function or a class"
    base: type | None = None
    component: type[Component] | None = None
    _components: dict[str, Registration] = dataclasses.field(default_factory=dict, init=False)

    def __call__(self, name: str, **traits: Any) -> Callable[[Callable[..., Any]], Any]:
        """Decorator that registers a function or class under `name`, sets its `traits`, and returns it."""
        if unknown := traits.keys() - self.traits:
            raise TypeError(f"the {self.kind} {name!r} has no trait {', '.join(unknown)}; allowed: {self.traits}")

        def register(target: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._components:
                raise ValueError(f"the {self.kind} {name!r} is registered already")
            self._components[name] = self._registration(name, target)
            for trait, value in traits.items():
                setattr(target, trait, value)
            return target

        return register

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._components.values())

    def names(self) -> list[str]:
        return list(self._components)

    def get(self, name: Any, place: str = "") -> Registration:
        """The component that is registered as `name`, or that an import path or an object gives.

        Raises ExperimentError, with the nearest right name, if there is none. `place` is the key of the experiment.
        """
        name = plain(name)
        where = f"{place or self.kind} = {show(name)}"
        if not isinstance(name, str):
            raise ExperimentError(f"{where}: must be a name")
        if name in self._components:
            return self._components[name]
        if not isinstance(name, ObjectName) and (
            line := component_name_error(self.kind, name, where, self._components)
        ):
            raise ExperimentError(line)
        try:
            target = import_object(name)
            registration = self._registration(name_of(target) if name.startswith("__main__:") else name, target)
            registration.parameters  # noqa: B018  # raises an error if an annotation cannot be evaluated
            return registration
        except ImportRefusedError as error:
            raise ImportRefusedError(f"{where}: {error}") from None
        except TypeError as error:
            raise ExperimentError(f"{where}: cannot be used: {cut(' '.join(str(error).split()))}") from error
        except Exception as error:
            verb = "used" if isinstance(name, ObjectName) else "imported"
            raise ExperimentError(f"{where}: cannot be {verb}: {one_line(error)}") from error

    def bind(self, registration: Registration, params: dict[str, Any], **settings: Any) -> Any:
        """A component with checked parameters, as the simulator uses it; `settings` belong to the class `component`."""
        return self.component.of(registration, params, **settings) if self.component else registration.bind(params)

    def _registration(self, name: str, target: Any) -> Registration:
        kind = target if isinstance(target, type) else type(target)
        if self.base and not (issubclass(kind, self.base) and dataclasses.is_dataclass(kind)):
            package = self.base.__module__.rpartition(".")[0]
            raise TypeError(f"must be a dataclass that derives from {package}.{self.base.__name__}")
        is_dataclass = dataclasses.is_dataclass(target)
        if not callable(target) and (self.given or not is_dataclass):
            raise TypeError(f"a {type(target).__name__} is not {self.accepts}")
        if not _has_signature(target):
            raise TypeError(f"has no signature; write a function of ({', '.join(self.given)}) that calls it")
        takes = {}
        if self.given:
            takes = taken_by_name(target.__call__ if is_dataclass else target, self.given)
        return Registration(self.kind, name, target, takes, self)


def _as_json(value: Any) -> Any:
    """An enumeration's value, or a path as a string. Raises TypeError for other types."""
    return value.value if isinstance(value, enum.Enum) else os.fspath(value)


def _has_signature(target: Callable[..., Any]) -> bool:
    """Whether Python knows the parameters of a function; of some functions in C it does not."""
    try:
        inspect.signature(target)
    except (TypeError, ValueError):
        return dataclasses.is_dataclass(target)
    return True


def taken_by_name(target: Callable[..., Any], given: Sequence[str]) -> dict[str, bool]:
    """The positional parameters of a function, and whether each is required.

    Raises TypeError if one of them is not in `given`.
    """
    parameters = inspect.signature(target).parameters.values()
    takes = {p.name: p.default is p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}
    if unknown := [name for name in takes if name not in given]:
        raise TypeError(
            f"the argument {unknown[0]} is not one that fedsim passes ({', '.join(given)}); "
            "parameters that configure it come after *"
        )
    return takes


def _parameters(target: Callable[..., Any], inputs: Collection[str]) -> type[BaseModel]:
    """A pydantic model of the parameters of `target` other than its inputs; an instance of a dataclass has none."""
    fields: dict[str, Any] = {}
    extra: Literal["allow", "forbid"] = "forbid"
    is_dataclass = dataclasses.is_dataclass(target)
    is_instance = is_dataclass and not isinstance(target, type)
    parameters = [] if is_instance else inspect.signature(target, eval_str=not is_dataclass).parameters.values()
    hints: dict[str, Any] = {}
    if isinstance(target, type) and is_dataclass:
        for each in reversed(target.__mro__):  # annotations of a base class are evaluated in its own module
            hints |= inspect.get_annotations(each, eval_str=True)  # get_type_hints fails at KW_ONLY in Python 3.10
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and (
            parameter.name not in inputs
        ):
            annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, annotation), default)
    config = ConfigDict(
        extra=extra, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=()
    )
    return create_model(f"{getattr(target, '__name__', 'registration')}_parameters", __config__=config, **fields)
