"""From the names and parameters of an experiment to a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.aggregation.pipeline import Pipeline
from fedsim.aggregation.rule import bind_rule, pre_aggregator, rule
from fedsim.errors import ExperimentError, nearest, show
from fedsim.registry import Plug

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
        params: parameters by name, each of which goes to every stage that has one of that name.
        place: what an error calls the table that holds `params`.
        beside: other keys of that table, for hints.
        background: further parameters, which no stage need have; zero leaves a stage's own default as it is.

    Returns a list of (plug, its checked parameters), the rule last.

    Raises ExperimentError, one line per problem.
    """
    if not isinstance(stages, (str, dict, list, tuple)):
        raise ExperimentError(f"{_key(place)} = {show(stages)}: must be a name, or a list of names and tables")
    tables = [{"rule": stage} if isinstance(stage, str) else dict(stage) for stage in as_list(stages)]
    if not tables:
        raise ExperimentError(f'{_key(place)} = []: needs a rule, such as "mean"')
    for table in tables:
        if not isinstance(table.get("rule"), str):
            raise ExperimentError(f"{_key(place)}: a stage is a name or a table with the key rule, not {show(table)}")
    plugs = [_stage_plug(table["rule"], is_last=table is tables[-1], place=place) for table in tables]
    known = {name for plug in plugs for name in plug.parameters.model_fields}
    free = any(plug.parameters.model_config.get("extra") == "allow" for plug in plugs)
    unknown = [] if free else [name for name in params if name not in known]
    if unknown:
        where = f"{place}." if place != "rule" else ""
        kind = f"unknown key (the rule is {' + '.join(plug.name for plug in plugs)})"
        keys = list(dict.fromkeys([*beside, *sorted(known)]))
        lines = [f"{where}{name} = {show(params[name])}: {kind}; {nearest(name, keys)}" for name in unknown]
        raise ExperimentError(*lines)
    resolved = []
    for plug, table in zip(plugs, tables, strict=True):
        own = {name: value for name, value in table.items() if name != "rule"}
        takes_any = plug.parameters.model_config.get("extra") == "allow"
        fields = plug.parameters.model_fields
        further = {name: value for name, value in (background or {}).items() if name in fields}
        shared = {name: value for name, value in further.items() if value or fields[name].is_required()}
        shared |= {name: value for name, value in params.items() if takes_any or name in fields}
        resolved.append((plug, plug.check({**shared, **own}, "" if place == "rule" else place, beside=beside)))
    if len(plugs) > 1 and plugs[-1].takes.get("weights"):
        raise ExperimentError(f"{_key(place)}: {plugs[-1].name} needs weights, which mixed rows do not have; use mean")
    return resolved


def make_pipeline(resolved: Sequence[tuple[Plug, dict[str, Any]]]) -> Pipeline:
    """The pipeline of what `resolve` gave."""
    bound = [bind_rule(plug, params) for plug, params in resolved]
    return Pipeline(tuple(bound[:-1]), bound[-1])


def as_list(stages: Stage | Sequence[Stage]) -> list[Stage]:
    return [stages] if isinstance(stages, (str, dict)) else list(stages)


def _key(place: str) -> str:
    return place if place == "rule" else f"{place}.rule"


def _stage_plug(name: str, *, is_last: bool, place: str) -> Plug:
    key = _key(place)
    if not is_last and name in rule.names() and name not in pre_aggregator.names():
        raise ExperimentError(
            f"{key}: {name} ends a list; before it come pre-aggregators: {', '.join(pre_aggregator.names())}"
        )
    if is_last and name in pre_aggregator.names() and name not in rule.names():
        raise ExperimentError(
            f'{key} = {show(name)}: a pre-aggregator makes rows of rows; follow it by a rule, as in ["{name}", "mean"]'
        )
    return (rule if is_last else pre_aggregator).get(name, key)
