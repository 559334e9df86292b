"""Partition strategies, which assign samples to workers."""

from fedsim.data.partitions.base import (
    Transform,
    partition,
    partition_shards,
    partition_strategy,
    partition_transforms,
    transforms_of_workers,
)
from fedsim.data.partitions.dirichlet import dirichlet, dirichlet_workers
from fedsim.data.partitions.features import FeatureNoise, FeatureRotation, GaussianNoise, Rotation
from fedsim.data.partitions.labels import label_k, shards, similarity
from fedsim.data.partitions.population import DrawnShards, ListedShards, Shards, hold_out
from fedsim.data.partitions.sizes import contiguous, iid, natural, quantity
from fedsim.data.partitions.virtual import Virtual

__all__ = [
    "DrawnShards",
    "FeatureNoise",
    "FeatureRotation",
    "GaussianNoise",
    "ListedShards",
    "Rotation",
    "Shards",
    "Transform",
    "Virtual",
    "contiguous",
    "dirichlet",
    "dirichlet_workers",
    "hold_out",
    "iid",
    "label_k",
    "natural",
    "partition",
    "partition_shards",
    "partition_strategy",
    "partition_transforms",
    "quantity",
    "shards",
    "similarity",
    "transforms_of_workers",
]
