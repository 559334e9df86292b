"""Partition strategies, which assign a data set's samples to workers."""

from fedsim.data.partitions import dirichlet, features, given, labels, sizes, virtual  # noqa: F401  (registers the strategies)
from fedsim.data.partitions.base import (
    Transform,
    partition,
    partition_shards,
    partition_strategy,
    partition_transforms,
    transforms_of_workers,
)
from fedsim.data.partitions.population import DrawnShards, ListedShards, Shards, hold_out

__all__ = [
    "DrawnShards",
    "ListedShards",
    "Shards",
    "Transform",
    "hold_out",
    "partition",
    "partition_shards",
    "partition_strategy",
    "partition_transforms",
    "transforms_of_workers",
]
