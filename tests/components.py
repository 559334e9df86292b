"""Components that tests name by import path, as users name their own."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
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


@cache
def real_images():
    return load_dataset("mnist5k")


def tiny(root, *, train: int = TINY_TRAIN, test: int = TINY_TEST):
    """203 training images and 90 test images of MNIST. None of the tested numbers of workers divides 203."""
    full_train, full_test = real_images()
    parts = ((full_train, train), (full_test, test))
    return tuple(TensorData(d.inputs[:n].clone(), d.targets[:n].clone(), d.scale, d.shift) for d, n in parts)


def cropped(root):
    """The data set `tiny` without the margins of its images, which are then 16 pixels wide."""
    return tuple(replace(part, inputs=part.inputs[..., 6:22, 6:22].clone()) for part in tiny(root))


def tiny_with_other_test_labels(root):
    """The data set `tiny` with wrong test labels."""
    train, test = tiny(root)
    return train, TensorData(test.inputs, (test.targets + 1) % 10, test.scale, test.shift)


def colour(root):
    """Black images with three channels, unlike MNIST's."""
    inputs = torch.zeros(20, 3, 28, 28, dtype=torch.uint8)
    return TensorData(inputs, torch.arange(20) % 10), TensorData(inputs, torch.arange(20) % 10)


def uneven(labels, n_workers, rng):
    """A partition in which worker k holds about k + 1 parts of the samples."""
    cuts = np.cumsum(np.arange(1, n_workers)) * len(labels) // (n_workers * (n_workers + 1) // 2)
    return np.split(rng.permutation(len(labels)), cuts)


def ending_in_one(labels, n_workers, rng):
    """A partition into shards of about equal size, except that the last worker has one sample."""
    order = rng.permutation(len(labels))
    return [*np.array_split(order[1:], n_workers - 1), order[:1]]


def same_last(labels, n_workers, rng, *, first: int):
    """A partition into three shards: the last is always the same, the first has `first` samples."""
    return np.split(np.arange(len(labels)), [first, 150])


def lossy(labels, n_workers, rng):
    return [np.arange(2) for _ in range(n_workers)]


def neighbours(labels, worker, n_workers, rng, by_class, ids, *, most: int = 30):
    """A virtual partition into uneven shards, each with samples of one class."""
    assert n_workers > worker
    assert len(labels) == len(ids["id"]) == sum(map(len, by_class))
    members = by_class[worker % len(by_class)]
    return members[rng.choice(len(members), rng.integers(1, min(most, len(members)) + 1), replace=False)]


def some(labels, worker, rng, *, most: int = 30):
    """A virtual partition into uneven shards."""
    return rng.choice(len(labels), rng.integers(1, most + 1), replace=False)


def planned(round, *, cohorts: list[list[int]]):
    """A cohort strategy that takes round k's workers from `cohorts`, each with probability 1/2."""
    return np.array(cohorts[round - 1]), np.full(len(cohorts[round - 1]), 0.5)


def nothing(labels, worker):
    return np.zeros(0, dtype=np.int64)


def beyond(labels, worker):
    return np.array([0, len(labels)])


@dataclass(frozen=True)
class Boasting:
    """A virtual partition that reports larger shards than it returns."""

    def __call__(self, labels, worker):
        return np.arange(2)

    def size(self, worker):
        return 7


@dataclass(frozen=True)
class Shade:
    """A lazy sequence of transforms, one for each worker."""

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
    """A virtual partition in which each worker's images are darkened by a different factor."""

    by: float = 1.0

    def __call__(self, labels, worker, rng):
        return rng.choice(len(labels), 20)

    def transforms(self, n_workers):
        return Shade(self.by, n_workers)


def clipped_mean(updates: Tensor, *, c: float = 1.0) -> Tensor:
    """An aggregation rule that needs whole rows and has no weighted form."""
    norms = updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (updates * (c / norms).clamp(max=1)).mean(0)


def brightened(images: Tensor, generator: torch.Generator) -> Tensor:
    """An augmentation that draws from a torch generator."""
    return images * torch.rand((), generator=generator)


def negated(images: Tensor) -> Tensor:
    """An augmentation without random draws."""
    return -images


@dataclass(frozen=True)
class Relabelled:
    """An attack on data that draws from a NumPy generator and gives all labels of a batch the same class."""

    def __call__(self, own_updates: Tensor) -> Tensor:
        return own_updates

    def poison(self, inputs: Tensor, targets: Tensor, rng: np.random.Generator, classes: int) -> tuple[Tensor, Tensor]:
        return inputs, torch.full_like(targets, int(rng.integers(classes)))


def drawn_mean(updates: Tensor, rng: np.random.Generator) -> Tensor:
    """A linear aggregation rule with random coefficients."""
    return torch.from_numpy(rng.dirichlet(np.ones(len(updates)))).to(updates) @ updates


def drawn_on_device(updates: Tensor, draws: Draws) -> Tensor:
    """A linear aggregation rule with random coefficients that are drawn on the device of the updates."""
    return draws.uniform(len(updates), dtype=updates.dtype) @ updates


def lossy_mean(updates: Tensor, losses: Tensor) -> Tensor:
    """A linear aggregation rule whose coefficients are proportional to the losses."""
    return (losses / losses.sum()).to(updates) @ updates


for function in (drawn_mean, drawn_on_device, lossy_mean):
    function.columnwise = function.linear = True


@dataclass(frozen=True)
class Smoothed(Classification):
    """Classification with label smoothing. An answer is correct if the label is among the two largest outputs."""

    smoothing: float = 0.1

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=self.smoothing, reduction=reduction)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.topk(2).indices == targets.unsqueeze(1)).any(1)


def weighted_loss(outputs, targets):
    """Cross entropy with class weights, which PyTorch divides by the sum of the weights of the targets of a batch."""
    return nn.functional.cross_entropy(outputs, targets, weight=torch.arange(1.0, 11.0, dtype=outputs.dtype))


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
    if updates.shape[1] < 100:  # in the rehearsal before the run
        return updates.mean(0)
    raise fedsim.ExperimentError(f"aggregate.f = {f}: needs more than {2 * f} workers, not {len(updates)}")


def clipping(updates: Tensor, *, c: float = 1.0) -> Tensor:
    """A second aggregation rule with a parameter `c`, as `clipped_mean` has."""
    return updates.clamp(-c, c).mean(0)


def tested_on_many(root):
    """A few training images, and test images for four batches."""
    train, _ = tiny(root)
    return train, real_images()[1]


def few(root):
    """60 samples with 4 input features and 3 classes."""
    inputs = torch.arange(240.0).reshape(60, 4).sin()
    return TensorData(inputs, torch.arange(60) % 3), TensorData(inputs, torch.arange(60) % 3)


def clients(root):
    """8 clients of 3 classes who are named by text: one has no test samples, and 2 more have nothing else."""
    owners = np.repeat([f"client {k}" for k in (3, 0, 10, 2, 1, 4, 6, 5)], [5, 9, 6, 12, 7, 8, 6, 10])
    tested = np.repeat([f"client {k}" for k in (9, 5, 0, 10, 8, 2, 1, 4, 6)], [4, 3, 2, 1, 6, 2, 2, 3, 3])
    parts = (torch.arange(4.0 * len(of)).reshape(-1, 4).add(k).sin() for k, of in enumerate((owners, tested)))
    return tuple(
        TensorData(inputs, torch.arange(len(of)) % 3, ids={"client": of})
        for inputs, of in zip(parts, (owners, tested), strict=True)
    )


def one_table(root):
    """70 samples of 3 classes of different sizes, without a test part."""
    targets = torch.arange(70).remainder(7).clamp(max=2)
    return TensorData(torch.arange(280.0).reshape(70, 4).sin(), targets, ids={"client": np.arange(70) % 9})


def tiny_on_rank(root):
    """The data set `tiny` with a changed image on rank 1."""
    train, test = tiny(root)
    if os.environ.get("RANK") == "1":
        train.inputs[0] += 1
    return train, test


def absent_on_rank(root):
    """The data set `tiny`, which cannot be loaded on rank 1."""
    if os.environ.get("RANK") == "1":
        raise fedsim.errors.DataError("there is nothing here")
    return tiny(root)


def with_a_hole(root):
    """Float images of which the first 60 are NaN."""
    return with_nan_at(slice(60))


def with_a_hole_at_the_end(root):
    """Float images of which the last 60 are NaN."""
    return with_nan_at(slice(-60, None))


def with_nan_at(where):
    train, test = tiny(None)
    inputs = train.inputs.float()
    inputs[where] = torch.nan
    return replace(train, inputs=inputs), replace(test, inputs=test.inputs.float())


def in_blocks(labels, n_workers):
    """A partition into consecutive blocks of samples, in the order of the workers."""
    return np.array_split(np.arange(len(labels)), n_workers)


@dataclass(frozen=True)
class Costly:
    """A client algorithm without a base class that declares three gradients per step."""

    lr: float = 0.05
    gradients_per_step = 3

    def start(self, rows):
        return {}

    def step(self, rows, gradients, state):
        rows.add_(gradients, alpha=-self.lr)


@dataclass(frozen=True)
class Counting(ClientAlgorithm):
    """A client algorithm with worker state, server state and messages: workers count rounds and drift towards a mean.

    Each worker keeps its number of rounds and its last change per step. The server keeps the total number of rounds and
    the mean change, and sends both.
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
