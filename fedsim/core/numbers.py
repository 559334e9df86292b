"""Types of numbers with bounds, for parameters of components and keys of experiments, without pydantic.

pydantic checks the bounds of `Limits` where it checks a type. `fitted` checks most values without importing pydantic.
Counts fit into a 64-bit integer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

UNSURE = object()  # result of `fitted` if pydantic must decide


class Mark:
    """Base class of what `Annotated` adds to the types of parameters."""

    def allows(self, value: Any) -> bool:
        """Whether a parameter may have this value, which already has the annotated type."""
        return True


@dataclass(frozen=True)
class Example(Mark):
    """Example of a required parameter for error messages, and text about an alternative that follows it."""

    value: Any
    alternative: str = ""


@dataclass(frozen=True)
class Limits(Mark):
    """Bounds of a number: above `gt`, at least `ge`, below `lt`, at most `le`.

    >>> from pydantic import TypeAdapter
    >>> TypeAdapter(Annotated[int, Limits(gt=0)]).validate_python(3)
    3
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {name: bound for name, bound in vars(self).items() if bound is not None}

    def allows(self, value: Any) -> bool:
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )


PositiveInt = Annotated[int, Limits(gt=0)]
NonNegativeInt = Annotated[int, Limits(ge=0)]
PositiveFloat = Annotated[float, Limits(gt=0)]
NonNegativeFloat = Annotated[float, Limits(ge=0)]

Iterations = Annotated[int, Limits(gt=0, le=10_000)]  # each takes as long as an aggregation
PositiveCount = Annotated[int, Limits(gt=0, lt=2**63)]
Count = Annotated[int, Limits(ge=0, lt=2**63)]

Fraction = Annotated[float, Limits(ge=0, le=1)]
PositiveFraction = Annotated[float, Limits(gt=0, le=1)]
FractionBelowOne = Annotated[float, Limits(ge=0, lt=1)]
ProperFraction = Annotated[float, Limits(gt=0, lt=1)]


def fitted(kind: Any, value: Any) -> Any:
    """Return a value as the type `kind`, or `UNSURE` if the value may be wrong or only pydantic knows the type.

    As in pydantic's checks, an integer becomes a float where `kind` is float, and a list becomes a tuple.

    >>> fitted(PositiveFloat | None, 2), fitted(PositiveFloat, -2) is UNSURE
    (2.0, True)
    """
    if kind is Any or (type(value) is kind and kind in (bool, int, str, NoneType)):
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # neither NaN nor infinity
        return float(value)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = fitted(parts[0], value)
        allowed = value is not UNSURE and all(isinstance(mark, Mark) and mark.allows(value) for mark in parts[1:])
        return value if allowed else UNSURE
    if origin is Literal:
        return value if any(type(value) is type(part) and value == part for part in parts) else UNSURE
    if origin in (Union, UnionType):
        results = [result for part in parts if (result := fitted(part, value)) is not UNSURE]
        return results[0] if len(results) == 1 else UNSURE
    if type(value) is list and (origin is list or (origin is tuple and parts[1:] == (...,))):
        items = [fitted(parts[0], item) for item in value]
        return UNSURE if any(item is UNSURE for item in items) else origin(items)
    return UNSURE
