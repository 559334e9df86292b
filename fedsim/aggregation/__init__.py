"""From the workers' updates to the next global row: rules and server optimizers."""

from fedsim.aggregation import (  # noqa: F401  (each registers its rules)
    averaging,
    clipping,
    mixing,
    order_statistics,
    selection,
    spectral,
    trust,
)
from fedsim.aggregation.columns import column_blocks
from fedsim.aggregation.pipeline import (
    Cohort,
    Outcome,
    Pipeline,
    aggregate,
    make_pipeline,
    pre_aggregate,
    resolve,
    screened,
)
from fedsim.aggregation.rule import Mix, pre_aggregator, rule
from fedsim.aggregation.server import ServerStep, server_optimizer

__all__ = [
    "Cohort",
    "Mix",
    "Outcome",
    "Pipeline",
    "ServerStep",
    "aggregate",
    "column_blocks",
    "make_pipeline",
    "pre_aggregate",
    "pre_aggregator",
    "resolve",
    "rule",
    "screened",
    "server_optimizer",
]
