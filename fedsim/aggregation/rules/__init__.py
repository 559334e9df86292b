"""Built-in aggregation rules and pre-aggregators, which are registered when this package is imported."""

from fedsim.aggregation.rules import (
    averages,
    clipping,
    filters,
    neighbours,
    order_statistics,
    pre_aggregators,
    selection,
    spectral,
    trust,
)

__all__ = [
    "averages",
    "clipping",
    "filters",
    "neighbours",
    "order_statistics",
    "pre_aggregators",
    "selection",
    "spectral",
    "trust",
]
