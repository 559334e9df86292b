"""Optional packages, which the extras install: `pip install 'fedsim-sgd[report]'`."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedsim.errors import MissingPackageError

EXTRAS = {  # the packages of each extra that users may want; `pyproject.toml` has their versions
    "report": ("plotly", "jinja2"),
    "pandas": ("pandas",),
    "yaml": ("pyyaml",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "flower": ("flwr", "flwr-datasets"),
    "lightning": ("lightning",),
}


def import_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a module. Raises MissingPackageError, which says what to install, if its package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:  # a dependency of it is missing
            raise
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'fedsim-sgd[{extra}]'"
        ) from None
