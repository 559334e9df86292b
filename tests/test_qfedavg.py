"""q-fair federated averaging in whole runs, against loops written from Li et al. 2020, Algorithms 1 and 2."""

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
    """18 training images of 4 x 4, of which each class has a bright row or column; 6 of them to test."""
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
    "local": {"batch_size": 100, "lr": LR},  # one step of a round, on the whole shard
}


def start():
    """The model with which the experiment begins."""
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
    """The row after rounds of q-FedSGD; with one local step of rate 1 / L those of q-FedAvg are the same.

    `seen` are the data of the losses F_k where they are not those of the gradients.
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
def test_a_run_is_the_algorithm_with_the_lipschitz_constant_of_the_local_rate(sync, q):
    ours = row_of(sync=sync, aggregate={"rule": "qfedavg", "q": q})
    assert torch.allclose(ours, fair_rounds(shards(), q), rtol=0, atol=1e-12)


def test_a_rate_of_the_rule_takes_the_place_of_that_of_the_solver():
    given = row_of(aggregate={"rule": "qfedavg", "lr": LR})
    assert torch.equal(given, row_of(aggregate={"rule": "qfedavg"}))
    assert not torch.allclose(given, row_of(aggregate={"rule": "qfedavg", "lr": 0.1}))


def test_losses_are_of_the_samples_as_the_worker_sees_them():
    """Worker k sees its images turned by k quarters of a circle; worker 2 trains on flipped labels."""
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


def test_what_the_losses_draw_does_not_change_what_training_draws():
    """With q = 0 the losses do not count."""
    noisy = {"partition": {"strategy": "feature_noise", "sigma": 1.0}}
    fair = row_of(**noisy, aggregate={"rule": "qfedavg", "q": 0.0})
    assert torch.allclose(fair, row_of(**noisy, aggregate="mean"), rtol=0, atol=1e-14)
