"""Models that tests name by import path, as users name their own. Other components are in tests/components.py."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn


def sized(*, hidden: tuple[int, ...] = (16,), scale: float | None = 2.0) -> nn.Module:
    """Return a perceptron. Its parameters have Python types that TOML lacks (a tuple and None)."""
    widths = [784, *hidden, 10]
    return nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in pairwise(widths)))


class OnImages(nn.Module):
    """A linear layer on flattened images, the base class of other models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))


class Normalised(nn.Module):
    """A network with BatchNorm, which has float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def layer_normalised() -> nn.Module:
    """Return a network with LayerNorm, which has no buffers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.LayerNorm(8), nn.Linear(8, 10))


class WithFeatures(nn.Module):
    """A network with a method that returns its hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(784, 8), nn.Linear(8, 6), nn.Linear(6, 10)

    def features(self, images: Tensor) -> Tensor:
        return self.second(self.first(images.flatten(1)).tanh())

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.features(images).tanh())


class NormalisedFeatures(WithFeatures):
    """`WithFeatures` with BatchNorm, so that its batches cannot be merged."""

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
    """A model that fails on batches of two samples."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) == 2:
            raise ValueError("Expected more than 2 samples")
        return super().forward(images)


class Probabilities(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10), nn.Softmax(dim=1))


class Frozen(OnImages):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Stateful(nn.Module):
    """A model with many kinds of state outside the row, which must not leak from one worker to another."""

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
    """A model with shared parameters and with unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 10)
        self.square, self.unused = nn.Linear(10, 10), nn.Linear(3, 3)
        self.again = self.square

    def forward(self, images: Tensor) -> Tensor:
        return self.again(self.square(self.first(images.flatten(1))).tanh())


class LetsGo(OnImages):
    """A model that replaces the data of its parameters."""

    def forward(self, images: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-1, 1)
        return super().forward(images)


class MovesFrozen(nn.Module):
    """A momentum encoder: parameters without gradients that the model moves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(784, 10), nn.Linear(784, 10).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.linear.weight, 0.5)
        return self.linear(images.flatten(1)) + self.slow(images.flatten(1))


class WithExtraState(nn.Sequential):
    """A model whose state_dict contains more than tensors."""

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
    """A model on token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens).mean(1))


class Fails(OnImages):
    """A model that fails after some training steps, in the way that `how` names."""

    def __init__(self, *, how: str = "raise", after: int = 3) -> None:
        super().__init__()
        self.how, self.steps_left = how, after

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.fail()
        return super().forward(images)

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


class FailsInRank(Fails):
    """A model that fails only on one launched rank, after `after` steps of all its workers."""

    steps = 0

    def __init__(self, *, how: str = "raise", after: int = 3, rank: int = 1) -> None:
        super().__init__(how=how, after=0)
        self.late, self.rank = after, rank

    def fail(self) -> None:
        FailsInRank.steps += 1
        if FailsInRank.steps > self.late and os.environ.get("RANK") == str(self.rank):
            super().fail()


class FailsInBackward(FailsInRank):
    """A model that fails in the backward pass, after the ranks have begun to exchange gradients."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.linear(images.flatten(1))
        if self.training:
            outputs.register_hook(lambda gradient: self.fail())
        return outputs


class Complex(nn.Module):
    """A model with a complex parameter or a complex buffer."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.linear, factor = nn.Linear(784, 10), torch.ones(10, dtype=torch.complex64)
        if buffer:
            self.register_buffer("factor", factor)
        else:
            self.factor = nn.Parameter(factor)

    def forward(self, images: Tensor) -> Tensor:
        return (self.linear(images.flatten(1)) * self.factor).real


class Halving(OnImages):
    """A model that writes to its parameters when it is tested."""

    def __init__(self, *, halves: bool = True) -> None:
        super().__init__()
        self.halves = halves

    def forward(self, images: Tensor) -> Tensor:
        if self.halves and not self.training:
            with torch.no_grad():
                self.linear.weight *= 0.5
        return super().forward(images)


class Renormalised(Embedded):
    """A model with an embedding that shortens the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.max_norm = 0.5


class AlwaysDropping(OnImages):
    """A model that draws dropout in evaluation mode too."""

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(images.flatten(1), 0.5, training=True))


class Few(nn.Module):
    """A model with so few parameters that one of four ranks holds none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


class FailsInRankOnce(FailsInRank):
    """A model that fails only before the launcher has restarted the ranks."""

    def fail(self) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            super().fail()


class Branching(nn.Module):
    """A model that uses one of two layers depending on the batch, so workers have gradients for different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(784, 10), nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return (self.first if flat[0].sum() > 100 else self.second)(flat)


class Recurrent(nn.Module):
    """A module that keeps additional references to its registered parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(28, 8, batch_first=True), nn.Linear(8, 10)
        self.listed = list(self.linear.parameters())

    def forward(self, images: Tensor) -> Tensor:
        weight, bias = self.listed
        return self.lstm(images[:, 0])[0][:, -1] @ weight.T + bias


class OneIsTooFew(OnImages):
    """A model without a finite gradient for batches of one sample."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) / (len(images) - 1 if self.training else 1)


class Steep(nn.Linear):
    """A model whose gradients exceed the range of float16."""

    def __init__(self) -> None:
        super().__init__(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1) * 1e8)


class Greedy(OnImages):
    """A model that tries to allocate more memory than any machine has during training."""

    def forward(self, images):
        if self.training and torch.is_grad_enabled() and len(images) > 1 and images.device.type != "meta":
            torch.empty(2**50)
        return super().forward(images)
