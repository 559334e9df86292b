"""From the workers' updates to the next global row: rules and server optimizers."""

from fedsim.aggregation.rules import BoundRule, aggregate, bind_rule, column_blocks, rule
from fedsim.aggregation.server import ServerStep, server_optimizer

__all__ = ["BoundRule", "ServerStep", "aggregate", "bind_rule", "column_blocks", "rule", "server_optimizer"]
