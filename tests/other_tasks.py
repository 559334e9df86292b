"""Data and models for tasks without class labels, which tests name by import path."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.core.randomness import torch_generator
from fedsim.data import TensorData

TRAIN, TEST, INPUTS, WORDS, LENGTH, PADDING = 120, 40, 5, 7, 6, -100


def planes(root, *, outputs: int = 0) -> tuple[TensorData, TensorData]:
    """A data set of noisy linear functions of random inputs, with targets [n] or [n, outputs]."""
    generator = torch_generator(0, "planes")
    inputs = torch.randn(TRAIN + TEST, INPUTS, generator=generator)
    slopes = torch.randn(INPUTS, max(outputs, 1), generator=generator)
    targets = inputs @ slopes + 0.1 * torch.randn(TRAIN + TEST, max(outputs, 1), generator=generator)
    targets = targets if outputs else targets[:, 0]
    return TensorData(inputs[:TRAIN], targets[:TRAIN]), TensorData(inputs[TRAIN:], targets[TRAIN:])


def plane(*, outputs: int = 1) -> nn.Module:
    return nn.Linear(INPUTS, outputs)


def counting(root) -> tuple[TensorData, TensorData]:
    """A data set of sequences in which each word is the previous one plus 1 or 2, padded by 0 to 3 places."""
    generator = torch_generator(0, "counting")
    steps = torch.randint(1, 3, (TRAIN + TEST, LENGTH + 1), generator=generator)
    words = steps.cumsum(1) % WORDS
    inputs, targets = words[:, :-1].clone(), words[:, 1:].clone()
    padded = torch.arange(LENGTH) >= LENGTH - torch.randint(0, 4, (TRAIN + TEST, 1), generator=generator)
    targets[padded] = PADDING
    parts = slice(TRAIN), slice(TRAIN, None)
    train, test = (TensorData(inputs[part], targets[part], dtype=torch.int64) for part in parts)
    return train, test


class Bigrams(nn.Module):
    """A model that returns logits [batch, length, words] of the next word from the current one."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(words, 4), nn.Linear(4, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.linear(self.embedding(words))


REGRESSION = {"task": "regression", "data": "tests.other_tasks:planes", "model": "tests.other_tasks:plane"}
NEXT_TOKEN = {"task": "next_token", "data": "tests.other_tasks:counting", "model": "tests.other_tasks:Bigrams"}
