"""The import of torchvision, which only its data sets and import paths of the user need."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedsim.errors import DataError, one_line

DOWNLOAD_TIMEOUT = 30.0  # seconds without a byte

_missing_operators: torch.library.Library | None = None  # its declarations last as long as the object


def import_torchvision() -> Any:
    """Import torchvision, also if its compiled operators do not fit the build of PyTorch.

    The torchvision of PyPI is built for one build of PyTorch. With another build (for CPUs, say) its compiled operators
    do not load, and `import torchvision` fails with "operator torchvision::nms does not exist", since it registers
    shape functions for two operators that were not declared. This function declares the missing operators, which
    fedsim does not use.
    """
    global _missing_operators
    schemas = {
        "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    }
    try:
        import torchvision.datasets
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in schemas.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _missing_operators = library
        import torchvision.datasets
    return torchvision


def download(dataset: str, root: Path) -> None:
    """Download torchvision's data set of this class name ("MNIST", "FashionMNIST") into `root`.

    Raises DataError if the download fails, and then removes what it has written.
    """
    torchvision = import_torchvision()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        with _removed_on_failure(root / dataset):
            getattr(torchvision.datasets, dataset)(root, download=True)
    except Exception as error:  # urllib's, the archive's and the file system's own errors alike
        raise DataError(f"the download failed ({one_line(error)})") from error
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """If the block fails, remove what it has written to `folder`, and the folders that it has made."""
    before = set(folder.rglob("*"))
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in sorted(set(folder.rglob("*")) - before, reverse=True):  # what is in a folder comes before it
                path.rmdir() if path.is_dir() else path.unlink()
            for path in made:
                path.rmdir()
        raise
