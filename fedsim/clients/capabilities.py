"""Base classes of client algorithms that need further methods, and the registry of client algorithms."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsim.clients.algorithm import PERSONAL_BUFFERS, ClientAlgorithm
from fedsim.clients.base import State
from fedsim.core.registry import Registration, Registry
from fedsim.hints.meanings import nearest


class UpdateCorrection(ClientAlgorithm):
    """Base class of client algorithms in which the server corrects the aggregated update of each round."""

    def correct(self, update: Tensor, server: State, workers: float, population: int) -> None:
        """Correct the aggregated update in place, before it changes the global model.

        The method must treat each column separately.

        Args:
            update: some columns of the aggregated update, [columns].
            server: state of the server: the same columns of tensors [d], which may be changed, and tensors [1], which
                must not be changed.
            workers: number of workers whose updates were aggregated, or the expected number with central differential
                privacy, which hides the true number.
            population: number of all workers in the experiment.
        """


class CohortGradient(ClientAlgorithm):
    """Base class of client algorithms that use the mean of the workers' full gradients before the first local step."""

    full_gradient = True

    def receive_gradients(self, server: State, mean: Tensor) -> None:
        """Update the server's state before a round, in place.

        `mean` [d] is the mean of the full gradients of the workers that take part.
        """


class GradientMessage(ClientAlgorithm):
    """Base class of client algorithms whose workers send altered gradients if `sync = "gradients"`."""

    alters_gradients = True

    def send_gradients(self, gradients: Tensor, worker_state: State) -> None:
        """Change the gradients [..., d] that workers send if `sync = "gradients"`, in place.

        `worker_state` may be changed too.
        """


class FeatureLoss(ClientAlgorithm, ABC):
    """Base class of client algorithms with a loss term that compares hidden features of several models."""

    @abstractmethod
    def feature_points(self, state: State) -> Sequence[Tensor]:
        """Return the models [..., d] whose hidden features `feature_loss` needs; empty if there is no feature loss."""

    @abstractmethod
    def feature_loss(self, features: Tensor, at_points: Sequence[Tensor]) -> Tensor:
        """Return a term that is added to the loss of each sample, [..., batch].

        Args:
            features: the f hidden features of each sample in the workers' models, [..., batch, f].
            at_points: features of the same samples in each model that `feature_points` returns, without gradients.
        """


class PersonalModel(ClientAlgorithm, ABC):
    """Base class of client algorithms that give each worker a personal model, which tests of workers include."""

    @abstractmethod
    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        """Return the personal models [..., d] of workers.

        Each of the `rows` [..., d] is a copy of the global model. `worker_state` is the state that the workers keep.
        """


CAPABILITIES = UpdateCorrection, CohortGradient, GradientMessage, FeatureLoss, PersonalModel
MINIMAL = {"start", "step", "step_fused", "uses_start_row", "gradients_per_step"}  # suffice without a base class
GIVEN = ("model", "batches", "worker")  # inputs of functions that train a model


class ClientAlgorithmRegistry(Registry):
    """Registry of client algorithms, which are classes or functions `train(model, batches, ...)`."""

    def _registration(self, name: str, target: Any) -> Registration:
        if isinstance(target, type) and issubclass(target, Optimizer):
            hint = nearest(target.__name__.lower(), self.names())
            raise TypeError(
                "the class is a PyTorch optimizer, but a client algorithm must update the models of many workers at "
                f"once; {hint}"
            )
        if isinstance(target, type) or is_dataclass(target):
            _require_bases(target if isinstance(target, type) else type(target))
        registration = super()._registration(name, target)
        if is_dataclass(target) and hasattr(target, "step"):
            return registration
        is_function = callable(target) and not isinstance(target, type)
        parameters = inspect.signature(target).parameters if is_function else ()
        if not {"model", "batches"}.issubset(parameters):
            raise TypeError(
                "a client algorithm must be a dataclass that derives from fedsim.clients.ClientAlgorithm, or a "
                "function with the parameters model and batches, such as train(model, batches, lr); see "
                "docs/how-to/own-client-algorithm.md"
            )
        return replace(registration, takes={name: True for name in GIVEN if name in parameters})


def _require_bases(target: type) -> None:
    """Raise TypeError if a class has a method but not the base class that declares it, or has no `step` method."""
    for base in (*CAPABILITIES, ClientAlgorithm):
        others = MINIMAL if base is ClientAlgorithm else vars(ClientAlgorithm).keys()
        names = [name for name in vars(base).keys() - others if name[0] != "_" and hasattr(target, name)]
        if names and not issubclass(target, base):
            raise TypeError(f"the class defines {min(names)}; derive it from fedsim.clients.{base.__name__}")
    if hasattr(target, "with_lr"):
        raise TypeError("the method with_lr(lr) is now having(**values), which also receives other parameters")
    step = "step" if getattr(target, "element_wise", True) else "step_rows"
    if getattr(target, step, None) is getattr(ClientAlgorithm, step):
        raise TypeError(f"the client algorithm must define {step}")


client_algorithm = ClientAlgorithmRegistry("client algorithm")


def needs_local_steps(algorithm: ClientAlgorithm) -> bool:
    """Whether an algorithm needs several local steps per round, so that `sync = "gradients"` is impossible."""
    row = torch.zeros(2)
    needs = [algorithm.uses_start_row, not algorithm.element_wise, algorithm.full_gradient]
    needs += [algorithm.sample_noise is not None, isinstance(algorithm, UpdateCorrection)]
    state = algorithm.worker_state(row) and not algorithm.alters_gradients
    return any(needs) or any((state, algorithm.server_state(row), algorithm.message(row)))


def personal_model(
    algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor, worker_state: State
) -> tuple[Tensor, Tensor]:
    """Return the parameters [d] and the buffers [b] of a worker's personal model.

    Args:
        algorithm: client algorithm.
        row: parameters of the global model, [d].
        buffers: buffers of the global model, [b].
        worker_state: state that the worker keeps between rounds.
    """
    of_algorithm = {name: tensor for name, tensor in worker_state.items() if name != PERSONAL_BUFFERS}
    if PERSONAL_BUFFERS in worker_state:
        buffers = buffers.clone()
        algorithm.buffers_kept(len(buffers)).write(buffers, worker_state[PERSONAL_BUFFERS])
    return (algorithm.personal_rows(row, of_algorithm) if isinstance(algorithm, PersonalModel) else row), buffers
