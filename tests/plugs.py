"""Plugs that tests name by import path, as a user would name their own."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.data import TensorData, load_dataset

TINY_TRAIN, TINY_TEST = 203, 90


def tiny(root, *, train: int = TINY_TRAIN):
    """A few real images; 203 is divided evenly by no number of workers that the tests use."""
    full_train, full_test = load_dataset("mnist5k")
    parts = ((full_train, train), (full_test, TINY_TEST))
    return tuple(TensorData(d.inputs[:n].clone(), d.targets[:n].clone(), d.scale, d.shift) for d, n in parts)


def colour(root):
    """Not MNIST's shape: three channels."""
    inputs = torch.zeros(20, 3, 28, 28, dtype=torch.uint8)
    return TensorData(inputs, torch.arange(20) % 10), TensorData(inputs, torch.arange(20) % 10)


def many_classes(root):
    inputs = torch.zeros(20, 1, 28, 28, dtype=torch.uint8)
    return TensorData(inputs, torch.arange(20)), TensorData(inputs, torch.arange(20))


def uneven(labels, n_workers, rng):
    """Worker k holds about k + 1 parts."""
    cuts = np.cumsum(np.arange(1, n_workers)) * len(labels) // (n_workers * (n_workers + 1) // 2)
    return np.split(rng.permutation(len(labels)), cuts)


def same_last(labels, n_workers, rng, *, first: int):
    """Three shards: the last is always the same, the others depend on `first`."""
    return np.split(np.arange(len(labels)), [first, 150])


def lossy(labels, n_workers, rng):
    return [np.arange(2) for _ in range(n_workers)]


def clipped_mean(updates: Tensor, *, c: float = 1.0) -> Tensor:
    """A rule that looks at whole rows and has no weighted form."""
    norms = updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (updates * (c / norms).clamp(max=1)).mean(0)


class Normalised(nn.Module):
    """A network with BatchNorm, so with float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Probabilities(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10), nn.Softmax(dim=1))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))


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
