"""Packages that only some uses of fedsim need, and that come with its extras: `pip install 'fedsim[report]'`."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedsim.errors import MissingPackageError


def import_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """The module, imported. Raises MissingPackageError, saying what to install, where its package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # it is there, and something it needs is not
            raise
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'fedsim[{extra}]'"
        ) from None
