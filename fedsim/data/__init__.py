"""Data sets as tensors, workers' subsets of them, and the strategies that cut them up."""

from fedsim.data.partitions import partition, partition_strategy
from fedsim.data.sources import dataset, load_dataset
from fedsim.data.subsets import CustomSubset, dataset_split
from fedsim.data.tensors import TensorData, as_tensor_data

__all__ = [
    "CustomSubset",
    "TensorData",
    "as_tensor_data",
    "dataset",
    "dataset_split",
    "load_dataset",
    "partition",
    "partition_strategy",
]
