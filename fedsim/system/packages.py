"""Import of packages on demand: the optional packages in fedsim's extras, and torchvision."""

from __future__ import annotations

import importlib
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.errors import DataError, MissingPackageError, one_line

EXTRAS = {  # packages of each extra for users; `pyproject.toml` has the versions
    "report": ("plotly", "jinja2"),
    "pandas": ("pandas",),
    "yaml": ("pyyaml",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "flower": ("flwr", "flwr-datasets"),
    "lightning": ("lightning",),
    "text": ("tokenizers",),
    "tables": ("pyarrow",),
    "huggingface": ("datasets",),
    "privacy": ("dp-accounting",),
}
DOWNLOAD_TIMEOUT = 30.0  # seconds without receiving data

_missing_operators: Any = None  # a torch.library.Library, whose declarations exist as long as the object


def import_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return a module of an optional package.

    Raises MissingPackageError if the package is missing. The message says for which `purpose` it is needed, and
    contains the command that installs it with fedsim's `extra`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # a dependency of the package is missing
            raise
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed: pip install {' '.join(EXTRAS[extra])}"
        ) from None


def import_torchvision() -> Any:
    """Import torchvision, even if it was compiled for another build of PyTorch."""
    global _missing_operators
    try:
        import torchvision.datasets
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        import torch  # imported here, because not every command that needs an extra needs PyTorch

        _missing_operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _missing_operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision.datasets
    return torchvision


def download(dataset: str, root: Path, arguments: Sequence[Mapping[str, Any]]) -> None:
    """Download a torchvision data set to `root`.

    The class `torchvision.datasets.<dataset>` is constructed once with each element of `arguments`.

    Files are copied to `root` only after all of them are downloaded. Raises DataError on failure.
    """
    torchvision = import_torchvision()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in arguments:
                getattr(torchvision.datasets, dataset)(folder, **part, download=True)
            root.mkdir(parents=True, exist_ok=True)
            for path in Path(folder).iterdir():
                if path.is_dir():
                    shutil.copytree(path, root / path.name, dirs_exist_ok=True)
                else:
                    shutil.copy2(path, root)
    except Exception as error:  # errors of urllib, of the archive or of the file system
        raise DataError(f"downloading {dataset} failed: {one_line(error)}") from error
    finally:
        socket.setdefaulttimeout(before)
