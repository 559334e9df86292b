"""Make a pipeline from names and parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fedsim.aggregation.pipeline import Pipeline
from fedsim.aggregation.rule import bind_rule, pre_aggregator, rule
from fedsim.core.base_table import with_key
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
    key = place if place == "rule" else f"{place}.rule"
    if not isinstance(stages, (str, dict, list)):
        raise ExperimentError(f"{key} = {show(stages)}: must be a name, or a list of names and tables")
    if stages == []:
        raise ExperimentError(f'{key} = []: needs a rule, such as "mean"')
    wheres = [f"{key}[{index}]" for index in range(len(stages))] if isinstance(stages, list) else [key]
    tables = [as_table(stage, where) for stage, where in zip(as_list(stages), wheres, strict=True)]
    names = [table.pop("rule") for table in tables]
    plugs = [_pre_aggregator_plug(name, where) for name, where in zip(names[:-1], wheres[:-1], strict=True)]
    plugs.append(_rule_plug(names[-1], wheres[-1]))
    table_place = "" if place == "rule" else f"{place}."
    _refuse_unknown(params, plugs, table_place, beside)
    resolved = []
    for plug, own, where in zip(plugs, tables, wheres, strict=True):
        fields = plug.parameters.model_fields
        shared = {
            name: value
            for name, value in (background or {}).items()
            if name in fields and (value or fields[name].is_required())
        }
        shared |= {name: value for name, value in params.items() if _accepts_any(plug) or name in fields}
        try:
            resolved.append((plug, plug.check({**shared, **own}, beside=["rule"])))
        except ExperimentError as error:  # each line begins with a parameter
            is_own = [re.split(r"\W", line, maxsplit=1)[0] in own for line in error.lines]
            lines = zip(is_own, error.lines, strict=True)
            raise ExperimentError(*(f"{where}.{line}" if own else table_place + line for own, line in lines)) from None
    if len(plugs) > 1 and plugs[-1].takes.get("weights"):
        raise ExperimentError(f"{key}: {plugs[-1].name} needs weights, which pre-aggregated rows do not have; use mean")
    return resolved


def as_table(stage: Any, where: str) -> dict[str, Any]:
    """A copy of the table of a stage, in which `rule` names it."""
    table = {"rule": stage} if isinstance(stage, str) else stage
    table = with_key(table, "rule", where) if isinstance(table, dict) else table
    if not isinstance(table, dict) or not isinstance(table.get("rule"), str):
        raise ExperimentError(f"{where} = {show(stage)}: a stage is a name or a table with the key rule")
    return dict(table)


def _pre_aggregator_plug(name: str, where: str) -> Plug:
    if name in rule.names() and name not in pre_aggregator.names():
        raise ExperimentError(
            f"{where} = {show(name)}: a rule must be last; pre-aggregators are {', '.join(pre_aggregator.names())}"
        )
    return pre_aggregator.get(name, where)


def _rule_plug(name: str, where: str) -> Plug:
    if name in pre_aggregator.names() and name not in rule.names():
        raise ExperimentError(
            f'{where} = {show(name)}: a pre-aggregator returns rows; put a rule after it, as in ["{name}", "mean"]'
        )
    return rule.get(name, where)


def _accepts_any(plug: Plug) -> bool:
    return plug.parameters.model_config.get("extra") == "allow"


def _refuse_unknown(params: dict[str, Any], plugs: list[Plug], place: str, beside: Sequence[str]) -> None:
    """Raise ExperimentError if no stage has a parameter."""
    known = {name for plug in plugs for name in plug.parameters.model_fields}
    unknown = [] if any(map(_accepts_any, plugs)) else [name for name in params if name not in known]
    kind = f"the rule is {' + '.join(plug.name for plug in plugs)}"
    keys = list(dict.fromkeys([*beside, *sorted(known)]))
    lines = []
    for name in unknown[:MAX_PROBLEMS]:
        hint = goes_with(name, [*rule, *pre_aggregator]) or nearest_key(name, keys, place.removesuffix("."))
        lines.append(f"{place}{name} = {show(params[name])}: unknown key ({kind}); {hint}")
    if lines:
        raise ExperimentError(*lines)


def make_pipeline(resolved: Sequence[tuple[Plug, dict[str, Any]]]) -> Pipeline:
    """The pipeline of the result of `resolve`.

    >>> fedsim.aggregation.make_pipeline(fedsim.aggregation.resolve("krum", {"f": 1})).rule.f
    1
    """
    bound = [bind_rule(plug, params) for plug, params in resolved]
    return Pipeline(tuple(bound[:-1]), bound[-1])


def as_list(stages: Any) -> list[Stage]:
    return list(stages) if isinstance(stages, (list, tuple)) else [stages]
