"""The aggregation rules and pre-aggregators; importing this package registers them."""

from fedsim.aggregation.rules import (
    averages,
    clipping,
    order_statistics,
    pre_aggregators,
    selection,
    spectral,
    trust,
)

__all__ = ["averages", "clipping", "order_statistics", "pre_aggregators", "selection", "spectral", "trust"]
