"""Random draws on a GPU equal those on the CPU and need no host wait."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import fedsim
from fedsim.byzantine import attack_strategy
from fedsim.core import randomness
from fedsim.core.randomness import Draws, global_states, seed_globally
from fedsim.data.augmentation import augmentation
from fedsim.data.partitions.features import GaussianNoise
from fedsim.training.batches import BatchSource, Orders, WorkItem
from fedsim.training.forward_functions import Dropout, dropout_factors
from fedsim.training.stack import Stacks
from tests.data.partitions.test_features import PIXELS, TRANSFORMS, applied
from tests.device.agreement import REAL, some_gpu, to_gpu
from tests.device.pretend import GPU, download, upload
from tests.device.pretend.counting import DOWNLOAD
from tests.device.test_aggregation_counts import DRAW
from tests.device.test_waits import counts_of_the_last_round, tables


def backdoor(images, draws):
    registration = attack_strategy.get("backdoor")
    attack = attack_strategy.bind(registration, registration.check({"value": 9.0, "poisoned": 0.35}))
    return attack.poison(images, images[:, 0, 0, 0] > 0, 2, draws)[0]


COUNT = 10_001
CALLS = {  # functions of images and draws
    "uniform": lambda _, draws: draws.uniform(COUNT),
    "uniform in float64": lambda _, draws: draws.uniform(COUNT, dtype=torch.float64),
    "normal": lambda _, draws: draws.normal(COUNT),
    "integers": lambda _, draws: draws.integers(1000, COUNT),
    "permutation": lambda _, draws: draws.permutation(COUNT),
    "choice": lambda _, draws: draws.choice(30, 6),
    "choice of few": lambda _, draws: draws.choice(COUNT, 100),
    "choice of all": lambda _, draws: draws.choice(5, 5),
    **{registration.name: registration.bind(registration.check({})) for registration in augmentation},
    "feature_noise": GaussianNoise(0.5),
    "backdoor": backdoor,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_draws_the_numbers_of_the_cpu_without_a_wait(name):
    call, rounding = CALLS[name], 1e-6 if name in ("normal", "feature_noise") else 0  # of logarithms and cosines
    images = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    expected = [call(images, draws=draws) for draws in (Draws.of("x", 1, seed=0), Draws.of("x", 1, seed=0).steps()(7))]
    with some_gpu() as pretend:
        on_gpu, draws = to_gpu(images), Draws.of("x", 1, seed=0, device=GPU)
        with pretend.counting() if pretend else contextlib.nullcontext() as counts:
            drawn = [call(on_gpu, draws=draws), call(on_gpu, draws=draws.steps()(7))]
        assert all(tensor.is_cuda for tensor in drawn)
    assert counts is None or counts.waits == 0, counts.table()
    for ours, theirs in zip(drawn, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=rounding)


@pytest.mark.gpu
def test_a_gpu_draws_the_dropout_of_the_cpu():
    keys = torch.tensor((1, 2**62 + 12345, 7))
    layers = [Dropout(F.dropout, 0.5, (50,)), Dropout(F.dropout, 0.1, (4, 7))]
    expected = dropout_factors(keys, 3, 2, 10, layers, torch.float32)
    with some_gpu():
        factors = dropout_factors(to_gpu(keys), 3, 2, 10, layers, torch.float32)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(factors, expected, strict=True))


def test_a_subset_on_a_gpu_sees_the_noise_of_the_cpu(gpu):
    images, labels = torch.zeros(6, 1, 4, 4), torch.arange(6)

    def noisy(place):
        shards = fedsim.dataset_split(TensorDataset(place(images), place(labels)), "feature_noise", 2, sigma=1.0)
        return shards[1].gather(torch.arange(3))[0]

    assert torch.equal(download(noisy(upload)), noisy(lambda tensor: tensor))


DRAW_ON_DEVICE = "GaussianNoise", "AugMix"  # transforms of torchvision that draw tensors on the images' device


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "params"), TRANSFORMS)
def test_a_transform_of_torchvision_draws_the_numbers_of_the_cpu(name, params):
    images = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [applied(name, images, seed, **params) for seed in range(4)]
    with some_gpu() as pretend, pretend.counting() if pretend else contextlib.nullcontext() as counts:
        state, normalisation = global_states(GPU), (to_gpu(PIXELS[0]), to_gpu(PIXELS[1]))
        altered = [applied(name, to_gpu(images), seed, normalisation, **params).cpu() for seed in range(4)]
        assert global_states(GPU) == state
    for ours, theirs in zip(altered, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if REAL else 1e-9)  # some grids are float32
    if counts is not None:
        copied = {operation for kind, operation, _ in counts.events if kind == DOWNLOAD}
        assert ("_to_copy" in copied) == (name in DRAW_ON_DEVICE), counts.table()


def test_random_operations_of_a_transform_draw_on_the_cpu_except_by_a_generator_of_the_gpu(gpu):
    def drawn(zeros):
        with seed_globally(torch.Generator().manual_seed(5), zeros.device):
            out = torch.rand(3, out=zeros.clone())
            return [out, torch.normal(out, 1.0), zeros.clone().uniform_()]

    def of_own():
        return download(torch.zeros(3, device=GPU).uniform_(generator=torch.Generator("cuda").manual_seed(1)))

    for ours, theirs in zip(drawn(torch.zeros(3, device=GPU)), drawn(torch.zeros(3)), strict=True):
        assert torch.equal(download(ours), theirs)
    expected = of_own()
    with seed_globally(torch.Generator(), GPU):
        assert torch.equal(of_own(), expected)


def test_steps_share_the_launches_of_their_draws(gpu):
    at = Draws.of("x", seed=0, device=GPU).steps()
    at(0).uniform(64)
    with gpu.counting() as counts:
        for step in range(1, 50):
            at(step).uniform(64)
    # 3 launches turn words into numbers; one call draws the words for 32 steps
    assert counts.launches <= 3 * 49 + DRAW, counts.table()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_sources_that_draw_together_draw_their_own_numbers(name, monkeypatch):
    """At most 45,000 words are drawn at once. A source draws no numbers, and another one draws two times."""
    monkeypatch.setattr(randomness, "WORDS_TOGETHER", 45_000)
    call, coordinates = CALLS[name], [(3, worker) for worker in range(5)]
    images, times = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(0)), [1, 1, 0, 1, 2]
    with some_gpu():
        on_gpu = to_gpu(images)
        alone = [Draws.of("x", *each, seed=0, device=GPU) for each in coordinates]
        together = Draws.of_all("x", coordinates, seed=0, device=on_gpu.device)
        assert [draws.key.item() for draws in together] == [draws.key.item() for draws in alone]
        for count, ours, theirs in zip(times, together, alone, strict=True):
            for _ in range(count):
                assert torch.equal(call(on_gpu, draws=ours).cpu(), call(on_gpu, draws=theirs).cpu())


PER_WORKER = 30  # launches that turn the words of a worker into numbers, and change its update with them
DRAWING = {
    "dp_sgd": {"local": {"algorithm": "dp_sgd", "noise": 1.0, "clip": 1.0, "batch_size": 2, "epochs": 1}},
    "local privacy": {"privacy": {"mechanism": "local", "clip": 1.0, "noise": 1.0}},
    "a compressor": {"processors": ["qsgd"]},
    "a processor": {"processors": ["clip", {"name": "gaussian_noise", "std": 0.1}]},
}


@pytest.mark.parametrize("case", DRAWING)
def test_workers_share_the_launches_of_their_draws(case):
    few, many = (counts_of_the_last_round(tables(workers, **DRAWING[case]))[-1] for workers in (4, 16))
    assert many.launches <= few.launches + PER_WORKER * 12, many.table()
    assert DRAW > 2 * PER_WORKER


def test_a_gpu_shuffles_at_most_about_a_million_samples_at_once(gpu, prepared, monkeypatch):
    """The number limits memory: 21,500 workers with 50 samples each, in stacks of 100, are shuffled in two parts."""
    partition = {"name": "virtual", "samples": 50}
    task, shared = prepared(workers=21_500, device="cuda", partition=partition, local={"batch_size": 25})
    source, shuffled = BatchSource(task, shared), []

    def orders(self, work, begin, end):
        shuffled.append(int(((end - begin) * work.sizes).sum()))
        ends = ((end - begin) * work.sizes).cumsum()
        return Orders(torch.zeros(shuffled[-1], dtype=torch.int64, device="cuda"), ends - work.sizes, work.sizes)

    monkeypatch.setattr(BatchSource, "orders", orders)
    members = source.work([WorkItem(worker, worker, 1, stack=worker // 100) for worker in range(21_500)])
    for stack in Stacks(members, task, source):
        stack.draw()
    assert shuffled == [1_045_000, 30_000]
