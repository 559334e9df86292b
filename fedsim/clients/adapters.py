"""Adapters that make client algorithms from training functions and minimal objects, or keep optimizer states."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm, exchanges
from fedsim.clients.base import State, Stepper
from fedsim.clients.capabilities import UpdateCorrection
from fedsim.core.model_inputs import Inputs
from fedsim.core.registry import Registration
from fedsim.errors import ExperimentError, show


class AlgorithmOnly(ClientAlgorithm):
    """Client algorithm made from an object that has only the methods `start` and `step`."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm
        self.uses_start_row = getattr(algorithm, "uses_start_row", False)  # type: ignore[misc]
        self.gradients_per_step = getattr(algorithm, "gradients_per_step", 1)  # type: ignore[misc]
        self.element_wise = getattr(algorithm, "element_wise", True)  # type: ignore[misc]
        for name in ("start", "step", "step_fused", "step_rows"):
            if hasattr(algorithm, name):
                setattr(self, name, getattr(algorithm, name))

    def having(self, **values: Any) -> ClientAlgorithm:
        return AlgorithmOnly(replace(self.algorithm, **values))

    def __repr__(self) -> str:
        return repr(self.algorithm)


def as_algorithm(algorithm: Stepper) -> ClientAlgorithm:
    """Convert any object with the methods `start` and `step` to a `ClientAlgorithm`."""
    return algorithm if isinstance(algorithm, ClientAlgorithm) else AlgorithmOnly(algorithm)


def only_optimizes(algorithm: ClientAlgorithm) -> bool:
    """Whether an algorithm defines only steps and their optimizer state, such as `sgd`, `adam` and `muon`.

    Workers then keep and exchange nothing but their models, and a step does not depend on the received model.
    """
    rounds = [(cls.start_round, cls.finish) for cls in (type(algorithm), ClientAlgorithm)]
    has_more = rounds[0] != rounds[1] or isinstance(algorithm, UpdateCorrection) or algorithm.uses_start_row
    return not (has_more or exchanges(algorithm))


class KeptState(AlgorithmOnly):
    """Client algorithm whose workers keep their optimizer state, such as momentum, between rounds.

    It wraps another client algorithm, and is used if `local.keep_optimizer_state` is set.

    Args:
        algorithm: client algorithm that has an optimizer state, and no other state or message (see
            `only_optimizes`).

    Raises ExperimentError for other client algorithms.

    Cost: one row [d] for each tensor of the state and each worker that has taken part.

    >>> algorithm = fedsim.clients.KeptState(fedsim.clients.SGD(lr=0.1, momentum=0.9))
    >>> algorithm.worker_state(torch.zeros(2))
    {'momentum': tensor([0., 0.])}
    """

    setting = "local.keep_optimizer_state = true"

    def __init__(self, algorithm: ClientAlgorithm) -> None:
        super().__init__(algorithm)
        self.sample_noise = algorithm.sample_noise  # type: ignore[misc]
        if not only_optimizes(algorithm):
            raise ExperimentError(
                "local.keep_optimizer_state = true: only works with client algorithms such as sgd and adam; omit it"
            )
        if not algorithm.start(torch.zeros(1)):
            raise ExperimentError(
                "local.keep_optimizer_state = true: the client algorithm has no state (such as momentum) with the "
                "given parameters; omit it"
            )

    def worker_state(self, row: Tensor) -> State:
        return self.algorithm.start(row)

    def having(self, **values: Any) -> ClientAlgorithm:
        return self._of(self.algorithm.having(**values))

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        return self._of(self.algorithm.for_model(module))

    def _of(self, algorithm: ClientAlgorithm) -> ClientAlgorithm:
        changed = self._copy()  # without the check that there is a state, which depends on the largest momentum
        AlgorithmOnly.__init__(changed, algorithm)  # type: ignore[arg-type]
        return changed

    def __repr__(self) -> str:
        return f"KeptState({self.algorithm!r})"


class TrainFunction(ClientAlgorithm):
    """Client algorithm made from a function `train(model, batches, ...)` that trains a worker's model for one round.

    The function is called once per round for each worker. All its parameters except `model`, `batches` and `worker` are
    settings in `[local]`. The function can have an attribute `gradients_per_step`, the number of gradients that it
    computes per batch (by default 1), which determines simulated durations.

    Args:
        registration: registry entry of the function, which lists the inputs (`model`, `batches`, `worker`) it accepts.
        settings: values of the function's other parameters.
    """

    uses_start_row: ClassVar[bool] = True  # requires rounds of local steps

    def __init__(self, registration: Registration, settings: dict[str, Any]) -> None:
        self.name, self._takes, self._settings = str(registration.name), tuple(registration.takes), settings
        self._function = registration.bind({})
        gradients = getattr(registration.target, "gradients_per_step", 1)
        if not (isinstance(gradients, int | float) and 0 < gradients < math.inf):
            raise ExperimentError(
                f"local.algorithm = {show(self.name)}: gradients_per_step (number of gradients computed per batch) "
                f"must be greater than 0, not {show(gradients)}"
            )
        self.gradients_per_step = gradients  # type: ignore[assignment, misc]

    def __call__(self, model: nn.Module, batches: Iterable[tuple[Inputs, Tensor]], worker: int) -> float:
        """Train the model in place.

        Args:
            model: model of the worker.
            batches: batches (inputs, targets) of the round.
            worker: ID of the worker.

        Returns the mean training loss, or NaN if the function returns None.
        """
        arguments = {"model": model, "batches": batches, "worker": worker}
        loss = self._function(**self._settings, **{name: arguments[name] for name in self._takes})
        if loss is None:
            return float("nan")
        if isinstance(loss, numbers.Real) or (isinstance(loss, Tensor) and loss.numel() == 1):
            return float(loss)
        raise ExperimentError(
            f"local.algorithm = {show(self.name)}: the function returned a {type(loss).__name__}; it must return "
            "None, or the mean training loss as a number"
        )

    def having(self, **values: Any) -> ClientAlgorithm:
        changed = copy.copy(self)
        changed._settings = {**self._settings, **values}
        return changed

    def __repr__(self) -> str:
        return f"TrainFunction({self.name!r}, {self._settings!r})"
