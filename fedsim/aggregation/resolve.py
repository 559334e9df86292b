"""Make a pipeline from names and parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fedsim.aggregation.pipeline import Pipeline
from fedsim.aggregation.rule import bind_rule, pre_aggregator, rule
from fedsim.core.objects import plain
from fedsim.core.registry import Plug, goes_with
from fedsim.core.suggestions import nearest_key
from fedsim.errors import MAX_PROBLEMS, ExperimentError, show

Stage = str | dict[str, Any]


def resolve(
    stages: Stage | Sequence[Stage],
    params: dict[str, Any],
    place: str = "rule",
    beside: Sequence[str] = (),
    background: dict[str, Any] | None = None,
) -> list[tuple[Plug, dict[str, Any]]]:
    """A rule, or a list of pre-aggregators and a rule, with every parameter checked.

    Args:
        stages: names, "package.module:function", or tables {rule = name, parameters}.
        params: parameters by name; each goes to every stage that has a parameter of this name.
        place: the name of the table of `params` in errors.
        beside: other keys of that table, for hints.
        background: further parameters, which need not belong to a stage; zero keeps a stage's own default.

    Returns a list of (plug, checked parameters), the rule last.

    Raises ExperimentError with one line per problem.

    >>> [(plug.name, params) for plug, params in fedsim.aggregation.resolve(["nnm", "krum"], {"f": 1})]
    [('nnm', {'f': 1}), ('krum', {'f': 1})]
    """
    stages = plain(stages)
    if not isinstance(stages, (str, dict, list)):
        raise ExperimentError(f"{_key(place)} = {show(stages)}: must be a name, or a list of names and tables")
    wheres = _places(stages, place)
    tables = [_as_table(stage, where) for stage, where in zip(as_list(stages), wheres, strict=True)]
    if not tables:
        raise ExperimentError(f'{_key(place)} = []: needs a rule, such as "mean"')
    plugs = [
        _stage_plug(table["rule"], where, is_last=table is tables[-1])
        for table, where in zip(tables, wheres, strict=True)
    ]
    table_place = "" if place == "rule" else place
    _refuse_unknown(params, plugs, table_place, beside)
    resolved = []
    for plug, table, where in zip(plugs, tables, wheres, strict=True):
        own = {name: value for name, value in table.items() if name != "rule"}
        fields = plug.parameters.model_fields
        further = {name: value for name, value in (background or {}).items() if name in fields}
        shared = {name: value for name, value in further.items() if value or fields[name].is_required()}
        shared |= {name: value for name, value in params.items() if _accepts_any(plug) or name in fields}
        resolved.append((plug, _checked(plug, shared, own, table_place, where)))
    if len(plugs) > 1 and plugs[-1].takes.get("weights"):
        raise ExperimentError(
            f"{_key(place)}: {plugs[-1].name} needs weights, which pre-aggregated rows do not have; use mean"
        )
    return resolved


def _accepts_any(plug: Plug) -> bool:
    return plug.parameters.model_config.get("extra") == "allow"


def _refuse_unknown(params: dict[str, Any], plugs: list[Plug], place: str, beside: Sequence[str]) -> None:
    """Raise ExperimentError if no stage has a parameter."""
    known = {name for plug in plugs for name in plug.parameters.model_fields}
    unknown = [] if any(map(_accepts_any, plugs)) else [name for name in params if name not in known]
    if not unknown:
        return
    kind = f"the rule is {' + '.join(plug.name for plug in plugs)}"
    keys = list(dict.fromkeys([*beside, *sorted(known)]))
    lines = []
    for name in unknown[:MAX_PROBLEMS]:
        hint = goes_with(name, [*rule, *pre_aggregator]) or nearest_key(name, keys, place)
        lines.append(f"{name} = {show(params[name])}: unknown key ({kind}); {hint}")
    raise ExperimentError(*(f"{place}.{line}" if place else line for line in lines))


def make_pipeline(resolved: Sequence[tuple[Plug, dict[str, Any]]]) -> Pipeline:
    """The pipeline of the result of `resolve`.

    >>> fedsim.aggregation.make_pipeline(fedsim.aggregation.resolve("krum", {"f": 1})).rule.f
    1
    """
    bound = [bind_rule(plug, params) for plug, params in resolved]
    return Pipeline(tuple(bound[:-1]), bound[-1])


def as_list(stages: Stage | Sequence[Stage]) -> list[Stage]:
    return list(stages) if isinstance(stages, (list, tuple)) else [stages]


def _key(place: str) -> str:
    return place if place == "rule" else f"{place}.rule"


def _places(stages: Stage | Sequence[Stage], place: str) -> list[str]:
    """The name of each stage in errors: `aggregate.rule[1]`, or `aggregate.rule` if it is no list."""
    if isinstance(stages, (str, dict)):
        return [_key(place)]
    return [f"{_key(place)}[{index}]" for index in range(len(stages))]


def _as_table(stage: Any, where: str) -> dict[str, Any]:
    table = {"rule": stage} if isinstance(stage, str) else stage
    if not isinstance(table, dict) or not isinstance(table.get("rule"), str):
        raise ExperimentError(f"{where} = {show(stage)}: a stage is a name or a table with the key rule")
    return table


def _checked(plug: Plug, shared: dict[str, Any], own: dict[str, Any], place: str, where: str) -> dict[str, Any]:
    """The checked parameters of a stage. Errors begin with the place of the parameter."""
    try:
        return plug.check({**shared, **own}, beside=["rule"])
    except ExperimentError as error:
        lines = []
        for line in error.lines:  # each begins with a parameter
            before = where if re.split(r"\W", line, maxsplit=1)[0] in own else place
            lines.append(f"{before}.{line}" if before else line)
        raise ExperimentError(*lines) from None


def _stage_plug(name: str, key: str, *, is_last: bool) -> Plug:
    if not is_last and name in rule.names() and name not in pre_aggregator.names():
        raise ExperimentError(
            f"{key} = {show(name)}: a rule must be last; pre-aggregators are {', '.join(pre_aggregator.names())}"
        )
    if is_last and name in pre_aggregator.names() and name not in rule.names():
        raise ExperimentError(
            f'{key} = {show(name)}: a pre-aggregator returns rows; put a rule after it, as in ["{name}", "mean"]'
        )
    return (rule if is_last else pre_aggregator).get(name, key)
