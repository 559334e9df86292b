"""Gradients at points (parameter vectors) other than the worker's parameters, for one worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.core.rows import clip_rows
from fedsim.training.local_training import BatchGradients, LocalModel, LocalOptimizer
from fedsim.training.row_module import RowModule
from fedsim.training.task import RunTask


class PointModules:
    """Modules whose parameters are set to points (parameter vectors). All workers of a process use the same modules.

    Args:
        make: function that returns a new module.
        like: tensor with the shape, dtype and device of a point, [d].
    """

    def __init__(self, make: Callable[[], nn.Module], like: Tensor) -> None:
        self._make, self._like, self._made = make, like, list[RowModule]()

    @cached_property
    def point(self) -> Tensor:
        """Tensor [d] in which a caller can store one point, used again for each batch."""
        return torch.empty_like(self._like)

    @cached_property
    def gradient(self) -> Tensor:
        """Tensor [d] of which the gradients of all modules' parameters are views."""
        return torch.empty_like(self._like)

    def at(self, number: int, point: Tensor, buffers: Tensor) -> nn.Module:
        """Return a module in training mode whose parameters and buffers have the values of two flat vectors.

        Args:
            number: number of the module, from 0. A module that does not exist yet is created.
            point: parameters [d]. The module's parameters become views of this tensor.
            buffers: buffers [b], which are copied.
        """
        while len(self._made) <= number:
            self._made.append(RowModule(self._make))
        self._made[number].load(point, self.gradient, buffers)
        return self._made[number].module.train()


class PointOptimizer(LocalOptimizer):
    """Optimizer for client algorithms that need gradients at several parameter vectors per batch (`step_rows`).

    Args:
        task: description of the run.
        local: model of the worker.
        gradients: gradients of the worker's batches.
        modules: modules for points other than the worker's parameters.
        personal_buffers: buffers [cohort, b] of the personal models that workers train in addition. Forward passes at
            other points use and change the worker's row of this tensor. None: these passes use a copy of the buffers of
            the worker's model.
    """

    def __init__(
        self,
        task: RunTask,
        local: LocalModel,
        gradients: BatchGradients,
        modules: PointModules,
        personal_buffers: Tensor | None,
    ) -> None:
        super().__init__(task, local)
        self._gradients, self._modules = gradients, modules
        self._personal_buffers = None if personal_buffers is None else personal_buffers[local.member.slot]

    def step(self) -> None:
        clip_rows(self.local.gradient, self.clip_norm)
        algorithm = next(self.algorithms)
        algorithm.step_rows(self.local.row, self.local.gradient, self.local.state, self._gradient_at)

    def _gradient_at(self, point: Tensor) -> Tensor:
        """Return the gradient [d] of the current batch at the parameters `point` [d]."""
        row, gradient, buffers = self._modules.point, self._modules.gradient, self._personal_buffers
        model = self._modules.at(0, row, self.local.current_buffers() if buffers is None else buffers)
        with torch.no_grad():
            row.copy_(point)
        gradient.zero_()
        self._gradients.backward(model)
        if buffers is not None:
            self.local.module.layout.read_buffers(model, out=buffers)
        clip_rows(gradient, self.clip_norm)
        return gradient.clone()
