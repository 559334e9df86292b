"""MNIST if it is available, otherwise random images of the same shape."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsim import TensorData
from fedsim.data.formats.images import lacks_files
from fedsim.data.sources import default_root

AT_ONCE = 1000  # images; in floating point, all images of a data set would take most memory of a run


def has_mnist() -> bool:
    return not lacks_files("mnist", default_root())


def synthetic(
    root: Path, *, train: int = 60_000, test: int = 10_000, depth: int = 1, size: int = 28
) -> tuple[TensorData, TensorData]:
    """Return ten blurred patterns with noise, by default with the numbers and sizes of MNIST's images.

    They can be learned. `size` is the height and width of the images, a multiple of 4.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, depth, size // 4, size // 4, generator=generator)
    patterns = patterns.repeat_interleave(4, 2).repeat_interleave(4, 3)

    def images(count: int) -> TensorData:
        labels, pixels = torch.arange(count) % 10, torch.empty(count, depth, size, size, dtype=torch.uint8)
        for part, numbers in zip(pixels.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
            part.copy_((patterns[numbers] + torch.rand(part.shape, generator=generator)) * 127)
        return TensorData(pixels, labels, 1 / 78.5, -1.6)

    return images(train), images(test)


def workload_data(train: int | None = None) -> dict[str, object]:
    """Return the data set of the workloads as the table `data` of an experiment.

    train: number of training samples, for a small synthetic data set. Default: all of MNIST, or a data set of its size.
    """
    if train is not None:
        return {"name": "benchmarks.gpu.data:synthetic", "train": train, "test": 200}
    return {"name": "mnist"} if has_mnist() else {"name": "benchmarks.gpu.data:synthetic"}
