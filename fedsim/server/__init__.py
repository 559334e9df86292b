"""The server: server optimizers, which move the global model, and cohort strategies, which choose the workers."""

from fedsim.server import availability  # noqa: F401  (registers its strategies)
from fedsim.server.cohort import Cohort, CohortSampler, CohortStrategy, sampling_strategy
from fedsim.server.functional import ServerOptimizer
from fedsim.server.optimizer import ServerStep, server_optimizer

__all__ = [
    "Cohort",
    "CohortSampler",
    "CohortStrategy",
    "ServerOptimizer",
    "ServerStep",
    "sampling_strategy",
    "server_optimizer",
]
