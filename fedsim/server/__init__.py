"""Server optimizers: how the aggregated update moves the global row."""

from fedsim.server import fedopt  # noqa: F401  (registers its optimizers)
from fedsim.server.functional import ServerOptimizer
from fedsim.server.optimizer import ServerStep, server_optimizer

__all__ = ["ServerOptimizer", "ServerStep", "server_optimizer"]
