"""Samples with several inputs, and models that take them by keyword or by position. Tests name them by import path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.randomness import torch_generator
from fedsim.data import TensorData

TRAIN, TEST, SIDE, NUMBERS, WORDS, LENGTH, CLASSES = 96, 40, 6, 3, 7, 4, 3
NAMES = "image", "table", "words"


def samples(root: Any, *, by_position: bool = False) -> tuple[TensorData, TensorData]:
    """Return samples that consist of an image, a few numbers and a few words, in a dict or in a tuple."""
    generator, n = torch_generator(0, "several inputs"), TRAIN + TEST
    image = torch.randint(0, 256, (n, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    table = torch.randn(n, NUMBERS, generator=generator)
    words = torch.randint(0, WORDS, (n, LENGTH), generator=generator)
    targets = (words[:, 0] + (table[:, 0] > 0)) % CLASSES
    columns = (image, table, words) if by_position else dict(zip(NAMES[::-1], (words, table, image), strict=True))

    def part(index: slice) -> TensorData:
        tensors = [tensor[index] for tensor in (columns if by_position else columns.values())]
        inputs = tuple(tensors) if by_position else dict(zip(columns, tensors, strict=True))
        return TensorData(inputs, targets[index], scale=1 / 255)

    return part(slice(TRAIN)), part(slice(TRAIN, None))


class Joint(nn.Module):
    """A model of images, numbers and words."""

    def __init__(self) -> None:
        super().__init__()
        self.of_image, self.of_table = nn.Linear(SIDE * SIDE, 5), nn.Linear(NUMBERS, 5)
        self.of_words, self.last = nn.Embedding(WORDS, 5), nn.Linear(5, CLASSES)

    def forward(self, image: Tensor, table: Tensor, words: Tensor) -> Any:
        hidden = self.of_image(image.flatten(1)) + self.of_table(table) + self.of_words(words).mean(1)
        return self.last(hidden.tanh())


@dataclass
class Output:
    """Outputs like those of Hugging Face's transformers."""

    logits: Tensor | None = None
    loss: Tensor | None = None


class JointWithObject(Joint):
    """`Joint`, which returns an object."""

    def forward(self, image: Tensor, table: Tensor, words: Tensor) -> Any:
        return Output(super().forward(image, table, words))


class JointWithLoss(Joint):
    """`Joint`, which gets the labels and computes its loss, as models of transformers do."""

    def forward(self, image: Tensor, table: Tensor, words: Tensor, labels: Tensor) -> Any:
        logits = super().forward(image, table, words)
        return Output(logits, nn.functional.cross_entropy(logits, labels))


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss that the model has computed."""
    return outputs
