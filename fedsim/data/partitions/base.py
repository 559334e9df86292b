"""Partition strategies: their registry, and the checks of every partition.

A strategy is a function that returns a list of index arrays, one per worker. Its positional parameters receive by name:
labels [n], n_workers, rng (all its draws), ids (columns [n] by name), and by_class (the ascending indices of each
class); its keyword-only parameters are its configuration. Every result must be an exact disjoint cover of range(n)
without an empty shard. A strategy that is registered with `covers=False` may leave samples out.

A strategy that accepts `worker` is VIRTUAL: it returns the index array of this worker, and `rng` is the worker's own.
It is called when a shard is needed, so the number of workers is not limited; shards may overlap and need not cover the
data. A virtual strategy that is a dataclass may have a method `size(worker)`, the length of the array, which saves
draws, and `equal_sizes = True`, which says that all arrays have this length.

A strategy that also changes samples is a frozen dataclass: its fields are the parameters, `__call__` is the function
above, and `transforms(n_workers)` returns a sequence of one Transform (or None) per worker.

A strategy that decides the number of workers, if the experiment leaves it out, is a frozen dataclass with a method
`count_workers(ids)`, where `ids()` returns the columns of the training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.core.learning_task import described
from fedsim.core.randomness import numpy_generator
from fedsim.core.registry import Registry
from fedsim.data.partitions.allocation import has_classes, samples_by_class
from fedsim.data.partitions.ids import Ids, id_columns
from fedsim.data.partitions.population import DrawnShards, ListedShards, Shards
from fedsim.errors import ExperimentError, show

partition_strategy = Registry(
    "partition strategy",
    inputs=("labels", "n_workers", "rng", "ids", "worker", "by_class"),
    traits=("covers",),
)

Transform = Callable[..., Tensor]  # like an augmentation, of images [batch, ...] and `draws` or `generator`


def partition(
    labels: Sequence[int] | np.ndarray,
    n_workers: int,
    strategy: str = "contiguous",
    seed: int = 0,
    *,
    ids: Ids = None,
    **params: Any,
) -> list[np.ndarray]:
    """Cut samples into one shard per worker.

    Args:
        labels: target of every sample, [n]: class labels, or numbers [n, ...] for strategies that need no classes.
        n_workers: number of shards, 1 <= n_workers <= n (for a virtual strategy any number).
        strategy: a registered name, "package.module:function", or a function.
        seed: of all random draws.
        ids: the owner of each sample (its writer or user), numbers or strings [n], for strategies that need them; or
            several such columns by name.
        params: parameters of the strategy.

    Returns int64 index arrays, one per worker: an exact disjoint cover of range(n), none empty. Shards of a virtual
    strategy may overlap and leave samples out; `partition_shards` draws them when they are needed.

    Raises ExperimentError (a ValueError) for an unknown strategy, a wrong parameter, more workers than samples, or if
    no such partition exists or was found.

    >>> labels = np.arange(8) % 4
    >>> fedsim.partition(labels, 2, "contiguous")
    [array([0, 1, 2, 3]), array([4, 5, 6, 7])]
    >>> [len(shard) for shard in fedsim.partition(labels, 2, "dirichlet", seed=1, alpha=1.0)]
    [2, 6]
    """
    shards = partition_shards(labels, n_workers, strategy, seed, ids=ids, **params)
    return [shards.of(worker).numpy() for worker in range(len(shards))]


def partition_shards(
    labels: Sequence[int] | np.ndarray | Tensor,
    n_workers: int,
    strategy: str = "contiguous",
    seed: int = 0,
    *,
    ids: Ids = None,
    **params: Any,
) -> Shards:
    """Like `partition`, but returns an object from which single shards are read; virtual shards are drawn on demand.

    Errors in a virtual shard are raised when it is drawn.

    >>> shards = fedsim.data.partition_shards(np.arange(100) % 10, 10**6, "virtual", samples=5)
    >>> len(shards), shards.size(999_999)
    (1000000, 5)
    """
    registration = partition_strategy.get(strategy, "partition.name")
    params = registration.check(params, "partition", beside=["name"])
    virtual = "worker" in registration.takes
    _check_input(np.asarray(labels), n_workers, virtual)
    ids = id_columns(ids)
    for column in ids.values():
        if len(column) != len(labels) or column.ndim != 1:
            raise ExperimentError(f"ids: must be [{len(labels)}], one for each sample, not of shape {column.shape}")
    if not ids and registration.takes.get("ids"):
        raise ExperimentError(
            f'partition.name = "{strategy}": needs the owner of each sample, which this data set does not have; '
            "give `ids`, one for each sample"
        )
    if registration.takes.get("by_class") and not has_classes(np.asarray(labels)):
        raise ExperimentError(
            f'partition.name = "{strategy}": needs class labels, one for each sample, and the targets are '
            f"{described(np.asarray(labels))}; use a strategy that needs none, such as iid or contiguous"
        )
    if virtual:
        label_array = labels if isinstance(labels, Tensor) else np.asarray(labels)
        return DrawnShards(strategy, registration.bind(params), registration.takes, n_workers, seed, label_array, ids)
    labels = np.asarray(labels)
    values = {"labels": labels, "n_workers": n_workers, "rng": numpy_generator(seed, "partition"), "ids": ids}
    if "by_class" in registration.takes:
        values["by_class"] = samples_by_class(labels) if has_classes(labels) else None
    shards = registration.bind(params)(**registration.select_inputs(**values))
    shards = [np.asarray(shard, dtype=np.int64) for shard in shards]
    _check_shards(shards, len(labels), n_workers, strategy, covers=getattr(registration.target, "covers", True))
    return ListedShards.of_arrays(shards)


def partition_transforms(n_workers: int, strategy: str, **params: Any) -> list[Transform | None]:
    """How each worker sees its samples under a strategy: one transform per worker, None for no change.

    A transform maps `images` [batch, ...] to images of the same shape, like an augmentation; a random one accepts
    `draws` or `generator`. It can be pickled, and works on any device.

    Raises ExperimentError for an unknown strategy or a wrong parameter.

    >>> fedsim.partition_transforms(2, "feature_rotation", groups=2)
    [None, Rotation(degrees=180.0)]
    """
    transforms = transforms_of_workers(n_workers, strategy, **params)
    return [None] * n_workers if transforms is None else list(transforms)


def transforms_of_workers(n_workers: int, strategy: str, **params: Any) -> Sequence[Transform | None] | None:
    """Return the sequence of per-worker input transforms that a strategy defines, or None."""
    registration = partition_strategy.get(strategy, "partition.name")
    bound = registration.bind(registration.check(params, "partition", beside=["name"]))
    transforms = getattr(bound, "transforms", None)
    return None if transforms is None else transforms(n_workers)


def _check_input(labels: np.ndarray, n_workers: int, virtual: bool) -> None:
    if not labels.ndim:
        raise ExperimentError(f"labels: must be [n], one for each sample, not of shape {labels.shape}")
    if not isinstance(n_workers, Integral) or isinstance(n_workers, bool):
        raise ExperimentError(f"workers = {show(n_workers)}: must be a whole number")
    if virtual and n_workers < 1:
        raise ExperimentError(f"workers = {n_workers}: must be at least 1")
    if not virtual and not 1 <= n_workers <= len(labels):
        raise ExperimentError(f"workers = {n_workers}: must be between 1 and the number of samples, {len(labels)}")


def _check_shards(shards: list[np.ndarray], n_samples: int, n_workers: int, strategy: str, *, covers: bool) -> None:
    """Raise ExperimentError unless the shards are disjoint and not empty, and cover all samples if `covers` is true."""
    where = f'partition.name = "{strategy}"'
    if len(shards) != n_workers:
        raise ExperimentError(f"{where}: gave {len(shards)} shards for {n_workers} workers")
    empty = [worker for worker, shard in enumerate(shards) if not len(shard)]
    if empty:
        raise ExperimentError(f"{where}: leaves worker {empty[0]} without a sample ({len(empty)} such workers)")
    held = np.concatenate(shards)
    if held.min() < 0 or held.max() >= n_samples:
        wrong = held[(held < 0) | (held >= n_samples)][0]
        raise ExperimentError(f"{where}: returned index {wrong}; valid indices are 0 to {n_samples - 1}")
    distinct = len(np.unique(held))
    if distinct < len(held) or (covers and distinct < n_samples):
        times = "exactly" if covers else "at most"
        raise ExperimentError(
            f"{where}: must give each of {n_samples} samples to {times} one worker; it gave {len(held)}, "
            f"{distinct} of them distinct"
        )
