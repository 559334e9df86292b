"""Runs whose workers transform or poison their samples, compared with plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fedsim
from fedsim.core.randomness import Draws
from fedsim.data import TensorData
from tests.textbook import Federation

WORKERS, CLASSES, SIDE, LR, ROUNDS = 3, 4, 5, 0.2, 2


def pictures(root):
    generator = torch.Generator().manual_seed(7)
    images, targets = torch.randn(30, 1, SIDE, SIDE, generator=generator), torch.arange(30) % CLASSES
    return TensorData(images, targets), TensorData(images[:8], targets[:8])


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))


def noisy(inputs, targets, worker, round):
    """NIID-Bench: Gaussian noise of variance sigma i / n for worker i = 1, ..., n; here sigma = 0.6."""
    noise = Draws.of(0, "augment", round, worker).normal(*inputs.shape, dtype=inputs.dtype)
    return inputs + math.sqrt(0.6 * (worker + 1) / WORKERS) * noise, targets


def rotated(inputs, targets, worker, round):
    """Rotated MNIST: worker k rotates its images by k times 90 degrees."""
    return torch.rot90(inputs, worker, (2, 3)), targets


def flipped(inputs, targets, worker, round):
    return inputs, CLASSES - 1 - targets if worker == 1 else targets


def patched(inputs, targets, worker, round):
    """Half of worker 1's batch gets a 2 x 2 patch of 3 in the upper left corner, and the label 2."""
    if worker != 1:
        return inputs, targets
    draws = Draws.of(0, "poison", round, worker)
    draws.uniform()  # rounds the number of poisoned samples
    inputs, targets = inputs.clone(), targets.clone()
    for place, rank in enumerate(draws.permutation(len(targets)).tolist()):
        if rank < len(targets) // 2:
            inputs[place, :, :2, :2] = 3.0
            targets[place] = 2
    return inputs, targets


BACKDOOR = {"name": "backdoor", "size": 2, "value": 3.0, "corner": "top_left", "target": 2, "poisoned": 0.5}
VIEWS = {
    "feature_noise": (noisy, {"partition": {"strategy": "feature_noise", "sigma": 0.6}}),
    "feature_rotation": (
        rotated,
        {"partition": {"strategy": "feature_rotation", "groups": WORKERS, "angles": [0.0, 90.0, 180.0]}},
    ),
    "label_flipping": (flipped, {"attack": {"name": "label_flipping", "workers": [1]}}),
    "backdoor": (patched, {"attack": {**BACKDOOR, "workers": [1]}}),
}


def averaged_gradient_descent(view):
    """One step a round on the whole shard of each worker, in drawn order; then the mean of the models."""
    federation = Federation(linear, pictures, WORKERS, 100)  # the shards of iid, which feature_* have too
    for round in range(1, ROUNDS + 1):
        batches = [view(*federation.epoch(round, worker)[0], worker, round) for worker in range(WORKERS)]
        gradients = [federation.gradient(federation.row, batch) for batch in batches]
        federation.row = federation.row - LR * sum(gradients) / WORKERS
    return federation.row


@pytest.mark.parametrize(("engine", "sync"), [("serial", "parameters"), ("batched", "gradients")])
@pytest.mark.parametrize("name", VIEWS)
def test_workers_train_on_transformed_or_poisoned_samples(name, engine, sync):
    view, tables = VIEWS[name]
    result = fedsim.run(
        {
            "rounds": ROUNDS,
            "workers": WORKERS,
            "engine": engine,
            "processes": 1,
            "sync": sync,
            "precision": "float64",
            "model": f"{__name__}:linear",
            "data": f"{__name__}:pictures",
            "local": {"batch_size": 100, "lr": LR},
            "aggregate": "mean",
            **tables,
        }
    )
    assert torch.allclose(result.global_row, averaged_gradient_descent(view), rtol=0, atol=1e-12)
