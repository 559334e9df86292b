"""MNIST's IDX files, where torchvision puts them.

Reading them here spares every run the import of torchvision, which takes longer than reading the data; torchvision
is asked only to download what is missing (see `fedsim.system.vision`).
"""

from __future__ import annotations

import errno
import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.data.checksums import Known, check_content
from fedsim.errors import DataError
from fedsim.system.files import is_file, read_bounded

MOST_BYTES = 2**30  # of a file, packed or not; the images of MNIST have 47 million
MOST_DIMENSIONS = 4
PARTS = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
AGAIN = "remove it, so that it is downloaded again"
NOTHING_KNOWN: Known = {}


def missing_files(folder: Path) -> list[str]:
    """Which of the four files are neither in `folder` nor there with a suffix .gz."""
    names = [name for pair in PARTS.values() for name in pair]
    return [name for name in names if _find(folder, name) is None]


def read_images_and_labels(folder: Path, *, train: bool, known: Known = NOTHING_KNOWN) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 1, height, width] and labels int64 [n]. Raises DataError for a damaged file.

    known: what files of these names hold in a standard data set; see `fedsim.data.checksums`.
    """
    images, labels = (_read(folder, name, known) for name in PARTS[train])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{folder}: images {images.shape} and labels {labels.shape} do not belong together")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def _unpacked(packed: bytes) -> bytes:
    """What gzip has packed, unless it is far more than any data set: a few bytes can hold terabytes of zeros."""
    with gzip.open(io.BytesIO(packed)) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it holds more than {MOST_BYTES:,} bytes")
    return content


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if is_file(path)), None)


def _read(folder: Path, name: str, known: Known) -> np.ndarray:
    """One IDX file of unsigned bytes: two zero bytes, the type 8, the number of dimensions, then each dimension."""
    path = _find(folder, name)
    if path is None:
        raise DataError(f"{folder / name}: no such file")
    try:
        packed = read_bounded(path, MOST_BYTES)
        content = np.frombuffer(bytearray(_unpacked(packed) if path.suffix == ".gz" else packed), np.uint8)  # writable
    except (OSError, EOFError, zlib.error) as error:
        found = f" ({path.stat().st_size:,} bytes)" if path.is_file() else ""
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"{path}{found}: cannot be read: {reason}; {AGAIN}") from error
    if len(content) < 4 or content[:3].tolist() != [0, 0, 8] or content[3] > MOST_DIMENSIONS:
        raise DataError(f"{path}: is not an IDX file of unsigned bytes ({len(content):,} bytes); {AGAIN}")
    start = 4 + 4 * int(content[3])
    shape = tuple(content[4:start].view(">u4").tolist()) if len(content) >= start else ()
    expected = start + math.prod(shape)
    if len(content) != expected:
        raise DataError(f"{path}: is damaged: {len(content)} bytes, {expected} expected for {shape}; {AGAIN}")
    check_content(path, content, known)
    return content[start:].reshape(shape)
