"""From the workers' updates to the next global row: rules and server optimizers."""

from fedsim.aggregation import fedopt as _fedopt  # noqa: F401  # registers adam, yogi and adagrad
from fedsim.aggregation.rules import BoundRule, aggregate, bind_rule, column_blocks, rule
from fedsim.aggregation.server import ServerStep, server_optimizer
from fedsim.aggregation.standalone import ServerOptimizer

__all__ = [
    "BoundRule",
    "ServerOptimizer",
    "ServerStep",
    "aggregate",
    "bind_rule",
    "column_blocks",
    "rule",
    "server_optimizer",
]
