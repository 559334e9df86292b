"""Simulate N workers of distributed or federated SGD on one GPU, or one CPU.

    import fedsim
    result = fedsim.run({"workers": 8, "rounds": 5})

`fedsim.run` runs an experiment; the other names are the pieces it is made of, for use by themselves.

A name is imported when it is first used: PyTorch takes a second or more, and `fedsim --help` does not need it.
"""

# ruff: noqa: F403

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedsim.api import MODULE_OF
from fedsim.system.c_libraries import wait_passively
from fedsim.version import __version__

wait_passively()  # before PyTorch is imported

if TYPE_CHECKING:
    from fedsim.api import *

__all__ = ["__version__", *sorted(MODULE_OF)]


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, imported on first use."""
    if name in MODULE_OF:
        value = getattr(importlib.import_module("fedsim.api"), name)
        globals()[name] = value
        return value
    path = f"fedsim.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module exists, and a package that it needs does not
            raise
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
