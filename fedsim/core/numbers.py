"""Types of numbers with bounds, for parameters of components and keys of experiments.

Numbers without an upper bound have the types of pydantic: `PositiveInt`, `NonNegativeInt`, `PositiveFloat` and
`NonNegativeFloat`. Counts fit into a 64-bit integer.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

Iterations = Annotated[PositiveInt, Field(le=10_000)]  # each takes as long as an aggregation
PositiveCount = Annotated[PositiveInt, Field(lt=2**63)]
Count = Annotated[NonNegativeInt, Field(lt=2**63)]

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
ProperFraction = Annotated[float, Field(gt=0, lt=1)]
