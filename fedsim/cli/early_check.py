"""Check keys and names before PyTorch is imported: they contain most mistakes, and the import takes seconds.

The check reads keys and components from fedsim's source code. Values and their combinations are left to the check of
the experiment itself. If an experiment imports a component, all its components are left to that check, because an
import may register further components. Both checks use the same error messages.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedsim.config.engines import DEFAULT_ENGINE
from fedsim.config.files import COMPARISON, describe_file
from fedsim.config.overrides import Change, override, parse_word
from fedsim.config.source_catalog import (
    SourceTable,
    experiment_table,
    keys_of_tables,
    source_components,
    title_of,
)
from fedsim.core.suggestions import component_name_error, nearest_key, parameter_errors, unknown_key_error, with_key
from fedsim.errors import MAX_PROBLEMS, ExperimentError, show

MOST_POINTS = 2000  # maximum size of a comparison; larger ones are left to the later check


def check_names_of_run(source: str | None, words: Iterable[str]) -> None:
    """Raise ExperimentError if the settings of a run contain a key or component that does not exist."""
    changes = [parse_word(word) for word in words]
    description = {} if source is None else describe_file(source)
    description.pop(COMPARISON, None)
    if lines := problems_with_names(description, changes):
        raise ExperimentError(*lines, source=source)


def check_names_of_comparison(source: str | None, words: Iterable[str], *, skip_invalid: bool) -> None:
    """Raise ExperimentError if the settings of a comparison contain a key or component that does not exist.

    With `skip_invalid` nothing is checked, because invalid combinations are left out later.
    """
    from fedsim.comparison.axes import apply_words, axes_of_tables, changes_of, with_points
    from fedsim.comparison.rows import SETTINGS as COMPARISON_SETTINGS

    description = {} if source is None else describe_file(source)
    plan, skipping = description.pop(COMPARISON, {}), False
    if isinstance(plan, Mapping):
        skipping = bool(plan.get("skip_invalid"))
        plan = {key: values for key, values in plan.items() if key not in COMPARISON_SETTINGS}
    axes, _, in_all = apply_words(axes_of_tables(plan), words)
    count = math.prod(map(len, axes.values()))
    if skip_invalid or skipping or count > MOST_POINTS:
        return
    problems: dict[str, list[dict[str, Any]]] = {}  # points that cause each line
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        point_changes = [change for key, value in point.items() for change in changes_of(key, copy.deepcopy(value))]
        try:
            lines = problems_with_names(copy.deepcopy(description), [*in_all, *point_changes])
        except ExperimentError as error:  # the changes contradict each other
            lines = list(error.lines)
        for line in lines:
            problems.setdefault(line, []).append(point)
    if problems:
        raise ExperimentError(*(with_points(line, points, count) for line, points in problems.items()))


def problems_with_names(description: dict[str, Any], changes: list[Change]) -> list[str]:
    """Apply the changes to an experiment, and return one line of text for each key or name that does not exist."""
    override(description, changes)
    findings = list(itertools.islice(_in_table(experiment_table(), description, "", description), MAX_PROBLEMS))
    imports = len(findings) == MAX_PROBLEMS or any(
        line is None for line, _ in findings
    )  # an import, or too many findings to know
    return [line for line, of_component in findings if line is not None and not (of_component and imports)]


# An error line, and whether it is about a component. The line is None for an imported component.
Finding = tuple[str | None, bool]


def _in_table(table: SourceTable, values: Any, place: str, tables: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield one item for each wrong key or name in a table (section) of an experiment.

    Args:
        table: the allowed keys, tables and components.
        values: content of the table in the experiment.
        place: dotted key of the table, "" for the whole experiment.
        tables: the whole experiment.

    Each item is a pair: the error message, and whether it is about a component. The message is None for a component
    with an import path, which cannot be checked before its module is imported.
    """
    if table.kind and table.is_name(values):
        values = {table.named_by: values}
    if not isinstance(values, dict):
        return
    if table.kind:
        try:
            values = with_key(values, table.named_by, place)
        except ExperimentError as error:
            yield from ((line, False) for line in error.lines)
            return
    prefix = f"{place}." if place else ""
    unknown = {}
    for key, value in values.items():
        if key in table.tables:
            yield from _in_table(table.tables[key], value, f"{prefix}{key}", tables)
        elif key in table.lists:
            for index, item in enumerate(value if isinstance(value, list) else ()):
                yield from _in_table(table.lists[key], item, f"{prefix}{key}[{index}]", tables)
        elif key not in table.keys:
            unknown[key] = value
    engine = tables.get("engine", DEFAULT_ENGINE)
    if not place and isinstance(engine, str) and engine not in source_components("engines"):
        yield (
            component_name_error(title_of("engines"), engine, f"engine = {show(engine)}", source_components("engines")),
            True,
        )
    if table.kind:
        yield from ((line, True) for line in _in_component(table, values, unknown, place))
        return
    elsewhere = None if place or not unknown else keys_of_tables(tables)
    for key, value in unknown.items():
        yield unknown_key_error(prefix + key, value, nearest_key(key, table.keys, place, elsewhere)), False


def _in_component(
    table: SourceTable, values: dict[str, Any], params: dict[str, Any], place: str
) -> Iterator[str | None]:
    """Yield an error message for each wrong name or parameter of a component, and None for an import path.

    Args:
        table: the keys and components that are allowed in the component's table (section).
        values: the values in this table.
        params: the values that are parameters of the component.
        place: dotted key of the table.
    """
    kind, name, unnumbered = str(table.kind), values.get(table.named_by, table.default), re.sub(r"\[\d+\]", "", place)
    components = source_components(kind)
    stages = source_components("pre-aggregators")  # the later check reports errors about the stages of a rule
    if isinstance(name, str) and name in components:
        siblings = [*components.values(), *(stages.values() if table.takes_list else ())]
        beside = [table.named_by, *(key for key in table.keys if key != table.named_by)]
        for line in parameter_errors(params, [components[name]], title_of(kind), siblings, unnumbered, beside):
            yield place + line.removeprefix(unnumbered)
    elif isinstance(name, str) and name not in stages:
        yield component_name_error(title_of(kind), name, f"{place}.{table.named_by} = {show(name)}", components)
    elif isinstance(name, list):  # stages of a rule
        names = [stage.get(table.named_by) if isinstance(stage, dict) else stage for stage in name]
        yield from (None for stage in names if ":" in str(stage))
