"""Small data sets for the built-in models of images and text, which tests name by import path."""

from __future__ import annotations

import torch

from fedsim.core.randomness import torch_generator
from fedsim.data import TensorData
from fedsim.system.packages import import_torchvision

TRAIN, TEST, CHARACTERS, LENGTH = 45, 12, 11, 6


def noise(root, *, shape: tuple[int, ...], classes: int = 10) -> tuple[TensorData, TensorData]:
    """Random inputs of this shape with random labels."""
    generator = torch_generator(0, "noise")
    inputs = torch.randn(TRAIN + TEST, *shape, generator=generator)
    labels = torch.randint(0, classes, (TRAIN + TEST,), generator=generator)
    return TensorData(inputs[:TRAIN], labels[:TRAIN]), TensorData(inputs[TRAIN:], labels[TRAIN:])


def text(root) -> tuple[TensorData, TensorData]:
    """Random sequences of characters; the targets are the next characters."""
    characters = torch.randint(0, CHARACTERS, (TRAIN + TEST, LENGTH + 1), generator=torch_generator(0, "text"))
    inputs, targets = characters[:, :-1].clone(), characters[:, 1:].clone()
    parts = slice(TRAIN), slice(TRAIN, None)
    train, test = (TensorData(inputs[part], targets[part], dtype=torch.int64) for part in parts)
    return train, test


def small_vit() -> torch.nn.Module:
    """A vision transformer of torchvision, whose layers hold objects of functools.partial."""
    vit = import_torchvision().models.VisionTransformer
    return vit(8, 4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=10)


CHAR_LSTM = {
    "model": {"name": "char_lstm", "classes": CHARACTERS, "embedding": 3, "hidden": 7},
    "task": "next_token",
    "data": "tests.real_models:text",
}
GPT = {
    "model": {"name": "gpt", "classes": CHARACTERS, "layers": 2, "heads": 2, "width": 8, "context": LENGTH + 2},
    "task": "next_token",
    "data": "tests.real_models:text",
}
RESNET = {"model": {"name": "resnet20", "classes": 3}, "data": {"name": "tests.real_models:noise", "shape": [3, 8, 8]}}
RESNET["data"]["classes"] = 3
