"""Components: the functions and dataclasses that an experiment refers to by name.

A component is registered under its standard name in the literature. Its keyword parameters are its configuration:

    @rule("krum")
    def krum(updates, weights, *, f: int) -> Tensor: ...

An experiment with `aggregate.rule = "krum"` and `aggregate.f = 2` is checked against that signature. A name of the form
"package.module:attribute" imports the component, so users do not need to register their components.
`fedsim.core.import_policy` decides which modules a file may import. In Python the function or class itself can replace
the name (`fedsim.core.objects`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

from fedsim.core.import_policy import ImportRefusedError, import_object
from fedsim.core.numbers import UNSURE, fitted
from fedsim.core.objects import ObjectName, holds_objects, name_of, names_in, plain
from fedsim.errors import MAX_PROBLEMS, DataError, ExperimentError, cut, one_line, show
from fedsim.hints.components import component_name_error, parameter_hint
from fedsim.hints.meanings import nearest_key

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typing_extensions import Self


@dataclass(frozen=True)
class Registration:
    """A component (function, class or dataclass) that settings can select by name, and its parameters.

    Attributes:
        kind: kind of component for error messages, such as `aggregation rule`.
        name: registered name or import path.
        target: function, class, or instance of a dataclass.
        takes: inputs that the simulator passes to the component: a dict from name to whether the input is required.
        siblings: all registered components of the same kind.
        imported: False for a registered component, True for an import path or a Python object.
    """

    kind: str
    name: str
    target: Any
    takes: dict[str, bool] = dataclasses.field(default_factory=dict)
    siblings: Iterable[Registration] = dataclasses.field(default=(), repr=False, compare=False)
    imported: bool = False

    @functools.cached_property
    def fields(self) -> dict[str, inspect.Parameter]:
        """The component's parameters by name, with evaluated annotations."""
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        is_dataclass = dataclasses.is_dataclass(self.target)
        inputs = () if is_dataclass else self.takes
        hints: dict[str, Any] = {}
        for base in reversed(self.target.__mro__) if is_dataclass and isinstance(self.target, type) else ():
            # evaluates annotations in the module of the base; get_type_hints fails at KW_ONLY in Python 3.10
            hints |= inspect.get_annotations(base, eval_str=True)
        fields = {}
        for field in _signature(self.target, eval_str=not is_dataclass):
            if field.kind in kinds and field.name not in inputs:
                annotation = Any if field.annotation is field.empty else field.annotation
                fields[field.name] = field.replace(annotation=hints.get(field.name, annotation))
        return fields

    @functools.cached_property
    def parameters(self) -> type[BaseModel]:
        """The pydantic model that checks the component's parameters, created on first access."""
        from fedsim.core.parameter_model import parameter_model

        kept = _models.setdefault(self.target, {}) if isinstance(self.target, type | FunctionType) else {}
        key = tuple(self.fields)  # imported components are registered again and again
        if key not in kept:
            name = getattr(self.target, "__name__", "registration")
            kept[key] = parameter_model(name, self.fields, self.accepts_any)
        return kept[key]

    @property
    def parameter_names(self) -> Sequence[str]:
        """The names of the component's parameters."""
        return list(self.fields)

    @functools.cached_property
    def accepts_any(self) -> bool:
        """Whether the component has a parameter `**params`."""
        return any(field.kind is field.VAR_KEYWORD for field in _signature(self.target))

    @property
    def summary(self) -> str:
        """The first line of the component's docstring."""
        return (inspect.getdoc(self.target) or "").split("\n", 1)[0]

    def check(self, values: dict[str, Any], place: str = "", beside: Iterable[str] = ()) -> dict[str, Any]:
        """Check the values of the component's parameters, and return them with defaults added.

        Args:
            values: parameters by name.
            place: dotted key of the table that contains the parameters, for error messages.
            beside: other keys of that table, which an error message may suggest.

        Raises ExperimentError with one line per unknown name, missing parameter or invalid value.
        """
        values, fields = plain(values), self.fields
        where = f"{place}." if place else ""
        unknown = [] if self.accepts_any else [name for name in values if name not in fields]
        objects = [name for name, value in values.items() if any(names_in(value)) and name not in unknown]
        lines = [
            f"{where}{name} = {show(values[name])}: a parameter cannot be a Python object; "
            f"pass the {self.kind} as a function that sets this parameter"
            for name in objects
        ]
        lines += parameter_errors({k: values[k] for k in unknown}, [self], self.kind, self.siblings, place, beside)
        known = {name: value for name, value in values.items() if name not in {*unknown, *objects}}
        checked = {k: fitted(fields[k].annotation, value) if k in fields else value for k, value in known.items()}
        missing = [name for name, field in fields.items() if field.default is field.empty and name not in known]
        if missing or any(value is UNSURE for value in checked.values()):
            from fedsim.core.parameter_model import checked_by_pydantic

            checked, errors = checked_by_pydantic(self.parameters, known, place)
            lines += errors
        if lines:
            raise ExperimentError(*lines)
        defaults = {name: field.default for name, field in fields.items() if not holds_objects(field.default)}
        named = copy.deepcopy(defaults) | checked
        return {name: named[name] for name in [*fields, *checked] if name in named}

    def bind(self, params: dict[str, Any]) -> Any:
        """Return the component with its parameters set, in a form that can be pickled."""
        if dataclasses.is_dataclass(self.target):
            return self.target(**params) if isinstance(self.target, type) else self.target
        if self.imported:
            return Imported(self.name, params)
        return functools.partial(self.target, **params)

    def select_inputs(self, **inputs: Any) -> dict[str, Any]:
        """Return the `inputs` that this component accepts."""
        return {name: inputs[name] for name in self.takes}


def parameter_errors(
    values: Mapping[str, Any],
    components: Sequence[Registration],
    kind: str,
    siblings: Iterable[Registration],
    place: str = "",
    beside: Iterable[str] = (),
) -> list[str]:
    """Return one error line for each unknown parameter.

    Args:
        values: parameters by name.
        components: selected components. A parameter is known if any of these components has it.
        kind: kind of the components, such as `aggregation rule`.
        siblings: all registered components of this kind, for hints.
        place: dotted key of the table that contains the parameters.
        beside: other keys of that table, for hints.
    """
    known = {name for registration in components for name in registration.parameter_names}
    unknown = (
        []
        if any(registration.accepts_any for registration in components)
        else [name for name in values if name not in known]
    )
    names = " + ".join(registration.name for registration in components)
    lines = []
    for name in unknown[:MAX_PROBLEMS]:
        owners = sorted({registration.name for registration in siblings if name in registration.parameter_names})
        hint = parameter_hint(name, values[name], place, known, beside)
        if not hint and owners:
            others = f"; {names} has {', '.join(sorted(known))}" if known else ""
            hint = f"{name} is a parameter of {', '.join(owners)}{others}"
        hint = hint or nearest_key(name, [*beside, *sorted(known)], place or None, values[name])
        where = f"{place}." if place else ""
        lines.append(f"{where}{name} = {show(values[name])}: unknown key (the {kind} is {names}); {hint}")
    return lines


@dataclass(frozen=True)
class Component:
    """A component with its parameters, which the simulator calls. Can be pickled.

    Attributes:
        function: function with its parameters, or instance of a dataclass.
        name: name of the component.
        accepts: inputs of the component: a dict from name to whether the input is required.
    """

    function: Callable[..., Any]
    name: str
    accepts: Mapping[str, bool]

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> Self:
        """Create the component.

        Args:
            registration: the component.
            params: its parameters, already checked.
            settings: values of further fields that a subclass has.
        """
        return cls(registration.bind(params), registration.name, registration.takes, **settings)

    def on(self, inputs: Mapping[str, Any]) -> Any:
        """Call the component with the inputs that it accepts, and return its result."""
        return self.function(**{name: inputs[name] for name in self.accepts})


class Imported:
    """An unregistered component with its parameters, given by an import path or by the name of an object."""

    def __init__(self, path: str, params: dict[str, Any]) -> None:
        self._path, self._params = path, params
        self._target = import_object(path)

    def __call__(self, **inputs: Any) -> Any:
        return self._target(**{**self._params, **inputs})

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

    The positional parameters of a component are its inputs, which the simulator passes. Its keyword-only parameters, or
    the fields of a dataclass, can be set by the user. If a kind has no inputs, users can set all parameters.

    Args:
        kind: kind of component for error messages, such as `aggregation rule`.
        inputs: names of the inputs that the simulator can pass.
        traits: names of attributes that the decorator can set on a component, such as `columnwise` of a rule.
        accepts: what a component can be, for error messages.
        base: base class of all components, which must be dataclasses. None: any callable is accepted.
        component: class of the objects that `bind` returns, such as a subclass of `Component`.

    >>> rule = Registry("aggregation rule", inputs=("updates", "weights"))
    >>> @rule("first")
    ... def first(updates, *, index: int = 0): return updates[index]
    >>> rule.get("first").check({"index": 2})
    {'index': 2}
    """

    kind: str
    _: KW_ONLY
    inputs: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    accepts: str = "a function or a class"
    base: type | None = None
    component: type[Component] | None = None
    _components: dict[str, Registration] = dataclasses.field(default_factory=dict, init=False)
    families: dict[str, Callable[[str], Any]] = dataclasses.field(default_factory=dict, init=False)

    def __call__(self, name: str, **traits: Any) -> Callable[[Callable[..., Any]], Any]:
        """Return a decorator that registers a function or class under `name` and sets its `traits`."""
        if unknown := traits.keys() - self.traits:
            raise TypeError(
                f"the {self.kind} {name!r} does not accept {', '.join(unknown)}; allowed: {', '.join(self.traits)}"
            )

        def register(target: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._components:
                raise ValueError(f"the {self.kind} {name!r} is already registered; use another name")
            self._components[name] = self._registration(name, target)
            for trait, value in traits.items():
                setattr(target, trait, value)
            return target

        return register

    def family(self, prefix: str) -> Callable[[Callable[[str], Any]], Any]:
        """Return a decorator that registers the components `prefix:NAME` of another library.

        The decorated function gets NAME and returns the component. If the component does not exist, the function raises
        LookupError with a hint.
        """

        def register(make: Callable[[str], Any]) -> Callable[[str], Any]:
            self.families[prefix] = make
            return make

        return register

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._components.values())

    def names(self) -> list[str]:
        """Return the names of all registered components."""
        return list(self._components)

    def get(self, name: Any, place: str = "") -> Registration:
        """Return the component for a registered name, an import path, or a Python object such as a function.

        `place`: key of the setting, for error messages. Raises ExperimentError if there is no such component.
        """
        name = plain(name)
        if isinstance(name, str) and name in self._components:
            return self._components[name]
        where = f"{place or self.kind} = {show(name)}"
        if not isinstance(name, str):
            raise ExperimentError(f'{where}: must be the name of a registered {self.kind}, or "package.module:name"')
        prefix, _, member = name.partition(":")
        if prefix in self.families and not isinstance(name, ObjectName):
            try:
                return self._registration(name, self.families[prefix](member))
            except LookupError as error:
                raise ExperimentError(f"{where}: {error.args[0]}") from None
        if not isinstance(name, ObjectName) and (
            line := component_name_error(self.kind, name, where, place, self._components)
        ):
            raise ExperimentError(line)
        try:
            target = import_object(name)
            name = name_of(target) if name.startswith("__main__:") else name
            registration = dataclasses.replace(self._registration(name, target), imported=True)
            registration.fields  # noqa: B018  # raises an error if an annotation cannot be evaluated
            return registration
        except (ImportRefusedError, DataError) as error:
            raise type(error)(f"{where}: {error}") from None
        except TypeError as error:
            raise ExperimentError(f"{where}: cannot be used: {cut(' '.join(str(error).split()))}") from error
        except Exception as error:
            verb = "used" if isinstance(name, ObjectName) else "imported"
            raise ExperimentError(f"{where}: cannot be {verb}: {one_line(error)}") from error

    def bind(self, registration: Registration, params: dict[str, Any], **settings: Any) -> Any:
        """Return the component with its parameters, as the object that the simulator calls.

        Args:
            registration: one of this registry's components.
            params: its parameters, already checked.
            settings: further fields of the returned object, if this registry has a class `component`.
        """
        return self.component.of(registration, params, **settings) if self.component else registration.bind(params)

    def _registration(self, name: str, target: Any) -> Registration:
        kind = target if isinstance(target, type) else type(target)
        if self.base and not (issubclass(kind, self.base) and dataclasses.is_dataclass(kind)):
            package = self.base.__module__.rpartition(".")[0]
            raise TypeError(f"the {self.kind} must be a dataclass that derives from {package}.{self.base.__name__}")
        if missing := getattr(kind, "__abstractmethods__", None):
            raise TypeError(f"the {self.kind} must define {min(missing)}")
        is_dataclass = dataclasses.is_dataclass(target)
        if not callable(target) and (self.inputs or not is_dataclass):
            raise TypeError(f"the {self.kind} must be {self.accepts}, not an object of type {type(target).__name__}")
        if not _has_signature(target):
            raise TypeError(
                f"the {self.kind} has no signature that Python can read; write a function of "
                f"({', '.join(self.inputs)}) that calls it"
            )
        takes = {}
        if self.inputs:
            takes = taken_by_name(target.__call__ if is_dataclass else target, self.inputs)
        return Registration(self.kind, name, target, takes, self)


def _has_signature(target: Callable[..., Any]) -> bool:
    """Whether Python knows the parameters of a callable, which is not the case for some C functions."""
    try:
        inspect.signature(target)
    except (TypeError, ValueError):
        return dataclasses.is_dataclass(target)
    return True


def taken_by_name(target: Callable[..., Any], inputs: Sequence[str]) -> dict[str, bool]:
    """Return the function's positional parameters: a dict from name to whether the parameter is required.

    Raises TypeError if a positional parameter is not in `inputs`.
    """
    parameters = inspect.signature(target).parameters.values()
    takes = {p.name: p.default is p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}
    if unknown := [name for name in takes if name not in inputs]:
        raise TypeError(
            f"fedsim does not pass the argument {unknown[0]}, only {', '.join(inputs)}; "
            "put parameters for configuration after *"
        )
    return takes


# pydantic models of functions and classes, by the names of the parameters
_models = weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], "type[BaseModel]"]]()


def _signature(target: Callable[..., Any], eval_str: bool = False) -> Collection[inspect.Parameter]:
    """Return the parameters of a function or class, or none for an instance of a dataclass."""
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        return ()
    return inspect.signature(target, eval_str=eval_str).parameters.values()


def in_chain(value: Any) -> Any:
    """Return the names in a text such as "nnm+krum", as tables show a list of names. Other values stay as they are.

    >>> from fedsim.core.registry import in_chain
    >>> in_chain("nnm + krum"), in_chain("krum")
    (['nnm', 'krum'], 'krum')
    """
    return [name.strip() for name in value.split("+")] if type(value) is str and "+" in value else value


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
