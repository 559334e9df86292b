"""The only module that imports torchvision, and it does so only to download a data set."""

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
    """torchvision, also beside a PyTorch build that its compiled operators do not fit.

    The package index's torchvision is built for one particular PyTorch. Beside another build (a CPU one, say) its
    compiled operators fail to load, and `import torchvision` then stops with "operator torchvision::nms does not
    exist", because it registers shape functions for two operators that nobody declared. fedsim uses none of them,
    so where their schemas are missing, and only there, they are declared here.
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

    Raises DataError where that fails; the disk is then as it was before.
    """
    torchvision = import_torchvision()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        with _kept_whole_or_not_at_all(root / dataset):
            getattr(torchvision.datasets, dataset)(root, download=True)
    except Exception as error:  # urllib's, the archive's and the file system's own errors alike
        raise DataError(f"the download failed ({one_line(error)})") from error
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _kept_whole_or_not_at_all(folder: Path) -> Iterator[None]:
    """Where the block fails, take away what it has put into `folder`, and the folders that it made on the way there."""
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
