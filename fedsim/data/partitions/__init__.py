"""Partition strategies: who holds which samples."""

from fedsim.data.partitions.dirichlet import dirichlet, dirichlet_workers
from fedsim.data.partitions.features import FeatureNoise, FeatureRotation, GaussianNoise, Rotation
from fedsim.data.partitions.labels import label_k, shards, similarity
from fedsim.data.partitions.sizes import contiguous, iid, natural, quantity
from fedsim.data.partitions.strategy import Transform, partition, partition_strategy, partition_transforms

__all__ = [
    "FeatureNoise",
    "FeatureRotation",
    "GaussianNoise",
    "Rotation",
    "Transform",
    "contiguous",
    "dirichlet",
    "dirichlet_workers",
    "iid",
    "label_k",
    "natural",
    "partition",
    "partition_strategy",
    "partition_transforms",
    "quantity",
    "shards",
    "similarity",
]
