"""Gradients of a loss that compares the features of several models (`FeatureLoss`), for one worker."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.clients import FeatureLoss
from fedsim.core.model_inputs import on_each, outputs_of
from fedsim.core.recorded_features import recorded_features
from fedsim.core.training import Objective
from fedsim.training.gradients_at_points import PointModules
from fedsim.training.local_training import BatchGradients, LocalModel


class FeatureGradients(BatchGradients):
    """Gradients of the loss plus the client algorithm's `feature_loss`."""

    def __init__(self, objective: Objective, algorithm: FeatureLoss, modules: PointModules, local: LocalModel) -> None:
        super().__init__(objective, local)
        self._algorithm, self._modules, self._points = algorithm, modules, algorithm.feature_points(local.state)

    def loss(self, model: nn.Module) -> Tensor:
        if not self._points:
            return super().loss(model)
        at_points = [self._features_at(position, point) for position, point in enumerate(self._points)]
        with recorded_features(model) as recorded:
            loss = super().loss(model)
        features = self.objective.precision.widened(recorded.of(len(self.targets)))
        return loss + self._algorithm.feature_loss(features, at_points).mean()

    @torch.no_grad()
    def _features_at(self, position: int, point: Tensor) -> Tensor:
        """Return the features of the current batch in the model `point`, element `position` of `feature_points`."""
        count, precision = len(self.targets), self.objective.precision
        module = 1 + position  # 0 is the module of `PointOptimizer`
        model = self._modules.at(module, point, self.local.current_buffers())
        masks = self.local.dropout.at(self.number, count)
        with masks, recorded_features(model) as recorded, precision.forward(self.targets.device):
            outputs_of(model, on_each(Tensor.clone, self.inputs))
        return precision.widened(recorded.of(count))
