"""What an aggregation rule is, and how one is registered.

A rule is a pure function that makes one row [d] of the workers' updates [n, d]. Its positional parameters take, by
name, what it needs of all that there is; its keyword-only parameters are its configuration:

    updates   [n, d], the workers' updates
    weights   [n] float64, >= 0, not all zero; on the device of the updates if the rule takes those, else on the CPU.
              Without it a rule has no weighted form, and weights are an error. With a default it can do without; where
              it has none, an experiment gives sample counts unless told otherwise
    gram      Gram: distances and inner products of all pairs of rows, shared by all rules that ask for them (where
              squares would leave the range of float64, in a unit of its own: `gram.unit`)
    rng       NumPy generator, seeded by (seed, round): for a few numbers, on the host
    draws     Draws, a function of (seed, round): for tensors as long as a row, on the device of the updates
    state     what the rule returned last time, a dict of tensors; {} at first. Such a rule returns (result, state)
    root      [d], the update that the server's own data gives
    losses    [n] float64 on the CPU, each worker's loss at the global row before it trained
    workers   the workers' numbers, one per row
    last      [d], what the rule gave last time, or None
    local_lr  the learning rate of the local solver, or None if it has none
    sync      what the rows are: "parameters": updates; "gradients": gradients at the global row

A rule that gives a Mix instead of a row says which workers count for how much, and spares itself the arithmetic. A
pre-aggregator is the same, but its Mix has a matrix [m, n] and makes m rows of n. It may also return rows [m, d].

`@rule(name, columnwise=True)` declares that each column of the result depends on that column of the updates alone.
Such rules run on blocks of columns, several processes at a time; in every block `rng` and `draws` begin anew, so that
such a rule may draw numbers for rows, but none for columns. On a GPU they may be given rows that are not finite, and
again without these: there it is known later whether there are any.
`linear=True` declares that they are one and the same linear combination of the rows in all columns, so that it can be
told which row counts for how much. On a GPU only these coefficients are computed by the rule, from the identity matrix
on the CPU, and the rows are combined by one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsim.errors import ExperimentError
from fedsim.registry import Plug, Registry

GIVEN = ("updates", "weights", "gram", "rng", "draws", "state", "root", "losses", "workers", "last", "local_lr", "sync")

Count = Annotated[int, Field(ge=0)]  # f, the number of Byzantine rows that a rule is to withstand
Positive = Annotated[float, Field(gt=0)]


class RuleRegistry(Registry):
    """A Registry whose decorator also takes `columnwise` and `linear`."""

    def __call__(
        self, name: str, *, columnwise: bool = False, linear: bool = False
    ) -> Callable[[Callable[..., Any]], Any]:
        register = super().__call__(name)

        def mark(target: Callable[..., Any]) -> Any:
            for mark in ["columnwise"] * columnwise + ["linear"] * linear:
                setattr(target, mark, True)  # a user's imported rule can set it too
            return register(target)

        return mark


rule = RuleRegistry("aggregation rule", given=GIVEN)
pre_aggregator = Registry("pre-aggregator", given=GIVEN)


@dataclass(frozen=True)
class Mix:
    """A result that is a linear combination of the updates: base + coefficients @ updates.

    Attributes:
        coefficients: [n] for a row, [m, n] for m rows; float64, on the CPU.
        base: [d], or None for zero.
        then: with a matrix, the columnwise function that makes one row [columns] of the m [m, columns].
    """

    coefficients: Tensor
    base: Tensor | None = None
    then: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class BoundRule:
    """A rule (or pre-aggregator) with its parameters, which can be pickled to other processes."""

    function: Callable[..., Any]
    name: str
    takes: dict[str, bool]  # of what is given; whether it is needed
    columnwise: bool = False
    linear: bool = False
    f: int | None = None  # as configured; None: the rule has no such parameter

    def __call__(self, menu: Callable[[str], Any], f: int | None = None) -> Any:
        """Call it with what it takes; `menu(name)` gives that. Another `f` takes the place of the configured one."""
        given = {name: menu(name) for name in self.takes}
        return self.function(**given) if f is None else self.function(**given, f=f)


def bind_rule(plug: Plug, params: dict[str, Any]) -> BoundRule:
    """The rule `plug` with checked `params`."""
    return BoundRule(
        function=plug.bind(params),
        name=plug.name,
        takes=plug.takes,
        columnwise=getattr(plug.target, "columnwise", False),
        linear=getattr(plug.target, "linear", False),
        f=params.get("f"),
    )


def average_of(chosen: Tensor, n: int) -> Mix:
    """The plain mean of the rows at positions `chosen`."""
    coefficients = np.zeros(n)
    coefficients[chosen.numpy()] = 1 / len(chosen)
    return Mix(torch.from_numpy(coefficients))


def require(holds: bool, rule: str, constraint: str, **numbers: float) -> None:
    """Raise ExperimentError, with the constraint and the numbers, unless it holds."""
    if not holds:
        told = ", ".join(f"{name} = {value}" for name, value in numbers.items())
        raise ExperimentError(f"{rule}: needs {constraint}; here {told}")
