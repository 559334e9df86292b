"""Lists of everything that has a name in experiments, as dicts for Python and as text for the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from fedsim.config.components import COMPONENTS, describe, list_components, name_hint, registry_of
from fedsim.config.files import experiments, list_experiments, summary_of
from fedsim.core.text_wrapping import hang
from fedsim.errors import ExperimentError, show
from fedsim.hints.meanings import nearest

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
        remedy = re.sub(r"\bfedsim list ([\w-]+)", r'fedsim.components("\1")', name_hint(str(kind), KINDS))
    raise ExperimentError(f"kind = {show(kind)}: no such kind of component; {remedy}")


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
