"""Data of pfl's benchmark `image_classification`, defined as in a user's own file.

The baseline of this benchmark (Granqvist et al. 2024) trains 50 of 1,000 clients per round, and tests 10,000 images
after every tenth round. Here each round tests 1,000 images, which is the same work.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.data import synthetic
from fedsim import TensorData, load_dataset
from fedsim.data.formats.images import lacks_files


def images(root: Path, *, train: int = 50_000, test: int = 1_000) -> tuple[TensorData, TensorData]:
    """Return the first images of CIFAR-10, or random images of the same shape if its files are missing."""
    if lacks_files("cifar10", root):
        return synthetic(root, train=train, test=test, depth=3, size=32)
    sizes = zip(load_dataset("cifar10", root), (train, test), strict=True)
    first, last = (replace(data, inputs=data.inputs[:n], targets=data.targets[:n]) for data, n in sizes)
    return first, last
