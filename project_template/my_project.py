"""The components of this project. Keyword-only parameters are their configuration: keys of an experiment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import fedsim
from fedsim import TensorData
from fedsim.clients import ClientAlgorithm


def softmedian(updates: Tensor, *, temperature: float = 1.0) -> Tensor:
    """A rule: the mean of the rows [n, d], weighted by exp(-distance to the median / temperature).

    Geisler et al. 2021. A rule returns one row [d], and leaves the updates unchanged.
    """
    distances = (updates - updates.median(0).values).norm(dim=1)
    return torch.softmax(-distances / temperature, 0) @ updates


def opposite_median(honest: Tensor, n_byzantine: int, *, scale: float = 3.0) -> Tensor:
    """An attack: every Byzantine row is -scale times the median of the honest rows [h, d].

    An attack returns the Byzantine rows [n_byzantine, d].
    """
    return (-scale * honest.median(0).values).expand(n_byzantine, -1)


def growing(labels: np.ndarray, n_workers: int, rng: np.random.Generator, *, ratio: float = 1.5) -> list[np.ndarray]:
    """A partition: each worker has `ratio` times as many samples as the one before it, drawn at random.

    A partition returns an array of positions for each worker, in which each sample is once.
    """
    ends = np.cumsum(ratio ** np.arange(n_workers))
    return np.split(rng.permutation(len(labels)), (len(labels) * ends[:-1] / ends[-1]).astype(int))


def perceptron(*, hidden: int = 32) -> nn.Module:
    """A model: one hidden layer, from images [batch, 1, 14, 14] to a number for each of 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(196, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def small_digits(root: object, *, train_samples: int = 2000) -> tuple[TensorData, TensorData]:
    """A data set, (train, test): images of MNIST, 14 by 14 pixels, each the mean of four."""
    parts = [part.gather(torch.arange(len(part))) for part in fedsim.load_dataset("mnist5k")]
    train, test = (TensorData(avg_pool2d(images, 2), targets) for images, targets in parts)
    return TensorData(train.inputs[:train_samples], train.targets[:train_samples]), test


def worst_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric: the accuracy on the class with the lowest one."""
    right = outputs.argmax(1) == targets
    return torch.stack([right[targets == label].float().mean() for label in targets.unique()]).min()


@dataclass(frozen=True)
class FedCM(ClientAlgorithm):
    """A client algorithm: local steps along alpha gradient + (1 - alpha) direction. Xu et al. 2021.

    The direction is that of the workers' mean local step in the last round. The server keeps and sends it.
    """

    lr: float = 0.1
    alpha: float = 0.5

    def server_state(self, row: Tensor) -> dict[str, Tensor]:
        return {"direction": torch.zeros_like(row)}

    def message(self, row: Tensor) -> dict[str, Tensor]:
        """The shape of what a worker sends besides its row."""
        return {"mean_step": torch.zeros_like(row)}

    def start(self, rows: Tensor) -> dict[str, Tensor]:
        """What the steps need: here the rows before them, and the direction."""
        return {"start": rows.clone(), "direction": torch.zeros_like(rows)}

    def start_round(self, rows, worker):
        return {"start": rows.clone(), "direction": worker.received["direction"].expand_as(rows).clone()}

    def step(self, rows: Tensor, gradients: Tensor, state: dict[str, Tensor]) -> None:
        rows.add_(gradients, alpha=-self.lr * self.alpha).add_(state["direction"], alpha=-self.lr * (1 - self.alpha))

    def finish(self, rows, state, worker):
        return {"mean_step": (state["start"] - rows) / (self.lr * worker.steps)}

    def receive(self, server, sums, workers, population):
        server["direction"].copy_(sums["mean_step"] / workers)
