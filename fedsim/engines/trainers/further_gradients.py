"""Steps of one row that need whole rows, or gradients at other points: see `ClientAlgorithm.step_rows`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsim.clients import State
from fedsim.core.rows import clip_rows
from fedsim.core.training import Loss
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.row_module import RowModule


class FurtherGradients:
    """The optimizer of a row for `train_epoch`, whose steps may ask for more gradients of their batch.

    Args:
        make: makes the module that computes these gradients.
    """

    def __init__(self, make: Callable[[], nn.Module], task: TaskSpec, shared: SharedState) -> None:
        self._task, self._module = task, RowModule(make)
        self._point, self._gradient = torch.empty(2, *shared.global_row.shape, dtype=task.dtype, device=task.device)
        self._buffers = shared.global_buffers.clone()

    def begin(
        self,
        row: Tensor,
        gradient: Tensor,
        state: State,
        module: RowModule,
        backward: Callable[[int, nn.Module, Tensor, Tensor], Tensor],
        round: int,
        first: int,
        buffers: Tensor | None,
    ) -> FurtherGradients:
        """Begin a member's work at step number `first` of a round.

        Args:
            row, gradient: the tensors that `module` is bound to.
            backward: adds the gradient of a batch, with the dropout masks of a step.
            buffers: [b], of the model at the other points, changed in place; None: copies of those of `module`.
        """
        self._own_buffers = buffers
        self._row, self._row_gradient, self._state = row, gradient, state
        self._of_row, self._backward, self._round, self._step = module, backward, round, first
        return self

    def zero_grad(self) -> None:
        self._row_gradient.zero_()

    def backward(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss | None = None) -> Tensor:
        """Add the gradient at the row, and keep the batch for further gradients."""
        self._batch = inputs, targets
        return self._backward(self._step, model, inputs, targets)

    def step(self) -> None:
        clip_rows(self._row_gradient, self._task.clip_norm)
        solver = self._task.solver_at(self._round, self._step)
        solver.step_rows(self._row, self._row_gradient, self._state, self._gradient_at)
        self._step += 1

    def _gradient_at(self, point: Tensor) -> Tensor:
        """The gradient [d] at another point [d]; what this changes in the buffers of the row is dropped."""
        buffers = self._own_buffers
        if buffers is None:
            buffers = self._of_row.layout.read_buffers(self._of_row.module, out=self._buffers)
        self._module.load(self._point, self._gradient, buffers)
        with torch.no_grad():
            self._point.copy_(point)
        self._gradient.zero_()
        self._backward(self._step, self._module.module, *self._batch)
        self._module.layout.read_buffers(self._module.module, out=buffers)
        clip_rows(self._gradient, self._task.clip_norm)
        return self._gradient.clone()
