"""Random draws on a GPU: the numbers of the CPU, made without a host wait."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import fedsim
from fedsim.byzantine import attack_strategy
from fedsim.core.randomness import Draws
from fedsim.data.augmentation import augmentation
from fedsim.data.partitions.features import GaussianNoise
from tests.core.test_draws import CALLS
from tests.device.pretend import GPU, download, upload
from tests.device.test_aggregation_counts import DRAW


def bound(name, **params):
    plug = attack_strategy.get(name)
    return attack_strategy.bind(plug, plug.check(params))


def backdoor(images, draws):
    return bound("backdoor", value=9.0, poisoned=0.35).poison(images, images[:, 0, 0, 0] > 0, 2, draws)[0]


PLUGS = {plug.name: plug.bind(plug.check({})) for plug in augmentation} | {
    "feature_noise": GaussianNoise(0.5),
    "backdoor": backdoor,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_gpu_draws_the_numbers_of_the_cpu_without_a_wait(call, gpu):
    expected = [call(Draws.of(0, "x", 1)), call(Draws.of(0, "x", 1).steps()(7))]
    with gpu.counting() as counts:
        draws = Draws.of(0, "x", 1, device=GPU)
        found = [call(draws), call(draws.steps()(7))]
    assert counts.waits == 0, counts.table()
    assert all(torch.equal(download(a), b) for a, b in zip(found, expected, strict=True))


def test_all_of_some_numbers_are_chosen_on_the_gpu(gpu):
    assert Draws.of(0, "x", device=GPU).choice(5, 5).device == GPU


def test_a_subset_on_a_gpu_sees_the_noise_of_the_cpu(gpu):
    images, labels = torch.zeros(6, 1, 4, 4), torch.arange(6)

    def noisy(place):
        shards = fedsim.dataset_split(TensorDataset(place(images), place(labels)), 2, "feature_noise", sigma=1.0)
        return shards[1].gather(torch.arange(3))[0]

    assert torch.equal(download(noisy(upload)), noisy(lambda tensor: tensor))


@pytest.mark.parametrize("plug", PLUGS.values(), ids=PLUGS)
def test_a_batch_is_altered_on_a_gpu_without_a_wait(plug, gpu):
    images = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    expected, on_gpu = plug(images, draws=Draws.of(0, "x")), upload(images)
    with gpu.counting() as counts:
        found = plug(on_gpu, draws=Draws.of(0, "x", device=GPU))
    assert counts.waits == 0, counts.table()
    assert torch.equal(download(found), expected)


def test_steps_share_the_launches_of_their_draws(gpu):
    at = Draws.of(0, "x", device=GPU).steps()
    at(0).uniform(64)
    with gpu.counting() as counts:
        for step in range(1, 50):
            at(step).uniform(64)
    assert counts.launches <= 3 * 49 + DRAW, counts.table()  # words become numbers by 3; a call draws them for 32 steps


def test_rows_of_noise_are_made_on_a_gpu_without_a_wait(gpu):
    rows = torch.zeros(3, 1000)
    (expected, _), on_gpu = bound("gaussian")(rows, rows, seed=4, moment=(2,)), upload(rows)
    with gpu.counting() as counts:
        found, _ = bound("gaussian")(on_gpu, on_gpu, seed=4, moment=(2,))
    assert counts.waits == 0, counts.table()
    assert torch.equal(download(found), expected)
