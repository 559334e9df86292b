"""Cutting a data set up: the registry of partition strategies, and what every partition is held to.

A strategy is a function `(labels [n], n_workers, rng, ids [n], *, parameters) -> list of index arrays`, one per worker,
which may leave out what it does not need; all its draws come from `rng`. Every result is checked to be an exact
disjoint cover of range(n) without an empty shard. `by_class` is there too: the samples of each class, ascending.

A strategy that takes `worker` is VIRTUAL: it gives this one worker's index array, and its `rng` is that worker's. It is
called when a shard is asked for, so a population may be of any size; shards may overlap and need not cover the data.
One that is a dataclass may have `size(worker)`, the length of that array, which spares draws.

A strategy under which workers also see their samples differently is a frozen dataclass: its fields are the parameters,
`__call__` is the function above, and `transforms(n_workers)` gives a sequence of one Transform (or None) per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.data.partitions.dealing import samples_by_class
from fedsim.data.partitions.population import DrawnShards, ListedShards, Shards
from fedsim.errors import ExperimentError, show
from fedsim.randomness import numpy_generator
from fedsim.registry import Registry

partition_strategy = Registry("partition strategy", given=("labels", "n_workers", "rng", "ids", "worker", "by_class"))

Transform = Callable[..., Tensor]  # as an augmentation: takes images [batch, ...] and what it draws from, by name


def partition(
    labels: Sequence[int] | np.ndarray,
    n_workers: int,
    strategy: str = "contiguous",
    seed: int = 0,
    *,
    ids: Sequence[Any] | np.ndarray | None = None,
    **params: Any,
) -> list[np.ndarray]:
    """Cut samples into one shard per worker.

    Args:
        labels: class label of every sample, [n].
        n_workers: number of shards, 1 <= n_workers <= n (of a virtual strategy, any number).
        strategy: a registered name, or "package.module:function".
        seed: the draw is a pure function of it; nothing else is seeded or consumed.
        ids: whose sample each one is (writer, user), [n], numbers or strings; for strategies that go by it.
        params: the strategy's own parameters.

    Returns int64 index arrays, one per worker: an exact disjoint cover of range(n), none empty. Those of a virtual
    strategy may overlap and leave samples out; `partition_shards` draws them only when they are asked for.

    Raises ExperimentError (a ValueError) for an unknown strategy, a wrong parameter, more workers than samples, or
    parameters under which no such partition exists or none was found.
    """
    shards = partition_shards(labels, n_workers, strategy, seed, ids=ids, **params)
    return [shards.of(worker).numpy() for worker in range(len(shards))]


def partition_shards(
    labels: Sequence[int] | np.ndarray | Tensor,
    n_workers: int,
    strategy: str = "contiguous",
    seed: int = 0,
    *,
    ids: Sequence[Any] | np.ndarray | None = None,
    **params: Any,
) -> Shards:
    """The same as an object that gives one worker's shard; under a virtual strategy, drawn when it is asked for.

    Arguments and errors as of `partition`, but what is wrong with a virtual shard shows when that is drawn.
    """
    plug = partition_strategy.get(strategy, "partition.strategy")
    params = plug.check(params, "partition", beside=["strategy"])
    virtual = "worker" in plug.takes
    _check_input(np.asarray(labels), n_workers, virtual)
    if ids is not None:
        ids = np.asarray(ids)
        if len(ids) != len(labels) or ids.ndim != 1:
            raise ExperimentError(f"ids: must be [{len(labels)}], one for each sample, not of shape {ids.shape}")
    elif plug.takes.get("ids"):
        raise ExperimentError(
            f'partition.strategy = "{strategy}": needs to know whose each sample is, and this data set does not say; '
            "give `ids`, one for each sample"
        )
    if virtual:
        kept = labels if isinstance(labels, Tensor) else np.asarray(labels)
        return DrawnShards(strategy, plug.bind(params), plug.takes, n_workers, seed, kept, ids)
    labels = np.asarray(labels)
    menu = {"labels": labels, "n_workers": n_workers, "rng": numpy_generator(seed, "partition"), "ids": ids}
    if "by_class" in plug.takes:
        menu["by_class"] = samples_by_class(labels)
    shards = plug.bind(params)(**plug.given(**menu))
    shards = [np.asarray(shard, dtype=np.int64) for shard in shards]
    _check_cover(shards, len(labels), n_workers, strategy)
    return ListedShards.of_arrays(shards)


def partition_transforms(n_workers: int, strategy: str, **params: Any) -> list[Transform | None]:
    """How each worker sees its samples under a strategy: one transform per worker, None for one that changes nothing.

    A transform maps `images` [batch, ...] to images of the same shape, as an augmentation does. One that draws takes
    `draws`, or `generator`, by that name, and draws from that alone. A transform pickles, and works on any device.

    Raises ExperimentError for an unknown strategy or a wrong parameter.
    """
    transforms = transforms_of_workers(n_workers, strategy, **params)
    return [None] * n_workers if transforms is None else list(transforms)


def transforms_of_workers(n_workers: int, strategy: str, **params: Any) -> Sequence[Transform | None] | None:
    """The same as the sequence that the strategy gives, which may be a lazy one; None where it gives none."""
    plug = partition_strategy.get(strategy, "partition.strategy")
    bound = plug.bind(plug.check(params, "partition", beside=["strategy"]))
    transforms = getattr(bound, "transforms", None)
    return None if transforms is None else transforms(n_workers)


def _check_input(labels: np.ndarray, n_workers: int, virtual: bool) -> None:
    if labels.ndim != 1:
        raise ExperimentError(f"labels: must be [n], one for each sample, not of shape {labels.shape}")
    if not isinstance(n_workers, Integral) or isinstance(n_workers, bool):
        raise ExperimentError(f"workers = {show(n_workers)}: must be a whole number")
    if virtual and n_workers < 1:
        raise ExperimentError(f"workers = {n_workers}: must be at least 1")
    if not virtual and not 1 <= n_workers <= len(labels):
        raise ExperimentError(f"workers = {n_workers}: must be between 1 and the number of samples, {len(labels)}")


def _check_cover(shards: list[np.ndarray], n_samples: int, n_workers: int, strategy: str) -> None:
    where = f'partition.strategy = "{strategy}"'
    if len(shards) != n_workers:
        raise ExperimentError(f"{where}: gave {len(shards)} shards for {n_workers} workers")
    empty = [worker for worker, shard in enumerate(shards) if not len(shard)]
    if empty:
        raise ExperimentError(f"{where}: leaves worker {empty[0]} without a sample ({len(empty)} such workers)")
    held = np.concatenate(shards)
    if len(held) != n_samples or not np.array_equal(np.sort(held), np.arange(n_samples)):
        raise ExperimentError(
            f"{where}: must give each of {n_samples} samples to exactly one worker; it gave {len(held)}, "
            f"{len(np.unique(held))} of them distinct"
        )
