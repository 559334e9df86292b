"""Gradients of DP-SGD: the gradient of each sample is clipped, and the mean gets Gaussian noise (Abadi et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from fedsim.clients.algorithm import SampleNoise
from fedsim.core import philox
from fedsim.core.model_inputs import Inputs, on_each
from fedsim.core.randomness import draw_key
from fedsim.core.training import Objective
from fedsim.privacy import clip_factors, row_norms
from fedsim.system.devices import to_device
from fedsim.training.local_training import BatchGradients, LocalModel
from fedsim.training.stacked_module import StackedModule
from fedsim.training.task import RunTask

MOST_BYTES = 2**25  # memory for the gradients of samples that are computed at once

Moment = tuple[int, int, int]  # round, worker and step, on which the noise of a batch depends


class SampleGradients:
    """Computes the private gradients (DP-SGD) of k workers. Each sample is a separate batch of a `StackedModule`.

    Args:
        seed: seed of the experiment.
        sample_noise: maximum norm of a sample's gradient, and noise multiplier.
        module: module that computes the models.
    """

    def __init__(self, seed: int, sample_noise: SampleNoise, module: StackedModule) -> None:
        self._seed, self._noise, self.module = seed, sample_noise, module

    @classmethod
    def of(cls, task: RunTask, module: StackedModule | None = None) -> SampleGradients | None:
        """Return a `SampleGradients` for the client algorithm of a task; None if it uses ordinary gradients.

        `module` computes the models. If it is None, a new module that uses `torch.func.vmap` does.
        """
        if (sample_noise := task.algorithm.sample_noise) is None:
            return None
        return cls(task.experiment.seed, sample_noise, module or StackedModule(task.new_module, task.objective))

    def __call__(
        self,
        rows: Tensor,
        buffers: Sequence[Tensor],
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor,
        factors: Sequence[Tensor],
        moments: Sequence[Moment],
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss [k] of each worker's batch, and the mean of its clipped gradients with noise, [k, d].

        Args:
            rows: models of the workers, [k, d].
            buffers: buffers of the models, [k, ...] each.
            inputs, targets: batches, [k, batch, ...] each.
            weights: weight of each sample, [k, batch]: 1 / (number of samples in the batch), or 0 for padding.
            factors: scaled dropout masks [k, batch, ...], one for each dropout call.
            moments: round, worker and step of each batch.
        """
        (k, d), batch = rows.shape, weights.shape[1]
        losses, means = rows.new_zeros(k), rows.new_zeros(k, d)
        at_once = max(1, MOST_BYTES // (k * d * rows.element_size()))
        for start in range(0, batch, at_once):
            chosen = slice(start, min(start + at_once, batch))
            count = chosen.stop - start
            alone_inputs, alone_targets, *masks = (
                on_each(_alone, part, chosen) for part in (inputs, targets, *factors)
            )
            models = rows.unsqueeze(1).expand(k, count, d).flatten(0, 1)
            of_models = [buffer.repeat_interleave(count, 0) for buffer in buffers]
            parameters, ones = self.module.views(models), rows.new_ones(k * count, 1)
            sample_losses, parts = self.module.gradients(
                parameters, of_models, alone_inputs, alone_targets, ones, masks
            )
            flat = [part.reshape(k * count, -1) for part in cast(list[Tensor], parts)]
            norms = torch.stack([row_norms(part) for part in flat]).norm(dim=0)
            scale = clip_factors(norms, self._noise.clip).to(rows.dtype).view(k, 1, count) * weights[:, None, chosen]
            for entry, part in zip(self.module.layout.parameters, flat, strict=True):
                means[:, entry.span] += torch.bmm(scale, part.view(k, count, -1)).squeeze(1)
            losses += (sample_losses.view(k, count) * weights[:, chosen]).sum(1)
        std = self._noise.noise * self._noise.clip * weights.amax(1, keepdim=True)
        return losses, means.addcmul_(self._draw(moments, means), std)

    def _draw(self, moments: Sequence[Moment], like: Tensor) -> Tensor:
        """Return standard normal numbers with the shape [k, d] of `like`, which depend on seed and `moments`."""
        keys = torch.tensor([draw_key(self._seed, "sample_privacy", *moment) for moment in moments])
        stream, to_normal = philox.Stream(to_device(keys, like.device)), partial(philox.to_normal, dtype=like.dtype)
        return philox.converted(stream, like.shape[1], to_normal)[:, : like.shape[1]]  # as `Draws.normal` does for each


def _alone(tensor: Tensor, chosen: slice) -> Tensor:
    """Return some samples of the batches in a tensor [k, batch, ...], each as a batch of its own, [k * n, 1, ...]."""
    return tensor[:, chosen].flatten(0, 1).unsqueeze(1)


class PrivateGradients(BatchGradients):
    """Private gradients (DP-SGD) of one worker's batches."""

    def __init__(self, objective: Objective, samples: SampleGradients, local: LocalModel) -> None:
        super().__init__(objective, local)
        self._samples = samples

    def backward(self, model: nn.Module) -> Tensor:
        """Add the private gradient of the current batch to the worker's gradient, and return the mean loss."""
        local, n, row = self.local, len(self.targets), self.local.row.detach().unsqueeze(0)
        factors = [factor.unsqueeze(0) for factor in local.dropout.factors(self.number, n)]
        buffers = self._samples.module.unpack_buffers(local.current_buffers().unsqueeze(0))
        batch = on_each(Tensor.unsqueeze, self.inputs, 0), self.targets.unsqueeze(0)
        weights, moment = row.new_full((1, n), 1 / n), (local.member.round, local.member.worker, self.number)
        losses, gradients = self._samples(row, buffers, *batch, weights, factors, [moment])
        local.gradient.add_(gradients[0])
        return losses[0]
