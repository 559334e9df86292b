"""A server optimizer without an experiment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.aggregation.containers import as_rows, has_tensors
from fedsim.clients import State
from fedsim.errors import ExperimentError
from fedsim.server.optimizer import ServerStep, server_optimizer


class ServerOptimizer:
    """Moves a global row by aggregated updates.

    The object keeps the optimizer's state, which the first step makes, but not the row. Tensors may have any shape,
    usually [d], any floating dtype and device; they must be the same in all steps. In place of a tensor, a state_dict,
    another dict, or a list of tensors or arrays gives its form; entries that are not floating stay as they are.

    Args:
        optimizer: a registered name, or "package.module:Class".
        params: parameters of the optimizer.

    Raises ExperimentError (a ValueError) for an unknown optimizer or a wrong parameter.

    >>> server = fedsim.ServerOptimizer("momentum", beta=0.9)
    >>> row = torch.zeros(2)
    >>> for updates in torch.ones(2, 3, 2):
    ...     row = server.step(row, fedsim.aggregate(updates))
    >>> row
    tensor([2.9000, 2.9000])
    """

    def __init__(self, optimizer: str, **params: Any) -> None:
        registration = server_optimizer.get(optimizer, "optimizer")
        self._optimizer: ServerStep = registration.bind(registration.check(params))
        self._state: State | None = None
        self._kind = ""  # of row: the first step's dtype, shape and device

    @torch.no_grad()
    def step(self, global_row: Any, update: Any) -> Any:
        """The new global row, a new tensor, or the form of `global_row`; the arguments stay unchanged.

        `update` is the aggregate of (worker's row - the row that the worker was sent); see `broadcast`.

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
        """The row that the workers are sent, a new tensor; for most optimizers a copy of `global_row`.

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
        """A copy of the optimizer's state: tensors of the row's shape by name; empty before the first step."""
        return {name: tensor.clone() for name, tensor in (self._state or {}).items()}

    def _check(self, global_row: Tensor) -> None:
        if not isinstance(global_row, Tensor) or not global_row.is_floating_point():
            raise ExperimentError(f"global_row: must be a floating tensor, not {_kind(global_row)}")
        if self._state is not None and _kind(global_row) != self._kind:
            raise ExperimentError(f"global_row: must be {self._kind} as at the first step, not {_kind(global_row)}")


def _kind(value: Any) -> str:
    """Dtype, shape and device of a tensor, for errors."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)} on {value.device}"
