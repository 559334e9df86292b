"""Server optimizer that can be used without an experiment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.aggregation.containers import as_rows, has_tensors
from fedsim.clients import State
from fedsim.errors import ExperimentError
from fedsim.hints.attributes import takes_component
from fedsim.server.optimizer import ServerStep, server_optimizer


class ServerOptimizer:
    """Server optimizer, which moves a global model along aggregated updates.

    The object keeps the optimizer's state, but not the model. A model is a tensor of any shape, usually [d], of any
    floating-point dtype and device. Shape, dtype and device must be the same in all steps. A model may also be a
    state_dict, another dict, or a list of tensors or arrays, and results then have the same structure. Entries that are
    not floating-point are not changed.

    Args:
        name: server optimizer: a registered name, or "package.module:Class".
        params: parameters of the optimizer.

    Raises ExperimentError (a ValueError) for an unknown optimizer or an invalid parameter.

    >>> server = fedsim.ServerOptimizer("momentum", beta=0.9)
    >>> row = torch.zeros(2)
    >>> for updates in torch.ones(2, 3, 2):
    ...     row = server.step(row, fedsim.aggregate(updates))
    >>> row
    tensor([2.9000, 2.9000])
    """

    @takes_component("server")
    def __init__(self, name: str, **params: Any) -> None:
        registration = server_optimizer.get(name, "server.name")
        self._optimizer: ServerStep = registration.bind(registration.check(params, "server", beside=["name"]))
        self._state: State | None = None
        self._kind = ""  # dtype, shape and device of the model in the first step

    @torch.no_grad()
    def step(self, global_row: Any, update: Any) -> Any:
        """Take one step, and return the new global model.

        Args:
            global_row: global model, a tensor [d] or a nested structure of tensors. It is not changed.
            update: aggregated update, with the shape or structure of `global_row`. The update of a worker is its
                trained model minus the model that it received (see `broadcast`).

        Returns a new model with the structure of `global_row`.

        Raises ExperimentError if shape, dtype or device differ between the arguments or from earlier steps.
        """
        if not isinstance(global_row, Tensor) and has_tensors(global_row):
            [row], form = as_rows([global_row], "global_row")
            return form.rebuild(self.step(row, form.row(update, "update")))
        self._check(global_row)
        if _kind(update) != _kind(global_row):
            raise ExperimentError(f"update: must be {_kind(global_row)} like global_row, not {_kind(update)}")
        row = global_row.clone()
        if self._state is None:
            self._state, self._kind = self._optimizer.start(row), _kind(row)
        self._optimizer.step(row, update, self._state)
        return row

    @torch.no_grad()
    def broadcast(self, global_row: Any) -> Any:
        """Return the model that is sent to the workers, for most optimizers a copy of `global_row`.

        Raises ExperimentError if shape, dtype or device differ from earlier steps.
        """
        if not isinstance(global_row, Tensor) and has_tensors(global_row):
            [row], form = as_rows([global_row], "global_row")
            return form.rebuild(self.broadcast(row))
        self._check(global_row)
        state = self._optimizer.start(global_row) if self._state is None else self._state
        return self._optimizer.broadcast(global_row, state).clone()

    @property
    def state(self) -> dict[str, Tensor]:
        """Copy of the optimizer's state: tensors of the model's shape by name, or {} before the first step."""
        return {name: tensor.clone() for name, tensor in (self._state or {}).items()}

    def _check(self, global_row: Tensor) -> None:
        if not isinstance(global_row, Tensor) or not global_row.is_floating_point():
            raise ExperimentError(f"global_row: must be a floating-point tensor, not {_kind(global_row)}")
        if self._state is not None and _kind(global_row) != self._kind:
            raise ExperimentError(f"global_row: must be {self._kind} as at the first step, not {_kind(global_row)}")


def _kind(value: Any) -> str:
    """Describe a tensor (dtype, shape, device) or another object (type) for error messages."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)} on {value.device}"
