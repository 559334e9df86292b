"""The server: server optimizers, which move the global row by the aggregate, and cohort strategies."""

from fedsim.server import availability  # noqa: F401  (registers its strategies)
from fedsim.server.cohort import (
    BoundCohortStrategy,
    Cohort,
    CohortSampler,
    bind_cohort_strategy,
    cohort_strategy,
)
from fedsim.server.functional import ServerOptimizer
from fedsim.server.optimizer import ServerStep, server_optimizer

__all__ = [
    "BoundCohortStrategy",
    "Cohort",
    "CohortSampler",
    "ServerOptimizer",
    "ServerStep",
    "bind_cohort_strategy",
    "cohort_strategy",
    "server_optimizer",
]
