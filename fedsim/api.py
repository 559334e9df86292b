"""The public names of fedsim; each is imported from its module on first use."""

# ruff: noqa: F401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.aggregation import aggregate, pre_aggregate
    from fedsim.byzantine import attack
    from fedsim.comparison import Comparison, compare, load_comparison, plot
    from fedsim.config.experiment import Experiment
    from fedsim.config.load import load_experiment
    from fedsim.config.plugs import (
        attacks,
        noises,
        partitions,
        policies,
        pre_aggregators,
        processors,
        rules,
        server_optimizers,
        speeds,
    )
    from fedsim.core.randomness import Draws
    from fedsim.core.rows import Layout, bind, new_rows, pull_down
    from fedsim.core.training import test, train_epoch
    from fedsim.data import (
        CustomSubset,
        Heterogeneity,
        TensorData,
        dataset_split,
        draw_partition,
        label_counts,
        load_dataset,
        partition,
        partition_transforms,
    )
    from fedsim.data.heterogeneity import heterogeneity
    from fedsim.errors import DataError, ExperimentError, FedsimError, RecordError, StopRun, WorkerError
    from fedsim.runs.run import Result, run
    from fedsim.runs.session import Session
    from fedsim.runs.stored_run import load_model, load_run
    from fedsim.server import ServerOptimizer

MODULES = {  # public names by the module that defines them
    "aggregation": "aggregate pre_aggregate",
    "byzantine": "attack",
    "comparison": "Comparison compare load_comparison plot",
    "config.experiment": "Experiment",
    "config.load": "load_experiment",
    "config.plugs": "attacks noises partitions policies pre_aggregators processors rules server_optimizers speeds",
    "core.randomness": "Draws",
    "core.rows": "Layout bind new_rows pull_down",
    "core.training": "test train_epoch",
    "data": "CustomSubset Heterogeneity TensorData dataset_split draw_partition label_counts load_dataset partition "
    "partition_transforms",
    "data.heterogeneity": "heterogeneity",
    "errors": "DataError ExperimentError FedsimError RecordError StopRun WorkerError",
    "runs.run": "Result run",
    "runs.session": "Session",
    "runs.stored_run": "load_model load_run",
    "server": "ServerOptimizer",
}
MODULE_OF = {name: f"fedsim.{module}" for module, names in MODULES.items() for name in names.split()}

__all__ = [*MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module 'fedsim.api' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(MODULE_OF[name]), name)
    return value
