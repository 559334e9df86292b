"""Runs with qfedavg, compared with loops for Algorithms 1 and 2 of Li et al. 2020."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from fedsim.data import TensorData
from tests.textbook import Federation

WORKERS, CLASSES, SIDE, LR = 3, 3, 4, 0.2


def pictures(root):
    """A data set of 18 training images with 4 x 4 pixels, 6 of which are the test images."""
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
    "local": {"batch_size": 100, "lr": LR},  # one step per round, on the whole shard
}


def samples(federation):
    """Return each worker's (inputs, targets)."""
    return [federation.train.gather(shard) for shard in federation.shards]


def fair_rounds(q, batches=None, seen=None):
    """Return the row after three rounds of q-FedSGD, which equals q-FedAvg with one local step of rate 1 / L.

    `batches`: data for the gradients (default: the workers' samples). `seen`: data for the losses F_k (default:
    `batches`).
    """
    federation = Federation(linear, pictures, WORKERS, 100)
    batches = batches or samples(federation)
    for _ in range(3):
        gradients = [federation.gradient(federation.row, batch) for batch in batches]
        losses = [float(federation.loss(federation.row, batch)) for batch in seen or batches]
        delta = sum(loss**q * gradient for loss, gradient in zip(losses, gradients, strict=True))
        squares = [float(gradient @ gradient) for gradient in gradients]
        h = sum(q * loss ** (q - 1) * square + loss**q / LR for loss, square in zip(losses, squares, strict=True))
        federation.row = federation.row - delta / h
    return federation.row


def row_of(**changes):
    return fedsim.run(EXPERIMENT | changes).global_row


@pytest.mark.parametrize("q", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_a_run_is_the_algorithm_with_the_local_learning_rate(sync, q):
    ours = row_of(sync=sync, aggregate={"rule": "qfedavg", "q": q})
    assert torch.allclose(ours, fair_rounds(q), rtol=0, atol=1e-12)


def test_the_rules_learning_rate_replaces_the_algorithms():
    with_same_rate = row_of(aggregate={"rule": "qfedavg", "lr": LR})
    assert torch.equal(with_same_rate, row_of(aggregate={"rule": "qfedavg"}))
    assert not torch.allclose(with_same_rate, row_of(aggregate={"rule": "qfedavg", "lr": 0.1}))


def test_losses_are_of_transformed_and_poisoned_samples():
    """The images of worker k are rotated by k times 90 degrees, and worker 2 trains on flipped labels."""
    data = samples(Federation(linear, pictures, WORKERS, 100))  # feature_rotation splits into the same shards as iid
    seen = [(torch.rot90(inputs, k, (2, 3)), targets) for k, (inputs, targets) in enumerate(data)]
    seen[2] = seen[2][0], CLASSES - 1 - seen[2][1]
    ours = row_of(
        partition={"name": "feature_rotation", "groups": 3, "angles": [0.0, 90.0, 180.0]},
        attack={"name": "label_flipping", "workers": [2]},
        aggregate={"rule": "qfedavg", "q": 2.0},
    )
    assert torch.allclose(ours, fair_rounds(2.0, seen), rtol=0, atol=1e-12)
    assert not torch.allclose(ours, fair_rounds(2.0, seen, seen=data), rtol=0, atol=1e-4)


def test_random_transforms_for_losses_do_not_change_those_of_training():
    """With q = 0 the result does not depend on the losses."""
    noisy = {"partition": {"name": "feature_noise", "sigma": 1.0}}
    fair = row_of(**noisy, aggregate={"rule": "qfedavg", "q": 0.0})
    assert torch.allclose(fair, row_of(**noisy, aggregate="mean"), rtol=0, atol=1e-14)


USED = []


def rule_with_losses(updates, losses):
    """A rule that notes the losses and then changes them."""
    USED.append(losses.tolist())
    losses.zero_()
    return updates.mean(0)


def attack_that_tries_the_rule(honest, aggregate):
    return aggregate(honest[0])


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_an_attack_tries_the_rule_with_the_losses_of_the_same_aggregation(sync):
    USED.clear()
    attack = {"name": f"{__name__}:attack_that_tries_the_rule", "workers": [1]}
    fedsim.run({**EXPERIMENT, "sync": sync, "attack": attack, "aggregate": f"{__name__}:rule_with_losses"})
    assert USED[::2] == USED[1::2]
    assert len({tuple(losses) for losses in USED}) == EXPERIMENT["rounds"]
