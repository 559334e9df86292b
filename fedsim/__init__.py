"""Simulate N workers of distributed or federated SGD on one GPU or one CPU.

    import fedsim
    result = fedsim.run({"workers": 8, "rounds": 5})

`fedsim.run` runs an experiment. The other public names are parts of a run that can be used separately.

Names are imported on first use: importing PyTorch takes a second or more, and `fedsim --help` does not need it.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.system.c_libraries import wait_passively
from fedsim.version import __version__

wait_passively()  # must run before PyTorch is imported

if TYPE_CHECKING:
    from fedsim.aggregation import aggregate, pre_aggregate
    from fedsim.byzantine import attack
    from fedsim.callbacks import Callback
    from fedsim.comparison import Comparison, compare, load_comparison, plot
    from fedsim.config.experiment import Experiment
    from fedsim.config.listing import components
    from fedsim.config.load import load_experiment
    from fedsim.core.randomness import Draws
    from fedsim.core.rows import Layout, bind, new_rows, pull_down
    from fedsim.core.training import test, train_epoch
    from fedsim.data import (
        CustomSubset,
        Heterogeneity,
        TensorData,
        dataset_split,
        label_counts,
        load_dataset,
        partition,
        partition_transforms,
        plot_partition,
    )
    from fedsim.data.heterogeneity import heterogeneity
    from fedsim.errors import DataError, ExperimentError, FedsimError, RecordError, StopRun, WorkerError
    from fedsim.processing import compress
    from fedsim.runs.result import Result, load_model, load_run
    from fedsim.runs.run import run
    from fedsim.runs.session import Session
    from fedsim.server import ServerOptimizer

# Module of each public name, read from the imports above, which only type checkers execute.
MODULE_OF = {
    alias.name: str(statement.module)
    for block in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    if isinstance(block, ast.If)
    for statement in block.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = [  # a list that editors and type checkers can read
    "Callback",
    "Comparison",
    "CustomSubset",
    "DataError",
    "Draws",
    "Experiment",
    "ExperimentError",
    "FedsimError",
    "Heterogeneity",
    "Layout",
    "RecordError",
    "Result",
    "ServerOptimizer",
    "Session",
    "StopRun",
    "TensorData",
    "WorkerError",
    "__version__",
    "aggregate",
    "attack",
    "bind",
    "compare",
    "components",
    "compress",
    "dataset_split",
    "heterogeneity",
    "label_counts",
    "load_comparison",
    "load_dataset",
    "load_experiment",
    "load_model",
    "load_run",
    "new_rows",
    "partition",
    "partition_transforms",
    "plot",
    "plot_partition",
    "pre_aggregate",
    "pull_down",
    "run",
    "test",
    "train_epoch",
]


def __getattr__(name: str) -> Any:
    """Import a public name or a module of the package on first use."""
    if name in MODULE_OF:
        value = globals()[name] = getattr(importlib.import_module(MODULE_OF[name]), name)
        return value
    if name.startswith("_"):  # a tool asks, such as pytest, and needs no hint
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    path = f"fedsim.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module exists, but a package that it needs is missing
            raise
    raise _attribute_error(name)


def _attribute_error(name: str) -> AttributeError:
    """Return the error for a missing name, with a hint: a similar function, or the setting to use."""
    import fedsim.config.experiment  # noqa: F401  # defines what the names of components mean
    from fedsim.config.listing import KINDS
    from fedsim.hints.attributes import attribute_error
    from fedsim.hints.meanings import nearest_key

    if (kind := name.removeprefix("list_").replace("_", "-")) in KINDS:
        return AttributeError(f"module 'fedsim' has no attribute {name!r}; write fedsim.components(\"{kind}\")")
    setting = nearest_key(name, [], "")
    otherwise = f"in the settings of fedsim.run, {setting}" if setting.startswith("write ") else ""
    return attribute_error("module 'fedsim'", name, __all__, otherwise)


def __dir__() -> list[str]:
    return list(__all__)
