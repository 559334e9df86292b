"""Data sets as tensors, workers' subsets of them, and partition strategies."""

from fedsim.data import synthetic  # noqa: F401  (registers the data set)
from fedsim.data.formats import arrays, huggingface, image_folder, leaf, tables, text  # noqa: F401  (registers data sets)
from fedsim.data.heterogeneity import Heterogeneity, draw_partition, label_counts
from fedsim.data.partitions import (
    ListedShards,
    Shards,
    hold_out,
    partition,
    partition_shards,
    partition_strategy,
    partition_transforms,
    transforms_of_workers,
)
from fedsim.data.sources import dataset, load_dataset
from fedsim.data.subsets import CustomSubset, dataset_split
from fedsim.data.tensors import TensorData, as_tensor_data

__all__ = [
    "CustomSubset",
    "Heterogeneity",
    "ListedShards",
    "Shards",
    "TensorData",
    "as_tensor_data",
    "dataset",
    "dataset_split",
    "draw_partition",
    "hold_out",
    "label_counts",
    "load_dataset",
    "partition",
    "partition_shards",
    "partition_strategy",
    "partition_transforms",
    "transforms_of_workers",
]
