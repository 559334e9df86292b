"""Aggregation rules and pre-aggregators, and their registries.

A rule is a pure function from the workers' updates [n, d] to one row [d]. Its positional parameters receive these
inputs by name. Its keyword-only parameters are its configuration:

    updates   the workers' updates, one per row, [n, d]
    weights   weight of each row, float64 [n], >= 0 and not all zero, on the device of the updates if the rule also
              accepts `updates`, otherwise on the CPU. Weights are an error for a rule without this parameter. If the
              parameter has no default, an experiment uses the workers' sample counts unless `aggregate.weights` is set
    weight_total
              divisor of a weighted sum. None: the sum of the weights. It is 1 with
              `aggregate.weights = "inverse_probability"`, whose weights sum to 1 on average over the cohorts
    gram      Gram: distances and inner products of all pairs of rows, computed once for all stages that accept it
    rng       NumPy generator seeded by (seed, round), for small numbers of draws
    draws     Draws, seeded by (seed, round), for random tensors of length d, on the device of the updates
    state     dict of tensors that the rule returned in the previous aggregation, {} in the first one. A rule that
              accepts `state` returns (result, next state)
    root      update computed on the server's own data, [d]
    losses    each worker's loss at the global model before training, float64 [n] on the CPU
    workers   IDs of the workers, one per row
    last      result of the previous aggregation, [d], or None
    local_lr  learning rate of the client algorithm, or None if it has none
    sync      "parameters" if the rows are updates, "gradients" if they are gradients at the global model
    staleness  number of updates of the global model since each worker read it, int64 [n] on the CPU. 0 in synchronous
              rounds and on a graph
    models    model at which each worker began to compute its row, [n, d]. Only with asynchronous policies with a server
    own       position of the row of the worker that aggregates. Only with policies on a graph, where each worker
              aggregates the models of its neighbours and its own. There a row is x_j - x_i, the difference of a
              neighbour's model x_j to the own model x_i, and the worker adds the result to x_i. `weights` are the
              weights W_ij. The row at `own` is 0
    metrics   dict to which the rule may add numbers or one-element tensors, which are recorded for the round under
              their keys. Not available to columnwise rules

A rule returns a row [d], or a LinearCombination of the rows, whose coefficients are recorded. A pre-aggregator returns
rows [m, d], or a LinearCombination with coefficients [m, n]. Some pre-aggregators are also registered as rules. As a
rule, a pre-aggregator returns the mean of its rows.

`@rule(name, columnwise=True)` declares that each coordinate of the result depends only on this coordinate of the
updates. Such a rule is applied to blocks of columns in several processes. `rng` and `draws` are seeded again for every
block, so a columnwise rule may draw numbers for rows, but not for columns. On a GPU it may be called with rows that are
not finite, and then again without these rows.

`linear=True` declares that all columns of the result are the same linear combination of the rows. On a GPU such a rule
computes only the coefficients, from an identity matrix on the CPU. One matrix product then combines the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.numbers import Example, NonNegativeInt
from fedsim.core.registry import Component, Registration, Registry
from fedsim.errors import ExperimentError

GIVEN = (
    *("updates", "weights", "gram", "rng", "draws", "state", "root", "losses", "workers", "last", "local_lr", "sync"),
    *("metrics", "weight_total", "staleness", "models", "own"),
)

# f, the number of Byzantine rows that a rule must tolerate
ByzantineCount = Annotated[NonNegativeInt, Example(1)]


# A rule that is given as "package.module:function" sets the traits as attributes of the function.
rule = Registry("aggregation rule", inputs=GIVEN, traits=("columnwise", "linear"))
pre_aggregator = Registry("pre-aggregator", inputs=GIVEN)


@dataclass(frozen=True)
class LinearCombination:
    """Result of a rule or pre-aggregator, given by coefficients: base + coefficients @ updates.

    Attributes:
        coefficients: coefficient of each update, float64 on the CPU: [n] for one row, [m, n] for m rows.
        base: row [d] that is added. None: zero.
        then: function that combines the m rows into the result of a rule, separately for each column. It maps
            [m, columns] to [columns]. None: the mean.

    >>> def first_two(updates):
    ...     return fedsim.aggregation.LinearCombination(torch.tensor([0.5, 0.5, 0.0]).double())
    >>> fedsim.aggregate(torch.tensor([[1.0], [3.0], [8.0]]), first_two)
    tensor([2.])
    """

    coefficients: Tensor
    base: Tensor | None = None
    then: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class RuleStage(Component):
    """An aggregation rule or pre-aggregator with its parameters.

    Attributes:
        columnwise: whether each coordinate of the result depends only on this coordinate of the updates.
        linear: whether all columns of the result are the same linear combination of the updates.
        f: value of the parameter `f` (number of Byzantine workers), or None if there is no such parameter.
        built_in: whether the function belongs to fedsim.
    """

    columnwise: bool = False
    linear: bool = False
    f: int | None = None
    built_in: bool = False

    @classmethod
    def of(cls, registration: Registration, params: dict[str, Any], **settings: Any) -> RuleStage:
        """Create a `RuleStage` from a registered rule or pre-aggregator and its parameters.

        Raises ExperimentError for a columnwise rule with the input `metrics`, `last` or `root`, which need whole
        updates.
        """
        columnwise, linear = (getattr(registration.target, name, False) for name in ("columnwise", "linear"))
        for name in ("metrics", "last", "root") if columnwise else ():
            if name in registration.takes:
                raise ExperimentError(
                    f"{registration.name}: a columnwise rule cannot have the input {name}; register the rule without "
                    "columnwise"
                )
        built_in = str(getattr(registration.target, "__module__", "")).startswith(f"{__package__}.rules.")
        traits = {"columnwise": columnwise, "linear": linear, "built_in": built_in}
        return super().of(registration, params, f=params.get("f"), **traits)

    def __call__(self, value_of: Callable[[str], Any], f: int | None = None) -> Any:
        """Call the rule or pre-aggregator, and return its result.

        Args:
            value_of: function that maps the name of an input, such as "weights", to its value.
            f: value that replaces the parameter `f`. None: unchanged.

        Raises ExperimentError if a rule of the user changes the updates in place.
        """
        inputs = {name: value_of(name) for name in self.accepts}
        updates = None if self.built_in else inputs.get("updates")
        version = None if updates is None or updates.is_inference() else updates._version
        result = self.function(**inputs) if f is None else self.function(**inputs, f=f)
        if updates is not None and version not in (None, updates._version):
            raise ExperimentError(
                f"{self.name}: changes `updates` in place, which are used again after the rule; compute a new tensor, "
                "as in updates = updates * 2 instead of updates *= 2"
            )
        return result


def average_of(chosen: Tensor, n: int) -> LinearCombination:
    """Return the mean of the updates at the positions `chosen`. n is the number of all updates."""
    coefficients = np.zeros(n)
    coefficients[chosen.numpy()] = 1 / len(chosen)
    return LinearCombination(torch.from_numpy(coefficients))


def require_finite(numbers: np.ndarray, rule: str) -> None:
    """Raise ExperimentError if `numbers`, which `rule` computed from the updates, contain NaN or infinity.

    With nonfinite = "keep", the updates themselves may contain NaN or infinity.
    """
    if not np.isfinite(numbers).all():
        raise ExperimentError(
            f"{rule}: cannot compare updates that contain NaN or infinity; exclude such updates with "
            'aggregate.nonfinite=exclude (fedsim.aggregate: nonfinite="exclude")'
        )


def require(holds: bool, rule: str, constraint: str, **numbers: float) -> None:
    """Raise ExperimentError unless `holds` is true, that is, unless `constraint` is satisfied.

    The message contains the rule, the constraint (such as "2f < n") and the values `numbers` of its variables.
    """
    if not holds:
        values = ", ".join(f"{name} = {value}" for name, value in numbers.items())
        remedy = "; use a smaller f or a larger n (number of updates)" if "f" in numbers else ""
        raise ExperimentError(f"{rule}: needs {constraint}; here {values}{remedy}")
