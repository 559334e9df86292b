"""The public names of fedsim, imported all at once; `fedsim/__init__.py` offers them on first use."""

# ruff: noqa: F401

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
from fedsim.randomness import Draws
from fedsim.rows import Layout, bind, new_rows, pull_down
from fedsim.runs.running import Result, run
from fedsim.training import test, train_epoch
from fedsim.workshop import Workshop
