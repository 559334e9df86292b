"""Client algorithms: how a worker's row moves along its gradients, and what it keeps and sends."""

from fedsim.clients.adaptive import Adagrad, Adam, AdamW
from fedsim.clients.algorithm import ClientAlgorithm, WorkerRound, as_algorithm, exchanges, step_along
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
    "NonNegative",
    "OuterProductGrad",
    "Positive",
    "RowOptimizer",
    "Solver",
    "State",
    "WorkerRound",
    "as_algorithm",
    "exchanges",
    "solver",
    "step_along",
]
