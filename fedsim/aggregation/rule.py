"""Aggregation rules and pre-aggregators, and their registries.

A rule is a pure function from the workers' updates [n, d] to one row [d]. Its positional parameters receive these
inputs by name; its keyword-only parameters are its configuration:

    updates   [n, d], the workers' updates
    weights   float64 [n], >= 0, not all zero; on the device of the updates if the rule also accepts `updates`, else on
              the CPU. Weights are an error for a rule without this parameter. If the parameter has no default, an
              experiment weights by sample counts unless it says otherwise
    weight_total
              the number that an average divides the weighted sum by; None: the sum of the weights. It is 1 with
              `aggregate.weights = "inverse_probability"`, whose weights sum to 1 on average over the cohorts
    gram      Gram: distances and inner products of all pairs of rows, computed once for all rules that accept it
    rng       NumPy generator seeded by (seed, round), for a few numbers
    draws     Draws, a function of (seed, round), for tensors as long as a row, on the device of the updates
    state     the state that the rule returned last time, a dict of tensors, {} at first. A rule that accepts it returns
              (result, state)
    root      [d], the update of the server's own data
    losses    float64 [n] on the CPU, each worker's loss at the global row before training
    workers   the workers' numbers, one per row
    last      [d], the last result, or None
    local_lr  the learning rate of the client algorithm, or None if it has none
    sync      "parameters" if the rows are updates, "gradients" if they are gradients at the global row
    metrics   a dict, to which the rule may add numbers or tensors with one element: they are recorded for the round
              under their names. A columnwise rule has none

A rule returns a row [d] or a LinearCombination of the rows, whose coefficients are recorded. A pre-aggregator returns
rows [m, d] or a LinearCombination with a matrix [m, n]. If it is also registered as a rule, it gives the mean of its
rows.

`@rule(name, columnwise=True)` declares that each column of the result depends only on that column of the updates.
Such a rule runs on blocks of columns in several processes; `rng` and `draws` start again in every block, so it may
draw numbers for rows, but not for columns. On a GPU it may be called with rows that are not finite, and then again
without them.

`linear=True` declares that all columns are the same linear combination of the rows, so the coefficients are known. On
a GPU the rule computes only the coefficients, from an identity matrix on the CPU; one matrix product combines the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsim.core.registry import Component, Registration, Registry
from fedsim.errors import ExperimentError

GIVEN = (
    *("updates", "weights", "gram", "rng", "draws", "state", "root", "losses", "workers", "last", "local_lr", "sync"),
    *("metrics", "weight_total"),
)

Count = Annotated[int, Field(ge=0)]  # f, the number of Byzantine rows that a rule tolerates
Positive = Annotated[float, Field(gt=0)]


# An imported rule can set the traits as attributes itself.
rule = Registry("aggregation rule", inputs=GIVEN, traits=("columnwise", "linear"))
pre_aggregator = Registry("pre-aggregator", inputs=GIVEN)


@dataclass(frozen=True)
class LinearCombination:
    """The result of a rule or pre-aggregator as coefficients: base + coefficients @ updates.

    Attributes:
        coefficients: [n] for a row, [m, n] for m rows; float64, on the CPU.
        base: [d]; None: zero.
        then: with a matrix, the columnwise function from m rows [m, columns] to one row [columns]; None: their mean.

    >>> def first_two(updates):
    ...     return fedsim.aggregation.LinearCombination(torch.tensor([0.5, 0.5, 0.0]).double())
    >>> fedsim.aggregate(torch.tensor([[1.0], [3.0], [8.0]]), rule=first_two)
    tensor([2.])
    """

    coefficients: Tensor
    base: Tensor | None = None
    then: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class RuleStage(Component):
    """A rule or pre-aggregator with its parameters.

    Attributes:
        f: the parameter of that name; None if there is none.
    """

    columnwise: bool = False
    linear: bool = False
    f: int | None = None

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> RuleStage:
        """Return the rule or pre-aggregator with checked parameters.

        Raises ExperimentError for a columnwise rule that accepts `metrics`, because it would record numbers for every
        block of columns, or `last` or `root`, which are whole rows.
        """
        columnwise, linear = (getattr(registration.target, name, False) for name in ("columnwise", "linear"))
        for name in ("metrics", "last", "root") if columnwise else ():
            if name in registration.takes:
                raise ExperimentError(
                    f"{registration.name}: a columnwise rule cannot take {name}; register it without columnwise"
                )
        return super().of(registration, params, columnwise=columnwise, linear=linear, f=params.get("f"))

    def __call__(self, value_of: Callable[[str], Any], f: int | None = None) -> Any:
        """Call the function with `value_of(name)` for each input, and with another `f` if it is not None."""
        inputs = {name: value_of(name) for name in self.accepts}
        return self.function(**inputs) if f is None else self.function(**inputs, f=f)


def average_of(chosen: Tensor, n: int) -> LinearCombination:
    """Return the mean of the rows at the positions `chosen`, of n rows."""
    coefficients = np.zeros(n)
    coefficients[chosen.numpy()] = 1 / len(chosen)
    return LinearCombination(torch.from_numpy(coefficients))


def require(holds: bool, rule: str, constraint: str, **numbers: float) -> None:
    """Raise ExperimentError with the constraint and its numbers unless it holds."""
    if not holds:
        values = ", ".join(f"{name} = {value}" for name, value in numbers.items())
        raise ExperimentError(f"{rule}: needs {constraint}; here {values}")
