"""Aggregation rules, which combine the workers' updates [n, d] into one update [d]."""

from fedsim.aggregation import rules  # noqa: F401  (registers the rules)
from fedsim.aggregation.functional import aggregate, pre_aggregate
from fedsim.aggregation.inputs import AggregationInputs, screened
from fedsim.aggregation.numerics.columns import column_blocks
from fedsim.aggregation.numerics.gram import Gram
from fedsim.aggregation.pipeline import AggregationResult, Pipeline
from fedsim.aggregation.resolve import make_pipeline, resolve
from fedsim.aggregation.rule import LinearCombination, pre_aggregator, rule

__all__ = [
    "AggregationInputs",
    "AggregationResult",
    "Gram",
    "LinearCombination",
    "Pipeline",
    "aggregate",
    "column_blocks",
    "make_pipeline",
    "pre_aggregate",
    "pre_aggregator",
    "resolve",
    "rule",
    "screened",
]
