"""Client algorithms: how a worker's row moves along its gradients, and what it keeps and sends."""

from fedsim.clients.adaptive import Adagrad, Adam, AdamW
from fedsim.clients.algorithm import (
    ClientAlgorithm,
    GradientAt,
    WorkerFacts,
    WorkerRound,
    as_algorithm,
    exchanges,
    needs_local_steps,
    step_along,
)
from fedsim.clients.kept_state import KeptState
from fedsim.clients.sgd import SGD, FedProx
from fedsim.clients.solver import (
    Decay,
    NonNegative,
    OuterProductGrad,
    Positive,
    RowOptimizer,
    Solver,
    State,
    solver,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClientAlgorithm",
    "Decay",
    "FedProx",
    "GradientAt",
    "KeptState",
    "NonNegative",
    "OuterProductGrad",
    "Positive",
    "RowOptimizer",
    "Solver",
    "State",
    "WorkerFacts",
    "WorkerRound",
    "as_algorithm",
    "exchanges",
    "needs_local_steps",
    "solver",
    "step_along",
]
