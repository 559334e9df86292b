"""Lists of everything that has a name in experiments, as dicts for Python and as text for the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from fedsim.config.components import COMPONENTS, describe, described, list_components, registry_of
from fedsim.config.files import experiments, list_experiments, summary_of
from fedsim.core.text_wrapping import hang
from fedsim.errors import ExperimentError, one_line, show
from fedsim.hints.meanings import answer, meaning, nearest
from fedsim.hints.names import closest, did_you_mean

if TYPE_CHECKING:
    from fedsim.config.typed_keys import Kind
    from fedsim.core.registry import Registration

EXPERIMENTS, KEYS = "experiments", "keys"
KINDS = (*COMPONENTS, EXPERIMENTS, KEYS)
COLUMNS = 100  # width of a list that Python prints


@dataclass(frozen=True, repr=False)
class ListedName:
    """A component, a built-in experiment or a key of an experiment. Printing it shows its description.

    Attributes:
        summary: first line of the description.
        text: description.
        parameters: parameters of a component by name, with their types and defaults.
    """

    summary: str
    text: str
    parameters: Mapping[str, inspect.Parameter]

    def __repr__(self) -> str:
        return self.text


class ListedKind(dict[str, ListedName]):
    """All names of a kind. Printing it shows the list of `fedsim list KIND`.

    Components that are not in the list, such as `torchvision:resnet18`, can be looked up too.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(_names_of(kind))
        self._kind = kind

    def __missing__(self, name: str) -> ListedName:
        if self._kind in COMPONENTS:
            if others := _kinds_with(name):
                raise ExperimentError(f"{show(name)}: is not in the list of {self._kind}; {_lookup(others[0], name)}")
            return _listed(self._kind, registry_of(self._kind).get(name))
        table, _, key = str(name).rpartition(".")
        if owners := self._kind == KEYS and _with_parameter(table, key):
            raise ExperimentError(f"{show(name)}: is a parameter of {owners}")
        beside = [each for each in self if each.rpartition(".")[0] == table] or list(self)
        raise ExperimentError(f"{show(name)}: is not in the list of {self._kind}; {nearest(str(name), beside)}")

    def __repr__(self) -> str:
        return list_kind(self._kind, COLUMNS)


def _kinds_with(name: str) -> list[str]:
    """Return the kinds of components that have this name."""
    return [kind for kind in COMPONENTS if name in registry_of(kind).names()]


def _lookup(kind: str, name: str) -> str:
    return f'write fedsim.components("{kind}")["{name}"]'


def _with_parameter(table: str, name: str) -> str:
    """Return the components in a table of an experiment that have a parameter of this name, and where it is listed."""
    for kind, (keys, _) in COMPONENTS.items():
        names = [each.name for each in registry_of(kind) if name in each.parameters.model_fields]
        if names and keys.rpartition(".")[0] == table:
            several = f" and {len(names) - 1} others" if len(names) > 1 else ""
            return f"{names[0]}{several}; {_lookup(kind, names[0])}"
    return ""


class AllKinds(dict[str, list[str]]):
    """The names of each kind. Printing it shows the list of `fedsim list`."""

    def __repr__(self) -> str:
        return overview(COLUMNS)


@overload
def components(kind: None = None) -> AllKinds: ...
@overload
def components(kind: Kind | str) -> ListedKind: ...
def components(kind: str | None = None) -> AllKinds | ListedKind:
    """Return what experiments can name: rules, models, data sets and all other kinds of components.

    Printing the result shows the list that `fedsim list` or `fedsim list KIND` shows on the command line.

    Args:
        kind: kind of component, such as "rules" or "models". "experiments" are the built-in experiments, and "keys" are
            the settings of an experiment. None: all kinds except "keys".

    Returns a dict from the names of this kind to objects with the attributes `summary` (first line of the description),
    `text` (description) and `parameters` (a dict of `inspect.Parameter`). The dict also accepts names that are not in
    the list, such as "torchvision:resnet18" or "package.module:function". Without `kind`, returns a dict from each kind
    to a list of its names.

    Raises ExperimentError for an unknown kind or name.

    >>> fedsim.components()["hooks"]
    ['allreduce', 'fp16', 'bf16', 'powersgd']
    >>> fedsim.components("noises")["constant"].summary
    'Return noise factor 1 for every work item, so that durations have no noise.'
    >>> list(fedsim.components("rules")["multi_krum"].parameters)
    ['f', 'm']
    """
    if kind is None:
        return AllKinds(_names_by_kind())
    if kind in KINDS:
        return ListedKind(kind)
    if owners := _kinds_with(kind):
        remedy = _lookup(owners[0], kind)
    else:
        remedy = re.sub(r"\bfedsim list ([\w-]+)", r'fedsim.components("\1")', _name_hint(str(kind)))
    raise ExperimentError(f"kind = {show(kind)}: no such kind of component; {remedy}")


def describe_component(name: str) -> str:
    """Return the parameters and docstrings, as text, of all components with this name or at this import path.

    Raises ExperimentError if the component does not exist or cannot be imported.
    """
    prefix, _, member = name.partition(":")
    families = [kind for kind in COMPONENTS if member and prefix in registry_of(kind).families]
    if member and not families:
        return described(*_imported(name))
    kinds_of_name = families or [kind for kind in COMPONENTS if name in registry_of(kind).names()]
    components: dict[str, Registration] = {}
    for kind in kinds_of_name:
        try:
            components[kind] = registry_of(kind).get(name)
        except ExperimentError:  # models, data sets and transforms of one library have one prefix
            if kind == kinds_of_name[-1] and not components:
                raise
    blocks = [describe(kind, registration) for kind, registration in components.items()]
    if not blocks:
        raise ExperimentError(f"{show(name)}: no such kind or component; {_name_hint(name)}")
    return "\n\n".join(blocks)


def _name_hint(name: str) -> str:
    """Return the hint for a name that is neither a kind, such as `rules`, nor the name of a component."""
    import fedsim.config.experiment  # noqa: F401  # defines what names mean

    known = [known_name for kind in COMPONENTS for known_name in registry_of(kind).names()]
    values = re.findall(r"([\w.]+)=(\{\})", answer(name, "{}"))  # keys of kinds
    meant = [
        kind
        for kind, (key, _) in COMPONENTS.items()
        if any((each.removesuffix(".name"), "{}") in values for each in key.split(", "))
    ]
    hints = (answer(f"fedsim_list_{name}"), did_you_mean(meant or closest(name, KINDS)), meaning(name))
    hint = next(filter(None, hints), "") or did_you_mean(closest(name, dict.fromkeys(known)))
    return hint or nearest(name, KINDS)  # the list of all components is too long


def _imported(path: str) -> tuple[str, Any]:
    """Return the import path and parameters of the component at `path` as text, and the imported component."""
    from fedsim.core.import_policy import import_object

    try:
        target = import_object(path)
        signature = inspect.signature(target)
    except Exception as error:
        raise ExperimentError(f"{show(path)}: cannot be imported: {one_line(error)}") from error
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return f"{path}{inspect.Signature(bare)}", target


def list_kind(kind: str, columns: int | None, search: str = "") -> str:
    """Return a list of the names of a kind as text, wrapped to `columns`, or to the default width if this is None.

    Only names with all words of `search` in their name or description are listed. The text is "" if there are none.
    """
    if kind in COMPONENTS:
        return list_components([kind], columns, search)
    if kind == EXPERIMENTS:
        return list_experiments(columns, search)
    from fedsim.config.keys import list_keys

    return list_keys(columns, search)


def overview(columns: int | None) -> str:
    """Return the names of all kinds as text, one line per kind, wrapped to `columns` characters."""
    width = max(map(len, KINDS))
    return "\n".join(hang(f"{kind:<{width}} ", ", ".join(names), columns) for kind, names in _names_by_kind().items())


def _names_by_kind() -> dict[str, list[str]]:
    return {kind: registry_of(kind).names() for kind in COMPONENTS} | {EXPERIMENTS: list(experiments())}


def _names_of(kind: str) -> dict[str, ListedName]:
    if kind in COMPONENTS:
        return {registration.name: _listed(kind, registration) for registration in registry_of(kind)}
    if kind == EXPERIMENTS:
        texts = {name: path.read_text(encoding="utf-8") for name, path in experiments().items()}
        return {name: ListedName(summary_of(text), text, {}) for name, text in texts.items()}
    from fedsim.config.keys import key_tables

    keys = [key for table in key_tables() for key in table.keys]
    return {key.path: ListedName(key.description, f"{key.head}\n  {key.description}", {}) for key in keys}


def _listed(kind: str, registration: Registration) -> ListedName:
    return ListedName(registration.summary, describe(kind, registration), registration.fields)
