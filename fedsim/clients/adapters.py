"""Algorithms of other kinds as client algorithms: with two methods only, with a state that is kept, and functions."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm, WorkerRound, exchanges
from fedsim.clients.base import OuterProductGrad, State, Stepper
from fedsim.core.registry import Registration
from fedsim.errors import ExperimentError, show


class AlgorithmOnly(ClientAlgorithm):
    """A client algorithm that has `start` and `step` only, and perhaps `step_fused`, as a client algorithm."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm
        self.uses_start_row = getattr(algorithm, "uses_start_row", False)  # type: ignore[misc]
        self.gradients_per_step = getattr(algorithm, "gradients_per_step", 1)  # type: ignore[misc]
        for name in ("start", "step", "step_fused"):
            if hasattr(algorithm, name):
                setattr(self, name, getattr(algorithm, name))

    def with_lr(self, lr: float) -> ClientAlgorithm:
        return AlgorithmOnly(replace(self.algorithm, lr=lr))

    def __repr__(self) -> str:
        return repr(self.algorithm)


def as_algorithm(algorithm: Stepper) -> ClientAlgorithm:
    """Return a client algorithm as a client algorithm; unchanged if it is one."""
    return algorithm if isinstance(algorithm, ClientAlgorithm) else AlgorithmOnly(algorithm)


class KeptState(ClientAlgorithm):
    """A client algorithm that continues with the state of the worker's last round; `local.keep_state = true`.

    Args:
        client algorithm: has `start`, `step` and perhaps `step_fused` only, and a state that its rounds begin with.

    Raises ExperimentError for other client algorithms.

    Cost: a row [d] for each tensor of the state, for each worker that has taken part.

    >>> algorithm = fedsim.clients.KeptState(fedsim.clients.SGD(lr=0.1, momentum=0.9))
    >>> algorithm.worker_state(torch.zeros(2))
    {'momentum': tensor([0., 0.])}
    """

    def __init__(self, algorithm: ClientAlgorithm) -> None:
        self.algorithm = algorithm
        self.gradients_per_step = algorithm.gradients_per_step  # type: ignore[misc]
        others = ("start_round", "step_rows", "finish", "correct")
        if any(algorithm.has(method) for method in others) or algorithm.uses_start_row or exchanges(algorithm):
            raise ExperimentError(
                "local.keep_state = true: is for client algorithms such as sgd and adam only; omit it"
            )
        if not algorithm.start(torch.zeros(1)):
            raise ExperimentError(
                "local.keep_state = true: the client algorithm has no state with these parameters; omit it"
            )

    @property
    def setting(self) -> str:
        return "local.keep_state = true"

    def worker_state(self, row: Tensor) -> State:
        return self.algorithm.start(row)

    def start(self, rows: Tensor) -> State:
        return self.algorithm.start(rows)

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {name: kept.clone() for name, kept in worker.kept.items()}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        self.algorithm.step(rows, gradients, state)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        self.algorithm.step_fused(rows, product, state)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept.update(state)
        return {}

    def with_lr(self, lr: float) -> ClientAlgorithm:
        return KeptState(self.algorithm.with_lr(lr))

    def __repr__(self) -> str:
        return f"KeptState({self.algorithm!r})"


class TrainFunction(ClientAlgorithm):
    """A function `train(model, batches, ...)` that moves a worker's model in a round.

    The trainer calls it once for each round of a worker, one worker after another. Its parameters other than `model`,
    `batches` and `worker` are keys of `[local]`. On the virtual clock a batch takes the time of one gradient, or of as
    many as the attribute `gradients_per_step` of the function says.

    Args:
        component: the function; `takes` has those of `model`, `batches` and `worker` that are parameters of it.
        settings: the values of its other parameters.
    """

    uses_start_row: ClassVar[bool] = True  # so it needs local steps

    def __init__(self, registration: Registration, settings: dict[str, Any]) -> None:
        self.name, self._takes, self._settings = str(registration.name), tuple(registration.takes), settings
        self._function = registration.bind({})
        gradients = getattr(registration.target, "gradients_per_step", 1)
        if not (isinstance(gradients, int | float) and 0 < gradients < math.inf):
            raise ExperimentError(
                f"local.algorithm = {show(self.name)}: has gradients_per_step = {show(gradients)}; must be a number "
                "greater than 0, the gradients that it computes of each batch"
            )
        self.gradients_per_step = gradients  # type: ignore[assignment, misc]

    def __call__(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], worker: int) -> float:
        """Train the model in place; returns the mean training loss, NaN if the function returns none."""
        arguments = {"model": model, "batches": batches, "worker": worker}
        loss = self._function(**self._settings, **{name: arguments[name] for name in self._takes})
        if loss is None:
            return float("nan")
        if isinstance(loss, numbers.Real) or (isinstance(loss, Tensor) and loss.numel() == 1):
            return float(loss)
        raise ExperimentError(
            f"local.algorithm = {show(self.name)}: returned a {type(loss).__name__}; must return nothing, or the mean "
            "training loss as a number"
        )

    def with_lr(self, lr: float) -> ClientAlgorithm:
        changed = copy.copy(self)
        changed._settings = {**self._settings, "lr": lr}
        return changed

    def __repr__(self) -> str:
        return f"TrainFunction({self.name!r}, {self._settings!r})"
