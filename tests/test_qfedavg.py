"""Runs with qfedavg, compared with loops written from Li et al. 2020, Algorithms 1 and 2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.randomness import seed_everything
from fedsim.data import TensorData

WORKERS, CLASSES, SIDE, LR = 3, 3, 4, 0.2


def pictures(root):
    """18 training images of 4 x 4 pixels; 6 of them are the test images."""
    images = torch.randn(18, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    targets = torch.arange(18) % CLASSES
    images[targets == 1, :, 0] += 1
    images[targets == 2, :, :, 0] += 1
    train = TensorData(images, targets)
    return train, TensorData(images[:6], targets[:6])


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))


EXPERIMENT = {
    "rounds": 3,
    "workers": WORKERS,
    "engine": "serial",
    "precision": "float64",
    "model": f"{__name__}:linear",
    "data": f"{__name__}:pictures",
    "local": {"batch_size": 100, "lr": LR},  # one step a round, on the whole shard
}


def start():
    """The initial model of the experiment."""
    with torch.random.fork_rng():
        seed_everything(torch.device("cpu"), 0, "model")
        return linear().double()


def shards(strategy="iid", **params):
    """Each worker's inputs and targets."""
    train = pictures(None)[0].to(torch.device("cpu"), torch.float64)
    return [train.gather(subset.indices) for subset in fedsim.dataset_split(train, WORKERS, strategy, 0, **params)]


def loss_and_gradient(model, inputs, targets):
    loss = F.cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def fair_rounds(of_workers, q, lr=LR, seen=None, rounds=3):
    """The row after rounds of q-FedSGD, which are those of q-FedAvg with one local step of rate 1 / L.

    `seen` are the data of the losses F_k; None: the data of the gradients.
    """
    model = start()
    for _ in range(rounds):
        found = [loss_and_gradient(model, *data) for data in of_workers]
        losses = [loss_and_gradient(model, *data)[0] for data in seen or of_workers]
        delta = sum(loss**q * gradient for loss, (_, gradient) in zip(losses, found, strict=True))
        squares = [float(gradient @ gradient) for _, gradient in found]
        h = sum(q * loss ** (q - 1) * square + loss**q / lr for loss, square in zip(losses, squares, strict=True))
        row = nn.utils.parameters_to_vector(model.parameters()) - delta / h
        nn.utils.vector_to_parameters(row, model.parameters())
    return row.detach()


def row_of(**changes):
    tables = copy.deepcopy(EXPERIMENT) | changes
    model = fedsim.run(tables).model
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("q", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_a_run_is_the_algorithm_with_the_local_learning_rate(sync, q):
    ours = row_of(sync=sync, aggregate={"rule": "qfedavg", "q": q})
    assert torch.allclose(ours, fair_rounds(shards(), q), rtol=0, atol=1e-12)


def test_the_rules_learning_rate_replaces_the_solvers():
    given = row_of(aggregate={"rule": "qfedavg", "lr": LR})
    assert torch.equal(given, row_of(aggregate={"rule": "qfedavg"}))
    assert not torch.allclose(given, row_of(aggregate={"rule": "qfedavg", "lr": 0.1}))


def test_losses_are_of_transformed_and_poisoned_samples():
    """Worker k has its images rotated by k times 90 degrees; worker 2 trains on flipped labels."""
    partition = {"strategy": "feature_rotation", "groups": 3, "angles": (0.0, 90.0, 180.0)}
    data = shards(**partition)
    seen = [(torch.rot90(inputs, k, (2, 3)), targets) for k, (inputs, targets) in enumerate(data)]
    seen[2] = seen[2][0], CLASSES - 1 - seen[2][1]
    ours = row_of(
        partition={**partition, "angles": [0.0, 90.0, 180.0]},
        attack={"name": "label_flipping", "workers": [2]},
        aggregate={"rule": "qfedavg", "q": 2.0},
    )
    assert torch.allclose(ours, fair_rounds(seen, 2.0), rtol=0, atol=1e-12)
    assert not torch.allclose(ours, fair_rounds(seen, 2.0, seen=data), rtol=0, atol=1e-4)


def test_random_transforms_for_losses_do_not_change_those_of_training():
    """With q = 0 the result does not depend on the losses."""
    noisy = {"partition": {"strategy": "feature_noise", "sigma": 1.0}}
    fair = row_of(**noisy, aggregate={"rule": "qfedavg", "q": 0.0})
    assert torch.allclose(fair, row_of(**noisy, aggregate="mean"), rtol=0, atol=1e-14)
