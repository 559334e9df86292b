"""MNIST and Fashion-MNIST: reads the files in torchvision's layout, and has torchvision download missing ones.

torchvision is imported for the download only, because its import takes 1.5 s and reading the files takes 0.05 s.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch

from fedsim.data.tensors import TensorData
from fedsim.errors import DataError
from fedsim.system import vision
from fedsim.system.files import is_file, read_bounded

FILES = {  # by part: images and labels
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CHECKSUMS = {  # bytes and CRC-32 of each published file, as `gzip -lv` shows them
    "MNIST": {
        "train-images-idx3-ubyte": (47_040_016, 0xE9F4D8B3),
        "train-labels-idx1-ubyte": (60_008, 0xE0CB4AD2),
        "t10k-images-idx3-ubyte": (7_840_016, 0x91373BDF),
        "t10k-labels-idx1-ubyte": (10_008, 0x4AB9EFF9),
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": (47_040_016, 0xB4F29F28),
        "train-labels-idx1-ubyte": (60_008, 0x741A4657),
        "t10k-images-idx3-ubyte": (7_840_016, 0x678FE0B1),
        "t10k-labels-idx1-ubyte": (10_008, 0x80142C1F),
    },
}
STATISTICS = {"MNIST": ((0.1307,), (0.3081,)), "FashionMNIST": ((0.2860,), (0.3530,))}  # mean and deviation of pixels
MOST_BYTES = 2**30  # of a file
AGAIN = "remove it to download it again"


def load_mnist(root: Path, class_name: str, *, verify: bool) -> tuple[TensorData, TensorData]:
    """The training and the test samples of torchvision's data set `class_name`, "MNIST" or "FashionMNIST".

    Args:
        root: the folder that holds `<class_name>/raw`.
        verify: refuse a file that has the size of the published one and another CRC-32.

    Raises DataError if a file is missing and cannot be downloaded, or is damaged.
    """
    folder = root / class_name / "raw"
    if missing := missing_files(folder):
        try:
            vision.download(class_name, root)
        except DataError as error:
            raise DataError(
                f"data.dataset: {missing[0]} is not in {folder}, and {error}. Set data.root or $FEDSIM_DATA to the "
                f"folder that holds {class_name}/raw, or use the embedded data set: data.dataset=mnist5k"
            ) from error
    checksums = CHECKSUMS[class_name] if verify else {}
    train, test = (_read_part(folder, names, checksums, *STATISTICS[class_name]) for names in FILES.values())
    return train, test


def missing_files(folder: Path) -> list[str]:
    """The names of the four files that are not in `folder`."""
    return [name for names in FILES.values() for name in names if not is_file(folder / name)]


def read_idx(path: Path, checksums: dict[str, tuple[int, int]] | None = None) -> np.ndarray:
    """The array in an IDX file of unsigned bytes.

    The file starts with two zero bytes, the type 8, the number of dimensions, and each dimension as 4 bytes.
    Raises DataError if it cannot be read, or if `checksums` has its size with another CRC-32.
    """
    content = b""
    try:
        content = read_bounded(path, MOST_BYTES)
        if content[:3] != b"\0\0\x08":
            raise ValueError("not an IDX file of unsigned bytes")
        start = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:start], ">u4").tolist()
        array = np.frombuffer(bytearray(content[start:]), np.uint8).reshape(shape)  # writable
    except (OSError, ValueError, IndexError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(f"{path}: cannot be read ({len(content):,} bytes): {reason}; {AGAIN}") from error
    size, expected = (checksums or {}).get(path.name, (None, 0))
    if len(content) == size and zlib.crc32(content) != expected:
        raise DataError(
            f"{path}: is damaged: its CRC-32 is {zlib.crc32(content):08x}, not {expected:08x}; {AGAIN}, or set "
            "data.verify=false if it is another data set"
        )
    return array


def _read_part(
    folder: Path,
    names: tuple[str, str],
    checksums: dict[str, tuple[int, int]],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> TensorData:
    images, labels = (read_idx(folder / name, checksums) for name in names)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{folder}: images {images.shape} and labels {labels.shape} do not belong together")
    return TensorData.of_images(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long(), mean, std)
