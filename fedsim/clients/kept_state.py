"""A solver whose state, such as momentum, a worker keeps between its rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, WorkerRound, exchanges
from fedsim.clients.solver import OuterProductGrad, State
from fedsim.errors import ExperimentError


class KeptState(ClientAlgorithm):
    """A solver that continues with the state of the worker's last round; `local.keep_state = true`.

    Args:
        solver: has `start`, `step` and perhaps `step_fused` only, and a state that its rounds begin with.

    Raises ExperimentError for other solvers.

    Cost: a row [d] for each tensor of the state, for each worker that has taken part.

    >>> algorithm = fedsim.clients.KeptState(fedsim.clients.SGD(lr=0.1, momentum=0.9))
    >>> algorithm.worker_state(torch.zeros(2))
    {'momentum': tensor([0., 0.])}
    """

    def __init__(self, solver: ClientAlgorithm) -> None:
        self.solver = solver
        self.gradients_per_step = solver.gradients_per_step  # type: ignore[misc]
        others = ("start_round", "step_rows", "finish", "correct")
        if any(solver.has(method) for method in others) or solver.uses_start_row or exchanges(solver):
            raise ExperimentError("local.keep_state = true: is for solvers such as sgd and adam only; omit it")
        if not solver.start(torch.zeros(1)):
            raise ExperimentError("local.keep_state = true: the solver has no state with these parameters; omit it")

    @property
    def setting(self) -> str:
        return "local.keep_state = true"

    def worker_state(self, row: Tensor) -> State:
        return self.solver.start(row)

    def start(self, rows: Tensor) -> State:
        return self.solver.start(rows)

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {name: kept.clone() for name, kept in worker.kept.items()}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        self.solver.step(rows, gradients, state)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        self.solver.step_fused(rows, product, state)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept.update(state)
        return {}

    def with_lr(self, lr: float) -> ClientAlgorithm:
        return KeptState(self.solver.with_lr(lr))

    def __repr__(self) -> str:
        return f"KeptState({self.solver!r})"
