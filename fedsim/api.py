"""The public names of fedsim, imported all at once; `fedsim/__init__.py` offers them on first use."""

# ruff: noqa: F401

from fedsim.aggregation import aggregate, pre_aggregate
from fedsim.byzantine import attack
from fedsim.comparison import Comparison, compare
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
from fedsim.errors import DataError, ExperimentError, FedsimError, RecordError, WorkerError
from fedsim.runs.run import Result, run
from fedsim.runs.session import Session
from fedsim.server import ServerOptimizer
