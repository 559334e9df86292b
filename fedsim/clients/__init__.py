"""Local solvers: how a worker's row moves along its gradients."""

from fedsim.clients.adaptive import Adagrad, Adam, AdamW
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
    step_along,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Decay",
    "FedProx",
    "NonNegative",
    "OuterProductGrad",
    "Positive",
    "RowOptimizer",
    "Solver",
    "State",
    "solver",
    "step_along",
]
