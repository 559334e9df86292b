"""Create a pipeline from the names and parameters of its rule and pre-aggregators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fedsim.aggregation.pipeline import Pipeline
from fedsim.aggregation.rule import RuleStage, pre_aggregator, rule
from fedsim.core.objects import plain
from fedsim.core.registry import Registration, Registry, in_chain, parameter_errors, with_key
from fedsim.errors import ExperimentError, show

Stage = str | dict[str, Any]
FORMS = 'a name such as "krum", or a list of names and tables such as ["nnm", {rule = "trimmed_mean", f = 1}]'


def resolve(
    stages: Stage | Sequence[Stage],
    params: dict[str, Any],
    place: str = "aggregate",
    beside: Sequence[str] = (),
    background: dict[str, Any] | None = None,
) -> list[tuple[Registration, dict[str, Any]]]:
    """Look up a rule and its pre-aggregators by name, and check their parameters.

    Args:
        stages: a rule, or a list of pre-aggregators followed by a rule. Each is a name, "package.module:function", or a
            table with the key `rule` and parameters. "nnm+krum" is ["nnm", "krum"].
        params: parameters by name. The rule and each pre-aggregator receive the parameters that they have.
        place: name of the experiment's table that contains `params`, for error messages.
        beside: other keys of this table, for spelling suggestions in error messages.
        background: parameters by name that are used if `params` does not contain them. Unknown names are ignored, and
            a zero does not replace a default value.

    Returns a list of pairs (component, checked parameters), with the rule last.

    Raises ExperimentError with one line per problem.

    >>> [(registration.name, params) for registration, params in fedsim.aggregation.resolve(["nnm", "krum"], {"f": 1})]
    [('nnm', {'f': 1}), ('krum', {'f': 1})]
    """
    stages = in_chain(plain(stages))
    key = f"{place}.rule"
    if not isinstance(stages, (str, dict, list)):
        raise ExperimentError(f"{key} = {show(stages)}: must be {FORMS}")
    if stages == []:
        raise ExperimentError(f'{key} = []: must contain a rule, such as "mean"')
    wheres = [f"{key}[{index}]" for index in range(len(stages))] if isinstance(stages, list) else [key]
    tables = [as_table(stage, where) for stage, where in zip(as_list(stages), wheres, strict=True)]
    names = [table.pop("rule") for table in tables]
    components = [
        _registration(name, where, pre_aggregator) for name, where in zip(names[:-1], wheres[:-1], strict=True)
    ]
    components.append(_registration(names[-1], wheres[-1], rule))
    if lines := parameter_errors(params, components, rule.kind, [*rule, *pre_aggregator], place, beside):
        raise ExperimentError(*lines)
    resolved = []
    for registration, parameters, where in zip(components, tables, wheres, strict=True):
        shared = _shared_parameters(registration, params, background or {})
        try:
            resolved.append((registration, registration.check({**shared, **parameters}, beside=["rule"])))
        except ExperimentError as error:  # each line begins with the name of a parameter
            is_own = [re.split(r"\W", line, maxsplit=1)[0] in parameters for line in error.lines]
            places = [f"{where}." if parameters else f"{place}." for parameters in is_own]
            raise ExperimentError(*map("".join, zip(places, error.lines, strict=True))) from None
    if len(components) > 1 and components[-1].takes.get("weights"):
        raise ExperimentError(
            f"{key}: the rule {components[-1].name} needs weights, but the output of a pre-aggregator has no weights; "
            "use the rule mean"
        )
    return resolved


def _shared_parameters(
    registration: Registration, params: dict[str, Any], background: dict[str, Any]
) -> dict[str, Any]:
    """Return the parameters of a rule or pre-aggregator that are set for all stages (see `resolve`)."""
    fields = registration.fields
    defaults = {name: value for name, value in background.items() if name in fields}
    shared = {name: value for name, value in defaults.items() if value or fields[name].default is fields[name].empty}
    return shared | {name: value for name, value in params.items() if registration.accepts_any or name in fields}


def as_table(stage: Any, where: str) -> dict[str, Any]:
    """Return a rule or pre-aggregator as a dict that contains its name (key `rule`) and its parameters.

    `where` is the name of the setting in error messages.
    """
    table = {"rule": stage} if isinstance(stage, str) else stage
    table = with_key(table, "rule", where) if isinstance(table, dict) else table
    if not isinstance(table, dict) or not isinstance(table.get("rule"), str):
        raise ExperimentError(f"{where} = {show(stage)}: must be a name, or a table with the key `rule`")
    return dict(table)


def _registration(name: str, where: str, registry: Registry) -> Registration:
    """Look up a rule or pre-aggregator by its name. Raises ExperimentError if it does not exist.

    `where` is the name of the setting in error messages.
    """
    if name not in registry.names():
        if name in rule.names():
            remedy = f"a rule must be last; the pre-aggregators are {', '.join(registry.names())}"
            raise ExperimentError(f"{where} = {show(name)}: {remedy}")
        if name in pre_aggregator.names():
            remedy = f'is a pre-aggregator; put a rule after it, as in ["{name}", "mean"]'
            raise ExperimentError(f"{where} = {show(name)}: {remedy}")
    return registry.get(name, where)


def make_pipeline(resolved: Sequence[tuple[Registration, dict[str, Any]]]) -> Pipeline:
    """Return a pipeline of the pre-aggregators and the rule that `resolve` returned.

    >>> fedsim.aggregation.make_pipeline(fedsim.aggregation.resolve("krum", {"f": 1})).rule.f
    1
    """
    bound = [RuleStage.of(registration, params) for registration, params in resolved]
    return Pipeline(tuple(bound[:-1]), bound[-1])


def as_list(stages: Any) -> list[Stage]:
    return list(stages) if isinstance(stages, (list, tuple)) else [stages]
