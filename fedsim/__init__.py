"""Simulate N workers of distributed or federated SGD on one GPU, or one CPU.

    import fedsim
    result = fedsim.run({"workers": 8, "rounds": 5})

`fedsim.run` runs an experiment; the other names are the pieces it is made of, for use by themselves.
"""

from fedsim.aggregation import ServerOptimizer, aggregate, pre_aggregate
from fedsim.byzantine import attack
from fedsim.comparison import Comparison, compare
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
from fedsim.errors import DataError, ExperimentError, FedsimError, RecordError, WorkerError
from fedsim.experiment import Experiment
from fedsim.listing import attacks, noises, partitions, policies, pre_aggregators, rules, server_optimizers, speeds
from fedsim.loading import load_experiment
from fedsim.rows import Layout, bind, new_rows, pull_down
from fedsim.runs.running import Result, run
from fedsim.training import test, train_epoch
from fedsim.version import __version__
from fedsim.workshop import Workshop

__all__ = [
    "Comparison",
    "CustomSubset",
    "DataError",
    "Experiment",
    "ExperimentError",
    "FedsimError",
    "Heterogeneity",
    "Layout",
    "RecordError",
    "Result",
    "ServerOptimizer",
    "TensorData",
    "WorkerError",
    "Workshop",
    "__version__",
    "aggregate",
    "attack",
    "attacks",
    "bind",
    "compare",
    "dataset_split",
    "draw_partition",
    "heterogeneity",
    "label_counts",
    "load_dataset",
    "load_experiment",
    "new_rows",
    "noises",
    "partition",
    "partition_transforms",
    "partitions",
    "policies",
    "pre_aggregate",
    "pre_aggregators",
    "pull_down",
    "rules",
    "run",
    "server_optimizers",
    "speeds",
    "test",
    "train_epoch",
]
