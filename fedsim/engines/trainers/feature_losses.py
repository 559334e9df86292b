"""The part of a row's loss that depends on the features of models: see `ClientAlgorithm.feature_loss`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedsim.clients import State
from fedsim.core.recorded_features import recorded_features
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.row_module import RowModule

Masks = Callable[[], contextlib.AbstractContextManager[None]]  # sets the dropout masks of a step


class FeatureLosses:
    """Adds the feature loss of a client algorithm, if it has one, to the losses of one row after another.

    Args:
        make: makes the module that computes features at other rows.
    """

    def __init__(self, make: Callable[[], nn.Module], task: TaskSpec, shared: SharedState) -> None:
        self._make, self._algorithm, self._precision, self._shared = make, task.solver, task.precision, shared
        self._points: list[Tensor] = []
        self._modules: list[RowModule] = []

    @contextlib.contextmanager
    def of(self, module: RowModule, state: State) -> Iterator[None]:
        """In the block, losses of `module` have the feature loss of a worker with this state."""
        self._row_module, self._points = module, list(self._algorithm.feature_points(state))
        while len(self._modules) < len(self._points):
            self._modules.append(RowModule(self._make))
        try:
            yield
        finally:
            self._points = []

    @contextlib.contextmanager
    def added(self, model: nn.Module, inputs: Tensor, masks: Masks) -> Iterator[Callable[[Tensor], Tensor]]:
        """Give a function that adds the feature loss to the loss that the block computes."""
        if not self._points:
            yield lambda value: value
            return
        pairs = zip(self._points, self._modules, strict=False)
        at_points = [self._at(point, module, inputs, masks) for point, module in pairs]
        with recorded_features(model) as recorded:
            yield lambda value: value + self._loss(recorded.of(len(inputs)), at_points).mean()

    def _loss(self, features: Tensor, at_points: list[Tensor]) -> Tensor:
        return self._algorithm.feature_loss(self._precision.widened(features), at_points)

    @torch.no_grad()
    def _at(self, point: Tensor, module: RowModule, inputs: Tensor, masks: Masks) -> Tensor:
        """The features at a row [d]; what this changes in the buffers is dropped."""
        layout = self._row_module.layout
        buffers = layout.read_buffers(self._row_module.module, out=torch.empty_like(self._shared.global_buffers))
        module.load(point, torch.empty_like(point), buffers)
        module.module.train()
        with masks(), recorded_features(module.module) as recorded, self._precision.forward(inputs.device):
            module.module(inputs.clone())
        return self._precision.widened(recorded.of(len(inputs)))
