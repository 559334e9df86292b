"""Aggregation rules: many rows in, one row out.

A rule is a pure function `(updates [n, d], weights [n], *, parameters) -> [d]` that leaves its inputs unchanged and
keeps their dtype and device. Its positional parameters, which have these names, say what it takes:

    def median(updates, *, ...)            a rule without a weighted form: weights are an error
    def mean(updates, weights=None, ...)   weights are optional
    def weighted_mean(updates, weights)    weights are needed; an experiment gives sample counts unless told otherwise

`@rule(name, columnwise=True)` declares that each column of the result depends on that column of the updates alone.
Such rules run on blocks of columns, several processes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.registry import Plug, Registry

BLOCK = 16_384  # columns at least: in smaller blocks the calls cost more than the arithmetic
BLOCKS = 64  # at most, so that the number of calls stays small however long a row is


class RuleRegistry(Registry):
    """A Registry whose decorator also takes `columnwise`."""

    def __call__(self, name: str, *, columnwise: bool = False) -> Callable[[Callable[..., Any]], Any]:
        register = super().__call__(name)

        def mark(target: Callable[..., Any]) -> Any:
            target.columnwise = columnwise  # type: ignore[attr-defined]  # a user's imported rule can set it too
            return register(target)

        return mark


rule = RuleRegistry("aggregation rule", given=("updates", "weights"))


@rule("mean", columnwise=True)
def mean(updates: Tensor, weights: Tensor | None = None) -> Tensor:
    """The plain average of the rows, or their weighted average where weights are given."""
    return updates.mean(0) if weights is None else weighted_mean(updates, weights)


@rule("weighted_mean", columnwise=True)
def weighted_mean(updates: Tensor, weights: Tensor) -> Tensor:
    """Sum of p_k x_k with p_k = weight_k / sum of weights: FedAvg's average (McMahan et al. 2017).

    All weights zero is an error. Cost: one pass over the [n, d] updates.
    """
    total = weights.sum()
    if total <= 0:
        raise ExperimentError("aggregate.weights: all weights of this cohort are zero")
    if (weights == 0).any():  # such a row does not count even where it is not finite
        updates, weights = updates[weights > 0], weights[weights > 0]
    return (weights / total).to(updates.dtype) @ updates


@dataclass(frozen=True)
class BoundRule:
    """A rule with its parameters: call it with (updates [n, d], weights [n] or None)."""

    function: Callable[..., Tensor]  # takes (updates) or (updates, weights)
    name: str
    takes_weights: bool
    needs_weights: bool
    columnwise: bool

    def __call__(self, updates: Tensor, weights: Tensor | None = None) -> Tensor:
        if not self.takes_weights:
            return self.function(updates=updates)
        return self.function(updates=updates, weights=weights)


def bind_rule(plug: Plug, params: dict[str, Any]) -> BoundRule:
    """The rule `plug` with checked `params`, ready to be called and to be pickled to other processes."""
    return BoundRule(
        function=plug.bind(params),
        name=plug.name,
        takes_weights="weights" in plug.takes,
        needs_weights=plug.takes.get("weights", False),
        columnwise=getattr(plug.target, "columnwise", False),
    )


def aggregate(
    updates: Tensor,
    weights: Tensor | Sequence[float] | None = None,
    rule: str = "mean",
    **params: Any,
) -> Tensor:
    """Aggregate the rows of `updates` with a rule: `aggregate(updates, rule="weighted_mean", weights=counts)`.

    Args:
        updates: [n, d], any floating dtype and device; left unchanged.
        weights: [n], finite and >= 0, need not sum to one. A rule without a weighted form refuses them; one that
            needs them takes equal ones where they are left out.
        rule: a registered name, or "package.module:function".
        params: the rule's own parameters.

    Returns the aggregate [d], with the dtype and device of `updates`.

    Raises ExperimentError (a ValueError) for an unknown rule, a wrong parameter, a wrong shape or impossible weights.
    """
    bound = lookup(rule, params)
    if updates.ndim != 2 or not len(updates) or not updates.is_floating_point():
        raise ExperimentError(
            f"updates: must be a floating tensor [n, d] with n >= 1, not {updates.dtype} {tuple(updates.shape)}"
        )
    if weights is not None:
        weights = _checked_weights(weights, updates, bound)
    elif bound.needs_weights:
        weights = torch.ones(len(updates), dtype=torch.double, device=updates.device)
    return bound(updates, weights)


def lookup(name: str, params: dict[str, Any]) -> BoundRule:
    """The bound rule called `name` with `params` checked against its signature."""
    plug = rule.get(name, "rule")
    return bind_rule(plug, plug.check(params))


def _checked_weights(weights: Tensor | Sequence[float], updates: Tensor, bound: BoundRule) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.double, device=updates.device)
    if not bound.takes_weights:
        raise ExperimentError(f"weights: the rule {bound.name} has no weighted form")
    if weights.shape != (len(updates),):
        raise ExperimentError(f"weights: {len(updates)} rows need shape ({len(updates)},), not {tuple(weights.shape)}")
    if not bool(((weights >= 0) & weights.isfinite()).all()) or not bool(weights.any()):
        raise ExperimentError("weights: must be finite, >= 0 and not all zero")
    return weights


def column_blocks(d: int, index: int = 0, count: int = 1) -> Iterator[slice]:
    """The blocks of columns that process `index` of `count` aggregates; together they cover range(d).

    The cuts depend on d alone, never on who computes them, so that every engine does the same arithmetic on the same
    blocks and gets the same bits.
    """
    size = max(BLOCK, math.ceil(d / BLOCKS / BLOCK) * BLOCK)
    for start in range(index * size, d, count * size):
        yield slice(start, min(start + size, d))
