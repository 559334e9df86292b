"""A server optimizer by itself, for use without an experiment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.aggregation.server import ServerStep, server_optimizer
from fedsim.errors import ExperimentError
from fedsim.local import State


class ServerOptimizer:
    """Moves a global row by one aggregated update after another: `ServerOptimizer("adam", lr=0.03)`.

        server = ServerOptimizer("momentum", beta=0.9)
        for updates in rounds:
            row = server.step(row, aggregate(updates))

    Args:
        optimizer: a registered name, or "package.module:Class".
        params: the optimizer's own parameters.

    It keeps the optimizer's state, which is made at the first step, and not the row. Tensors may have any shape, [d] as
    a rule, any floating dtype and device, which the first step settles for all that follow.

    Raises ExperimentError (a ValueError) for an unknown optimizer or a wrong parameter.
    """

    def __init__(self, optimizer: str, **params: Any) -> None:
        plug = server_optimizer.get(optimizer, "optimizer")
        self._optimizer: ServerStep = plug.bind(plug.check(params))
        self._state: State | None = None
        self._kind = ""  # of row: the first step's dtype, shape and device

    @torch.no_grad()
    def step(self, global_row: Tensor, update: Tensor) -> Tensor:
        """The new global row, a new tensor; `global_row` and `update` are left unchanged.

        `update` is the aggregate of (worker's row - the row it was sent); see `broadcast`.

        Raises ExperimentError where the two differ in shape, dtype or device, from each other or from earlier steps.
        """
        self._check(global_row)
        if _kind(update) != _kind(global_row):
            raise ExperimentError(f"update: must be {_kind(global_row)} like global_row, not {_kind(update)}")
        row = global_row.clone()
        if self._state is None:
            self._state, self._kind = self._optimizer.start(row), _kind(row)
        self._optimizer.step(row, update, self._state)
        return row

    @torch.no_grad()
    def broadcast(self, global_row: Tensor) -> Tensor:
        """What the workers are sent in place of `global_row`, a new tensor; most optimizers send its very values.

        Raises ExperimentError for a row that differs in shape, dtype or device from earlier steps.
        """
        self._check(global_row)
        state = self._optimizer.start(global_row) if self._state is None else self._state
        return self._optimizer.broadcast(global_row, state).clone()

    @property
    def state(self) -> dict[str, Tensor]:
        """A copy of the optimizer's state, tensors of the row's shape by name; empty before the first step."""
        return {name: tensor.clone() for name, tensor in (self._state or {}).items()}

    def _check(self, global_row: Tensor) -> None:
        if not isinstance(global_row, Tensor) or not global_row.is_floating_point():
            raise ExperimentError(f"global_row: must be a floating tensor, not {_kind(global_row)}")
        if self._state is not None and _kind(global_row) != self._kind:
            raise ExperimentError(f"global_row: must be {self._kind} as at the first step, not {_kind(global_row)}")


def _kind(value: Any) -> str:
    """What a tensor has to have in common with others to work with them, as an error says it."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {list(value.shape)} on {value.device}"
