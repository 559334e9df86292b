"""Components and keys of an experiment, read from fedsim's source code with `ast`.

The command line can therefore report mistakes and list components without importing PyTorch, which takes seconds. Code
that runs an experiment uses the registries and the pydantic tables instead.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.config.components import COMPONENTS
from fedsim.core.suggestions import VOCABULARY
from fedsim.synonyms import KEYS

PACKAGE = Path(__file__).parent.parent

DECLARATION = re.compile(r'^(?:(class \w+)|@?(\w+)\("|(\w+) = \w*Registry\(\s*"([^"]+)"(,\s*inputs=)?)', re.M)
NO_PARAMETER = re.compile(r": (ClassVar|KW_ONLY)|init=False")  # in a dataclass field
KIND_OF_KEY = {
    key: kind for kind, (keys, _) in reversed(COMPONENTS.items()) for key in keys.split(", ")
}  # reversed, so that aggregate.rule leads to rules and not to pre-aggregators


@dataclass(frozen=True)
class SourceComponent:
    """A component's name and parameter names, read from its source code without importing it."""

    name: str
    parameter_names: tuple[str, ...]
    accepts_any: bool


@dataclass(frozen=True)
class SourceTable:
    """A table of an experiment.

    Attributes:
        keys: names of the keys, including nested tables.
        tables: nested tables by key.
        lists: for each key that contains a list of tables, the table in the list.
        kind: kind of component that the table names. None if the table names no component.
        named_by: key that names the component. "" if the table names no component.
        default: default value of the key `named_by`.
        takes_list: whether the key `named_by` may also be a list of names and tables.
        alternatives: mutually exclusive keys.
    """

    keys: tuple[str, ...]
    tables: dict[str, SourceTable]
    lists: dict[str, SourceTable]
    kind: str | None = None
    named_by: str = ""
    default: str | None = None
    takes_list: bool = False
    alternatives: tuple[str, ...] = ()

    def is_name(self, value: Any) -> bool:
        """Whether `value` can replace the table, because it has the type of the key `named_by`."""
        return isinstance(value, (str, list) if self.takes_list else str)


@functools.cache
def experiment_table() -> SourceTable:
    """Return the keys and tables of an experiment."""
    return _table("Experiment")


@functools.cache
def component_tables() -> dict[str, SourceTable]:
    """Return the tables that select a component, by dotted key (such as `clock.slowdown`), except tables in lists."""

    def inner(table: SourceTable, prefix: str) -> Iterator[tuple[str, SourceTable]]:
        for key, below in table.tables.items():
            if below.kind:
                yield f"{prefix}{key}", below
            yield from inner(below, f"{prefix}{key}.")

    return dict(inner(experiment_table(), ""))


@functools.cache
def source_components(kind: str) -> dict[str, SourceComponent]:
    """Return the registered components of a kind by name.

    >>> source_components("rules")["krum"].parameter_names
    ('f',)
    """
    registry = _registry(kind)
    takes_inputs = _declarations().registries[registry][1]
    return {
        name: SourceComponent(name, *_parameters(target, takes_inputs))
        for path in _declarations().files.get(registry, ())
        for statement in _body(path)
        for name, target in _registrations(statement, registry)
    }


@functools.cache
def title_of(kind: str) -> str:
    """Return what error messages call a component of this kind, such as `aggregation rule` for `rules`."""
    return _declarations().registries[_registry(kind)][0]


def keys_of_component(name: str) -> list[str]:
    """Return the keys of an experiment that can name the component `name`."""
    return [key for kind, (key, _) in COMPONENTS.items() if name in source_components(kind)]


def keys_called(name: str) -> list[str]:
    """Return the dotted keys that `name` may mean: `name` itself, keys that end with it, or keys with this synonym."""
    if name.partition(".")[0] in experiment_table().keys:
        return [name]
    return list(KEYS.get(name) or keys_of_tables({}).get(name, []))


def keys_of_tables(tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the dotted keys that end with each key, for hints: {"lr": ["local.lr", "server.lr"], ...}.

    For a parameter, these are the dotted keys in the components that the experiment `tables` selects. If no selected
    component has this parameter, they are the dotted keys in all other components.
    """
    with_these: dict[str, list[str]] = {}
    with_others: dict[str, list[str]] = {}
    for place, table in experiment_table().tables.items():
        for key in table.keys:
            with_these.setdefault(key, []).append(f"{place}.{key}")
        if table.kind:
            named = tables.get(place)
            named = named.get(table.named_by) if isinstance(named, Mapping) else named
            components = source_components(table.kind)
            chosen = named if isinstance(named, str) and named in components else table.default
            for registration in components.values():
                for key in registration.parameter_names:
                    if key not in table.keys:
                        places = (with_these if registration.name == chosen else with_others).setdefault(key, [])
                        places.extend({f"{place}.{key}"} - set(places))
    return {**with_others, **with_these}


VOCABULARY.keys_called, VOCABULARY.keys_of_component = keys_called, keys_of_component


class _Declarations(NamedTuple):
    files: dict[str, list[Path]]  # by "class NAME", or by the name of a decorator that registers components
    registries: dict[str, tuple[str, bool]]  # by name: title of a component, and whether it takes inputs


@functools.cache
def _declarations() -> _Declarations:
    declarations = _Declarations({}, {})
    for path in sorted(PACKAGE.rglob("*.py")):
        for definition, decorator, registry, title, takes in DECLARATION.findall(path.read_text(encoding="utf-8")):
            if registry:
                declarations.registries[registry] = title, bool(takes)
            elif path not in (files := declarations.files.setdefault(definition or decorator, [])):
                files.append(path)
    return declarations


@functools.cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _registry(kind: str) -> str:
    """Return the name of the variable that holds this kind's registry, such as `rule`.

    The registry is also the decorator that registers a component, as in `@rule("krum")`.
    """
    return COMPONENTS[kind][1].partition(":")[2]


def _registrations(statement: ast.stmt, registry: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yield the name and the definition of each component that a statement registers with the decorator `registry`.

    The statement is a definition below `@rule("krum")`, or a call such as `engine("serial")(SerialEngine)`.
    """
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        for decorator in statement.decorator_list:
            if isinstance(decorator, ast.Call) and _name(decorator.func) == registry:
                yield ast.literal_eval(decorator.args[0]), statement
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        register, targets = statement.value.func, statement.value.args
        if isinstance(register, ast.Call) and _name(register) == registry:
            yield ast.literal_eval(register.args[0]), _class(_name(targets[0]))


def _parameters(target: ast.FunctionDef | ast.ClassDef, takes_inputs: bool) -> tuple[tuple[str, ...], bool]:
    """Return the configuration parameters of a function or class, and whether it accepts further parameters."""
    if isinstance(target, ast.ClassDef):
        if _is_dataclass(target):
            fields = _fields(base for base in _bases(target) if _is_dataclass(base))
            return tuple(name for name, field in fields.items() if not NO_PARAMETER.search(ast.unparse(field))), False
        body = (node for base in _bases(target) for node in base.body)
        constructors = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not constructors:
            return (), False
        target = constructors[-1]
    arguments = target.args
    named = [*([] if takes_inputs else arguments.args), *arguments.kwonlyargs]
    return tuple(argument.arg for argument in named if argument.arg != "self"), arguments.kwarg is not None


def _is_dataclass(definition: ast.ClassDef) -> bool:
    return any(_name(decorator) == "dataclass" for decorator in definition.decorator_list)


def _table(class_name: str, place: str = "") -> SourceTable:
    """Return the keys of the table at the dotted key `place`, from the source of the class `class_name`."""
    definition = _class(class_name)
    all_fields = _fields(_bases(definition))
    fields = {name: field for name, field in all_fields.items() if "ClassVar" not in ast.unparse(field)}
    tables, lists = dict[str, SourceTable](), dict[str, SourceTable]()
    for name, field in fields.items():
        for word in ast.walk(field.annotation):
            if isinstance(word, (ast.Name, ast.Attribute)) and _is_table(_name(word)):
                below = _table(_name(word), f"{place}.{name}".lstrip("."))
                (tables if word is field.annotation else lists)[name] = below
    naming_keys = (key for key in fields if key not in lists and f"{place}.{key}" in KIND_OF_KEY)
    naming = next(naming_keys, "name" if place in KIND_OF_KEY else "")
    value = fields[naming].value if naming else None
    assigned = (field for field in definition.body if isinstance(field, ast.Assign))
    return SourceTable(
        keys=tuple(fields),
        tables=tables,
        lists=lists,
        kind=KIND_OF_KEY.get(f"{place}.{naming}", KIND_OF_KEY.get(place)) if naming else None,
        named_by=naming,
        default=None if value is None else ast.literal_eval(value),
        takes_list=bool(naming) and "list[" in ast.unparse(fields[naming].annotation),
        alternatives=next((ast.literal_eval(a.value) for a in assigned if _name(a.targets[0]) == "alternatives"), ()),
    )


@functools.cache
def _class(name: str) -> ast.ClassDef:
    """Return the definition of a fedsim class. Class names are unique in fedsim."""
    (path,) = _declarations().files[f"class {name}"]
    return next(node for node in _body(path) if isinstance(node, ast.ClassDef) and node.name == name)


@functools.cache
def _bases(definition: ast.ClassDef) -> list[ast.ClassDef]:
    """Return the class and its base classes in fedsim, the class itself last."""
    names = [name for name in map(_name, definition.bases) if f"class {name}" in _declarations().files]
    return [*(base for name in names for base in _bases(_class(name))), definition]


def _is_table(name: str) -> bool:
    return f"class {name}" in _declarations().files and any(base.name == "Table" for base in _bases(_class(name)))


def _fields(definitions: Iterable[ast.ClassDef]) -> dict[str, ast.AnnAssign]:
    """Return the annotated fields of classes by name. A field of a later class replaces one of an earlier class."""
    annotated = (field for definition in definitions for field in definition.body if isinstance(field, ast.AnnAssign))
    return {_name(field.target): field for field in annotated}


def _name(node: ast.expr) -> str:
    """Return the name in `name`, `module.name` or `name(...)`, or "" for other expressions."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
