"""From the workers' updates to the next global row: rules and server optimizers."""

from fedsim.aggregation import (  # noqa: F401  (each registers its plugs)
    averaging,
    clipping,
    fedopt,
    mixing,
    order_statistics,
    selection,
    spectral,
    trust,
)
from fedsim.aggregation.cohort import Cohort, screened
from fedsim.aggregation.columns import column_blocks
from fedsim.aggregation.gram import Gram
from fedsim.aggregation.pipeline import Outcome, Pipeline
from fedsim.aggregation.resolving import make_pipeline, resolve
from fedsim.aggregation.rule import Mix, pre_aggregator, rule
from fedsim.aggregation.server import ServerStep, server_optimizer
from fedsim.aggregation.standalone import ServerOptimizer
from fedsim.aggregation.stateless import aggregate, pre_aggregate

__all__ = [
    "Cohort",
    "Gram",
    "Mix",
    "Outcome",
    "Pipeline",
    "ServerOptimizer",
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
