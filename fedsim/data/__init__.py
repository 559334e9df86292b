"""Data sets as tensors, each worker's subset of a data set, and partition strategies."""

from fedsim.data import synthetic  # noqa: F401  (registers the data set)
from fedsim.data.formats import arrays, huggingface, image_folder, images, leaf, tables, text  # noqa: F401  (registers the data sets)
from fedsim.data.heterogeneity import Heterogeneity, label_counts, plot_partition
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
from fedsim.data.torchvision_transforms import torchvision_transform as torchvision_transform  # registers a family

__all__ = [
    "CustomSubset",
    "Heterogeneity",
    "ListedShards",
    "Shards",
    "TensorData",
    "as_tensor_data",
    "dataset",
    "dataset_split",
    "hold_out",
    "label_counts",
    "load_dataset",
    "partition",
    "partition_shards",
    "partition_strategy",
    "partition_transforms",
    "plot_partition",
    "transforms_of_workers",
]
