"""Simulate N workers of distributed or federated SGD on one GPU, or one CPU.

    import fedsim
    result = fedsim.run({"workers": 8, "rounds": 5})

`fedsim.run` runs an experiment; the other names are the pieces it is made of, for use by themselves.
"""

from fedsim.aggregation import aggregate
from fedsim.comparison import Comparison, compare
from fedsim.data import CustomSubset, TensorData, dataset_split, load_dataset, partition
from fedsim.errors import DataError, ExperimentError, FedsimError, RecordError, WorkerError
from fedsim.experiment import Experiment
from fedsim.loading import load_experiment
from fedsim.rows import Layout, bind, new_rows, pull_down
from fedsim.simulation import Result, run
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
    "Layout",
    "RecordError",
    "Result",
    "TensorData",
    "WorkerError",
    "Workshop",
    "__version__",
    "aggregate",
    "bind",
    "compare",
    "dataset_split",
    "load_dataset",
    "load_experiment",
    "new_rows",
    "partition",
    "pull_down",
    "run",
    "test",
    "train_epoch",
]
