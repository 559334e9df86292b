"""Network and data of pfl's benchmark `image_classification`, defined as in a user's own file.

The baseline of this benchmark (Granqvist et al. 2024) trains 50 of 1,000 clients per round, and tests 10,000 images
after every tenth round. Here each round tests 1,000 images, which is the same work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from benchmarks.gpu.data import synthetic
from fedsim import TensorData, load_dataset
from fedsim.data.formats.images import lacks_files


class Net(nn.Module):
    """Two 3x3 convolutions with 32 and 64 channels, and two linear layers (1,626,442 parameters).

    Args:
        dropout: dropout probability before the last layer; half of it before the first linear layer.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Dropout(dropout / 2), nn.Flatten()),
        )
        self.classifier = nn.Sequential(nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.convolutions(images))


def images(root: Path, *, train: int = 50_000, test: int = 1_000) -> tuple[TensorData, TensorData]:
    """Return the first images of CIFAR-10, or random images of the same shape if its files are missing."""
    if lacks_files("cifar10", root):
        return synthetic(root, train=train, test=test, depth=3, size=32)
    sizes = zip(load_dataset("cifar10", root), (train, test), strict=True)
    first, last = (replace(data, inputs=data.inputs[:n], targets=data.targets[:n]) for data, n in sizes)
    return first, last
