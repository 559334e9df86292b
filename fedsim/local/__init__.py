"""Local solvers: how a worker's row moves along its gradients."""

from fedsim.local.adaptive import Adagrad, Adam, AdamW
from fedsim.local.sgd import SGD, FedProx
from fedsim.local.solver import (
    Decay,
    NonNegative,
    Positive,
    Product,
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
    "Positive",
    "Product",
    "RowOptimizer",
    "Solver",
    "State",
    "solver",
    "step_along",
]
