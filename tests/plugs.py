"""Plugs that tests name by import path, as a user would name their own."""

from __future__ import annotations

import enum
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fedsim
from fedsim.clients import ClientAlgorithm
from fedsim.core.learning_task import Classification
from fedsim.core.randomness import Draws
from fedsim.data import TensorData, load_dataset

TINY_TRAIN, TINY_TEST = 203, 90


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


def times(value, *, factor: float = 1.0):
    return value * factor


def misplaced(value, factor=2.0):
    return value * factor


def typed(value, *, sizes: tuple[int, ...], folder: Path, level: Level):
    return sizes, folder, level


def sized(*, hidden: tuple[int, ...] = (16,), scale: float | None = 2.0) -> nn.Module:
    """A model whose parameters TOML has no types for."""
    widths = [784, *hidden, 10]
    return nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in pairwise(widths)))


@cache
def real_images():
    return load_dataset("mnist5k")


def tiny(root, *, train: int = TINY_TRAIN):
    """A few real images; 203 is divided evenly by no number of workers that the tests use."""
    full_train, full_test = real_images()
    parts = ((full_train, train), (full_test, TINY_TEST))
    return tuple(TensorData(d.inputs[:n].clone(), d.targets[:n].clone(), d.scale, d.shift) for d, n in parts)


def tiny_with_other_test_labels(root):
    """`tiny`, with wrong labels of the test images."""
    train, test = tiny(root)
    return train, TensorData(test.inputs, (test.targets + 1) % 10, test.scale, test.shift)


def colour(root):
    """Not MNIST's shape: three channels."""
    inputs = torch.zeros(20, 3, 28, 28, dtype=torch.uint8)
    return TensorData(inputs, torch.arange(20) % 10), TensorData(inputs, torch.arange(20) % 10)


def uneven(labels, n_workers, rng):
    """Worker k holds about k + 1 parts."""
    cuts = np.cumsum(np.arange(1, n_workers)) * len(labels) // (n_workers * (n_workers + 1) // 2)
    return np.split(rng.permutation(len(labels)), cuts)


def ending_in_one(labels, n_workers, rng):
    """All but the last worker have shards of like size; the last has one sample."""
    order = rng.permutation(len(labels))
    return [*np.array_split(order[1:], n_workers - 1), order[:1]]


def same_last(labels, n_workers, rng, *, first: int):
    """Three shards: the last is always the same, the others depend on `first`."""
    return np.split(np.arange(len(labels)), [first, 150])


def lossy(labels, n_workers, rng):
    return [np.arange(2) for _ in range(n_workers)]


def neighbours(labels, worker, n_workers, rng, by_class, ids, *, most: int = 30):
    """A virtual partition of uneven shards: some samples of one class."""
    assert n_workers > worker
    assert len(labels) == len(ids) == sum(map(len, by_class))
    members = by_class[worker % len(by_class)]
    return members[rng.choice(len(members), rng.integers(1, min(most, len(members)) + 1), replace=False)]


def some(labels, worker, rng, *, most: int = 30):
    """A virtual partition of uneven shards."""
    return rng.choice(len(labels), rng.integers(1, most + 1), replace=False)


def planned(round, *, cohorts: list[list[int]]):
    """A cohort strategy: these workers in each round, each with probability 1/2."""
    return np.array(cohorts[round - 1]), np.full(len(cohorts[round - 1]), 0.5)


def nothing(labels, worker):
    return np.zeros(0, dtype=np.int64)


def beyond(labels, worker):
    return np.array([0, len(labels)])


@dataclass(frozen=True)
class Boasting:
    """Says that its shards are larger than they are."""

    def __call__(self, labels, worker):
        return np.arange(2)

    def size(self, worker):
        return 7


@dataclass(frozen=True)
class Shade:
    """As many transforms as there are workers, made when they are asked for."""

    by: float
    n_workers: int

    def __len__(self):
        return self.n_workers

    def __getitem__(self, worker):
        return partial(darkened, factor=1 - self.by * worker / self.n_workers)


def darkened(images, generator, *, factor):
    return images * factor


@dataclass(frozen=True)
class Darkened:
    """A virtual partition whose workers see their samples differently."""

    by: float = 1.0

    def __call__(self, labels, worker, rng):
        return rng.choice(len(labels), 20)

    def transforms(self, n_workers):
        return Shade(self.by, n_workers)


def clipped_mean(updates: Tensor, *, c: float = 1.0) -> Tensor:
    """A rule that looks at whole rows and has no weighted form."""
    norms = updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (updates * (c / norms).clamp(max=1)).mean(0)


def brightened(images: Tensor, generator: torch.Generator) -> Tensor:
    """An augmentation that draws from PyTorch's generator."""
    return images * torch.rand((), generator=generator)


def negated(images: Tensor) -> Tensor:
    """An augmentation that draws nothing."""
    return -images


@dataclass(frozen=True)
class Relabelled:
    """An attack on data that draws from NumPy's generator: all labels of a batch are one class."""

    def __call__(self, own_updates: Tensor) -> Tensor:
        return own_updates

    def poison(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator, classes: int) -> tuple[Tensor, Tensor]:
        return inputs, torch.full_like(targets, int(rng.integers(classes)))


def drawn_mean(updates: Tensor, rng: np.random.Generator) -> Tensor:
    """A linear rule whose coefficients are drawn."""
    return torch.from_numpy(rng.dirichlet(np.ones(len(updates)))).to(updates) @ updates


def drawn_on_device(updates: Tensor, draws: Draws) -> Tensor:
    """The same, of coefficients that are drawn where the updates lie."""
    return draws.uniform(len(updates), dtype=updates.dtype) @ updates


def lossy_mean(updates: Tensor, losses: Tensor) -> Tensor:
    """A linear rule whose coefficients are in proportion to the losses."""
    return (losses / losses.sum()).to(updates) @ updates


for function in (drawn_mean, drawn_on_device, lossy_mean):
    function.columnwise = function.linear = True


@dataclass(frozen=True)
class Smoothed(Classification):
    """Label smoothing; an answer is correct if the label is among the two largest outputs."""

    smoothing: float = 0.1

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=self.smoothing, reduction=reduction)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.topk(2).indices == targets.unsqueeze(1)).any(1)


class Normalised(nn.Module):
    """A network with BatchNorm, so with float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def layer_normalised() -> nn.Module:
    """A network with LayerNorm, so without buffers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.LayerNorm(8), nn.Linear(8, 10))


class WithFeatures(nn.Module):
    """A network with a method that computes its features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(784, 8), nn.Linear(8, 6), nn.Linear(6, 10)

    def features(self, images: Tensor) -> Tensor:
        return self.second(self.first(images.flatten(1)).tanh())

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.features(images).tanh())


class NormalisedFeatures(WithFeatures):
    """The same with BatchNorm, so that no merged batch can be used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def features(self, images: Tensor) -> Tensor:
        return self.second(self.norm(self.first(images.flatten(1))))


class Convolved(nn.Module):
    """A network without linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 10, 28)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images).flatten(1)


class MoreThanTwo(Normalised):
    """Fails on batches of two samples."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) == 2:
            raise ValueError("Expected more than 2 samples")
        return super().forward(images)


class Probabilities(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10), nn.Softmax(dim=1))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))


class Stateful(nn.Module):
    """Keeps state that no row holds, of every sort: a worker must not find in it what another has left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)
        self.calls, self.seen = 0, []
        self.register_buffer("ema", torch.zeros(784), persistent=False)
        features = torch.tensor(np.random.randn(784, 10) / 28, dtype=torch.float32)
        self.features = nn.Parameter(features, requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if self.training:
            self.calls += 1
            self.seen.append(len(flat))
            self.ema.mul_(0.9).add_(flat.mean(0), alpha=0.1)
        noise = np.random.rand() + random.random() if self.training else 0.0
        scale = 1 + 0.1 * self.calls + 0.01 * len(self.seen)
        return self.linear(flat - self.ema) / scale + noise * (flat @ self.features)


class Tied(nn.Module):
    """Shared parameters, and ones that are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 10)
        self.square, self.unused = nn.Linear(10, 10), nn.Linear(3, 3)
        self.again = self.square

    def forward(self, images: Tensor) -> Tensor:
        return self.again(self.square(self.first(images.flatten(1))).tanh())


class LetsGo(nn.Module):
    """Replaces the data of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-1, 1)
        return self.linear(images.flatten(1))


class MovesFrozen(nn.Module):
    """A momentum encoder: parameters without gradient that are moved by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(784, 10), nn.Linear(784, 10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.linear.weight, 0.5)
        return self.linear(images.flatten(1)) + self.slow(images.flatten(1))


class WithExtraState(nn.Sequential):
    """Puts more than tensors into its state."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10))

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state) -> None:
        pass


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(10))


class Embedded(nn.Module):
    """Takes token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens).mean(1))


def tokens(root):
    samples = [(torch.arange(k, k + 7) % 50, k % 3) for k in range(60)]
    return samples, samples


def negative_labels(root):
    inputs = torch.zeros(20, 1, 28, 28, dtype=torch.uint8)
    return TensorData(inputs, torch.arange(20) % 10 - 1), TensorData(inputs, torch.arange(20) % 10)


def no_test(root):
    train, test = tiny(root)
    return train, TensorData(test.inputs[:0], test.targets[:0])


def int32_labels(root):
    train, test = tiny(root)
    return TensorData(train.inputs, train.targets.int()), test


def refusing(updates: Tensor, *, f: int = 5) -> Tensor:
    if updates.shape[1] < 100:  # rehearsed
        return updates.mean(0)
    raise fedsim.ExperimentError(f"aggregate.f = {f}: needs more than {2 * f} workers, not {len(updates)}")


class Fails(nn.Module):
    """Trains for a while, then does something terrible. `how` says what."""

    def __init__(self, *, how: str = "raise", after: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)
        self.how, self.steps_left = how, after

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.fail()
        return self.linear(images.flatten(1))

    def fail(self) -> None:
        match self.how:
            case "raise":
                raise ZeroDivisionError("this model divides by zero")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(0)
            case "leave":
                sys.exit(0)
            case "hang":
                time.sleep(3600)
            case "slow":
                time.sleep(0.2)


def clipping(updates: Tensor, *, c: float = 1.0) -> Tensor:
    """Another rule with the parameter of `clipped_mean`."""
    return updates.clamp(-c, c).mean(0)


class FailsInRank(Fails):
    """Does it in one rank alone, of those that a launcher has started, after so many steps of all its workers."""

    steps = 0

    def __init__(self, *, how: str = "raise", after: int = 3, rank: int = 1) -> None:
        super().__init__(how=how, after=0)
        self.late, self.rank = after, rank

    def fail(self) -> None:
        FailsInRank.steps += 1
        if FailsInRank.steps > self.late and os.environ.get("RANK") == str(self.rank):
            super().fail()


class FailsInBackward(FailsInRank):
    """Does it in the backward pass, when the ranks have begun to exchange gradients."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.linear(images.flatten(1))
        if self.training:
            outputs.register_hook(lambda gradient: self.fail())
        return outputs


class Complex(nn.Module):
    """Has a complex parameter, or a complex buffer."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.linear, factor = nn.Linear(784, 10), torch.ones(10, dtype=torch.complex64)
        if buffer:
            self.register_buffer("factor", factor)
        else:
            self.factor = nn.Parameter(factor)

    def forward(self, images: Tensor) -> Tensor:
        return (self.linear(images.flatten(1)) * self.factor).real


class Halving(nn.Module):
    """Writes to its parameters when it is tested."""

    def __init__(self, *, halves: bool = True) -> None:
        super().__init__()
        self.linear, self.halves = nn.Linear(784, 10), halves

    def forward(self, images: Tensor) -> Tensor:
        if self.halves and not self.training:
            with torch.no_grad():
                self.linear.weight *= 0.5
        return self.linear(images.flatten(1))


class Renormalised(nn.Module):
    """Takes token numbers; looking up an embedding shortens it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 8, max_norm=0.5), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens).mean(1))


class AlwaysDropping(nn.Module):
    """Draws in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(images.flatten(1), 0.5, training=True))


def tested_on_many(root):
    """A few images to train on, and test images for four batches."""
    train, _ = tiny(root)
    return train, real_images()[1]


class Few(nn.Module):
    """So few parameters that, of four ranks, one has none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def few(root):
    """As few inputs."""
    inputs = torch.arange(240.0).reshape(60, 4).sin()
    return TensorData(inputs, torch.arange(60) % 3), TensorData(inputs, torch.arange(60) % 3)


def tiny_on_rank(root):
    """Other images on the second of several ranks."""
    train, test = tiny(root)
    if os.environ.get("RANK") == "1":
        train.inputs[0] += 1
    return train, test


def absent_on_rank(root):
    """No images on the second of several ranks."""
    if os.environ.get("RANK") == "1":
        raise fedsim.errors.DataError("there is nothing here")
    return tiny(root)


def with_a_hole(root):
    """Images as numbers, of which the first 60 are NaN."""
    return with_nan_at(slice(60))


def with_a_hole_at_the_end(root):
    """Images as numbers, of which the last 60 are NaN."""
    return with_nan_at(slice(-60, None))


def with_nan_at(where):
    train, test = tiny(None)
    inputs = train.inputs.float()
    inputs[where] = torch.nan
    return replace(train, inputs=inputs), replace(test, inputs=test.inputs.float())


def in_blocks(labels, n_workers):
    """The samples as they lie: the first to the first worker."""
    return np.array_split(np.arange(len(labels)), n_workers)


class FailsInRankOnce(FailsInRank):
    """Does it before the launcher has started the ranks again, and not after."""

    def fail(self) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            super().fail()


class Branching(nn.Module):
    """Uses one of two layers, by what the batch holds: so which of them has a gradient is another for each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return (self.first if flat[0].sum() > 100 else self.second)(flat)


class Recurrent(nn.Module):
    """A module that keeps references to its parameters beside those that are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(28, 8, batch_first=True), nn.Linear(8, 10)
        self.listed = list(self.linear.parameters())

    def forward(self, images: Tensor) -> Tensor:
        weight, bias = self.listed
        return self.lstm(images[:, 0])[0][:, -1] @ weight.T + bias


class OneIsTooFew(nn.Module):
    """Has no finite gradient for a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1)) / (len(images) - 1 if self.training else 1)


class Steep(nn.Linear):
    """Has gradients that float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1) * 1e8)


def plain_mean(process_group, bucket):
    """A communication hook that gives the mean as it is."""
    part = bucket.buffer() / process_group.size()
    return dist.all_reduce(part, group=process_group, async_op=True).get_future().then(lambda sent: sent.value()[0])


plain_mean.exact = True


@dataclass(frozen=True)
class Shrunk:
    """A communication hook with a state: a part of the mean, and how many buckets there have been."""

    factor: float = 1.0

    def start(self, process_group, seed):
        assert isinstance(seed, int)
        return {"group": process_group, "buckets": 0}

    def __call__(self, state, bucket):
        state["buckets"] += 1
        part = bucket.buffer() * (self.factor / state["group"].size())
        return (
            dist.all_reduce(part, group=state["group"], async_op=True).get_future().then(lambda sent: sent.value()[0])
        )


class Greedy(nn.Module):
    """A model that asks for more memory than any machine has as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        if self.training and torch.is_grad_enabled() and len(images) > 1 and images.device.type != "meta":
            torch.empty(2**50)
        return self.linear(images.flatten(1))


@dataclass(frozen=True)
class Counting(ClientAlgorithm):
    """A client algorithm that uses all of the contract: workers count their rounds, and drift towards a mean.

    Each worker keeps the number of its rounds and its last change per step. The server keeps the number of all rounds
    and the mean change, and sends both.
    """

    lr: float = 0.05

    def worker_state(self, row):
        return {"rounds": row.new_zeros(1), "change": torch.zeros_like(row)}

    def server_state(self, row):
        return {"rounds": row.new_zeros(1), "mean": torch.zeros_like(row)}

    def message(self, row):
        return {"rounds": row.new_zeros(1), "difference": torch.zeros_like(row)}

    def start(self, rows):
        return {"start": rows.clone(), "drift": torch.zeros_like(rows)}

    def start_round(self, rows, worker):
        drift = (worker.received["mean"] - worker.kept["change"]) / (1 + worker.received["rounds"] + worker.rounds)
        return {"start": rows.clone(), "drift": drift * (1 + worker.workers)}

    def step(self, rows, gradients, state):
        rows.add_(gradients.sub_(state["drift"]), alpha=-self.lr)

    def finish(self, rows, state, worker):
        change = (rows - state["start"]) / worker.steps
        difference = change - worker.kept["change"]
        worker.kept["change"] = change
        worker.kept["rounds"] += 1
        return {"rounds": torch.ones_like(worker.kept["rounds"]), "difference": difference}

    def receive(self, server, sums, workers, population):
        assert workers <= population
        server["rounds"] += sums["rounds"]
        server["mean"] += sums["difference"] / population
