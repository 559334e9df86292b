"""The plugs and the keys of experiments as fedsim's source code declares them.

They are read with `ast`, so that mistakes on the command line are found, and lists and completions are made, without
PyTorch, whose import takes seconds. Code that runs an experiment uses the registries and the pydantic tables.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.config.plugs import PLUGS
from fedsim.core.suggestions import VOCABULARY
from fedsim.synonyms import KEYS

PACKAGE = Path(__file__).parent.parent

DECLARATION = re.compile(r'^(?:class (?P<class>\w+)|@?(?P<plug>\w+)\("|(?P<registry>\w+) = \w*Registry\()', re.M)


@dataclass(frozen=True)
class SourcePlug:
    """A registered plug: its name, the first line of its docstring, and the names of its parameters."""

    name: str
    summary: str
    parameter_names: tuple[str, ...]
    accepts_any: bool


@dataclass(frozen=True)
class SourceTable:
    """A table of an experiment.

    Attributes:
        keys: the names of its keys, inner tables included.
        values: the values that a key may have if they are few, otherwise its default, as on the command line.
        tables: the inner tables by key.
        lists: the tables of which a key holds a list, by key.
        kind: the kind of plug that the table names; None: it names none.
        named_by: the key that names the plug; "" if the table names none.
        default: the value of that key if it is not set.
        takes_list: whether that key may also be a list of names and tables.
        alternatives: keys of which only one may be given.
    """

    keys: tuple[str, ...]
    values: dict[str, list[str]]
    tables: dict[str, SourceTable]
    lists: dict[str, SourceTable]
    kind: str | None = None
    named_by: str = ""
    default: str | None = None
    takes_list: bool = False
    alternatives: tuple[str, ...] = ()

    def is_name(self, value: Any) -> bool:
        """Whether a value has the type of the key `named_by`, so that it can stand for the table."""
        return isinstance(value, (str, list) if self.takes_list else str)


@functools.cache
def experiment_table() -> SourceTable:
    """The keys of an experiment, with its tables."""
    return _table("Experiment")


@functools.cache
def plug_tables() -> dict[str, SourceTable]:
    """The tables that name a plug, by dotted key: `local`, ..., `clock.speed`; without those in lists."""

    def inner(table: SourceTable, prefix: str) -> Iterator[tuple[str, SourceTable]]:
        for key, below in table.tables.items():
            if below.kind:
                yield f"{prefix}{key}", below
            yield from inner(below, f"{prefix}{key}.")

    return dict(inner(experiment_table(), ""))


@functools.cache
def source_plugs(kind: str) -> dict[str, SourcePlug]:
    """The registered plugs of a kind, by name.

    >>> source_plugs("rules")["krum"].parameter_names
    ('f',)
    """
    registry = _registry(kind)
    found = {}
    for path in _files("plug", registry):
        for statement in _body(path):
            for name, target in _registrations(statement, registry):
                summary = (ast.get_docstring(target) or "").split("\n", 1)[0]
                found[name] = SourcePlug(name, summary, *_parameters(target, _takes_inputs(registry)))
    return found


@functools.cache
def title_of(kind: str) -> str:
    """What errors call a plug of a kind: `aggregation rule`."""
    return ast.literal_eval(_registry_call(_registry(kind)).args[0])


def keys_of_plug(name: str) -> list[str]:
    """The keys of experiments that may name a plug."""
    return [key for kind, (key, _) in PLUGS.items() if name in source_plugs(kind)]


def keys_called(name: str) -> list[str]:
    """The dotted keys that `name` may mean: the key itself, the last part of a key, or a synonym of one."""
    if name.partition(".")[0] in experiment_table().keys:
        return [name]
    return list(KEYS.get(name) or keys_of_tables({}).get(name, []))


def keys_of_tables(tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """The dotted keys of each key in a table, for hints: {"lr": ["local.lr", "server.lr"], ...}.

    Parameters of plugs that `tables` do not name are listed only if no named plug has such a parameter.
    """
    with_these: dict[str, list[str]] = {}
    with_others: dict[str, list[str]] = {}
    for place, table in experiment_table().tables.items():
        for key in table.keys:
            with_these.setdefault(key, []).append(f"{place}.{key}")
        if table.kind:
            named = tables.get(place)
            named = named.get(table.named_by) if isinstance(named, Mapping) else named
            plugs = source_plugs(table.kind)
            chosen = named if isinstance(named, str) and named in plugs else table.default
            for plug in plugs.values():
                for key in plug.parameter_names:
                    if key not in table.keys:
                        found = (with_these if plug.name == chosen else with_others).setdefault(key, [])
                        found.extend({f"{place}.{key}"} - set(found))
    return {**with_others, **with_these}


VOCABULARY.keys_called, VOCABULARY.keys_of_plug = keys_called, keys_of_plug


@functools.cache
def _declarations() -> dict[tuple[str, str], list[Path]]:
    """The files that declare a class, that register plugs with a decorator, or that make a registry, by its name."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        declared = DECLARATION.finditer(path.read_text(encoding="utf-8"))
        for key in dict.fromkeys((str(each.lastgroup), each[str(each.lastgroup)]) for each in declared):
            found.setdefault(key, []).append(path)
    return found


def _files(what: str, name: str) -> list[Path]:
    return _declarations().get((what, name), [])


@functools.cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _registry(kind: str) -> str:
    """The name of a kind's registry, which is also that of its decorator."""
    return PLUGS[kind][1].partition(":")[2]


@functools.cache
def _registry_call(registry: str) -> ast.Call:
    """`Registry("aggregation rule", given=...)`."""
    (path,) = _files("registry", registry)
    calls = (each.value for each in _body(path) if isinstance(each, ast.Assign) and _name(each.targets[0]) == registry)
    return next(call for call in calls if isinstance(call, ast.Call))


def _takes_inputs(registry: str) -> bool:
    return any(keyword.arg == "given" for keyword in _registry_call(registry).keywords)


def _registrations(statement: ast.stmt, registry: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """The plugs that a statement registers, with their names: `@rule("krum")`, or `engine("serial")(SerialEngine)`."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        for decorator in statement.decorator_list:
            if isinstance(decorator, ast.Call) and _name(decorator.func) == registry:
                yield ast.literal_eval(decorator.args[0]), statement
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        register, targets = statement.value.func, statement.value.args
        if isinstance(register, ast.Call) and _name(register) == registry:
            yield ast.literal_eval(register.args[0]), _class(_name(targets[0]))


def _parameters(target: ast.FunctionDef | ast.ClassDef, takes_inputs: bool) -> tuple[tuple[str, ...], bool]:
    """The parameters that configure a function or class, and whether it accepts others too."""
    if isinstance(target, ast.ClassDef):
        if _is_dataclass(target):
            fields = _fields(each for each in _bases(target) if _is_dataclass(each))
            return tuple(name for name, each in fields.items() if _is_parameter(each)), False
        methods = {
            each.name: each for base in _bases(target) for each in base.body if isinstance(each, ast.FunctionDef)
        }
        if "__init__" not in methods:
            return (), False
        target = methods["__init__"]
    arguments = target.args
    named = [*([] if takes_inputs else arguments.args), *arguments.kwonlyargs]
    return tuple(each.arg for each in named if each.arg != "self"), arguments.kwarg is not None


def _is_dataclass(definition: ast.ClassDef) -> bool:
    return any(_name(each) == "dataclass" for each in definition.decorator_list)


def _is_parameter(field: ast.AnnAssign) -> bool:
    """Whether a field of a dataclass is set when an instance is made."""
    is_init = not (isinstance(field.value, ast.Call) and "init=False" in ast.unparse(field.value))
    return is_init and not ast.unparse(field.annotation).startswith(("ClassVar", "KW_ONLY"))


def _table(class_name: str) -> SourceTable:
    """The table that a class of `fedsim.config` describes."""
    definition = _class(class_name)
    fields = {name: each for name, each in _fields(_bases(definition)).items() if "ClassVar" not in ast.unparse(each)}
    tables, lists = dict[str, SourceTable](), dict[str, SourceTable]()
    for name, each in fields.items():
        for word in ast.walk(each.annotation):
            if isinstance(word, ast.Name) and _is_table(word.id):
                (tables if word is each.annotation else lists)[name] = _table(word.id)
    values = {name: list(_values(each)) for name, each in fields.items()}
    facts = _assignments(definition)
    named_by = facts.get("named_by")
    if named_by is None:
        return SourceTable(tuple(fields), values, tables, lists)
    naming = ast.literal_eval(named_by)
    kind = next(kind for kind in PLUGS if _registry(kind) == _name(facts["registry"]))
    default = fields[naming].value
    return SourceTable(
        tuple(fields),
        values,
        tables,
        lists,
        kind,
        naming,
        None if default is None else ast.literal_eval(default),
        "list[" in ast.unparse(fields[naming].annotation),
        ast.literal_eval(facts["alternatives"]) if "alternatives" in facts else (),
    )


def _values(field: ast.AnnAssign) -> Iterator[str]:
    """The values that a key of `true` and `false`, or of a Literal, may have; of another type the default, if any."""
    text = ast.unparse(field.annotation)
    if text == "bool":
        yield from ("true", "false")
    elif re.fullmatch(r"Literal\[[\w', ]+\]", text):
        yield from ast.literal_eval(text.removeprefix("Literal"))
    elif isinstance(field.value, ast.Constant) and field.value.value not in (None, ""):
        yield str(field.value.value)


@functools.cache
def _class(name: str) -> ast.ClassDef:
    """The definition of a class of fedsim, of which no two have one name."""
    (path,) = _files("class", name)
    return next(each for each in _body(path) if isinstance(each, ast.ClassDef) and each.name == name)


@functools.cache
def _bases(definition: ast.ClassDef) -> list[ast.ClassDef]:
    """Return the base classes that fedsim defines, from the most distant ancestor to the class itself."""
    names = [name for name in map(_name, definition.bases) if _files("class", name)]
    return [*(base for name in names for base in _bases(_class(name))), definition]


def _is_table(name: str) -> bool:
    return bool(_files("class", name)) and any(base.name == "Table" for base in _bases(_class(name)))


def _fields(definitions: Iterable[ast.ClassDef]) -> dict[str, ast.AnnAssign]:
    """The annotated names in classes."""
    annotated = (each for definition in definitions for each in definition.body if isinstance(each, ast.AnnAssign))
    return {_name(each.target): each for each in annotated}


def _assignments(definition: ast.ClassDef) -> dict[str, ast.expr]:
    """The values that a class and its base classes assign to names, singly or as `a, b = 1, 2`."""
    found: dict[str, ast.expr] = {}
    for base in _bases(definition):
        for each in base.body:
            if isinstance(each, ast.Assign):
                target, value = each.targets[0], each.value
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    found |= dict(zip(map(_name, target.elts), value.elts, strict=True))
                else:
                    found[_name(target)] = value
    return found


def _name(node: ast.expr) -> str:
    """The name in `name`, `module.name` or `name(...)`; "" for other expressions."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
