"""The registry of partition strategies, and the checks that every partition must pass.

A strategy is a function that returns a list of index arrays, one per worker. Its positional parameters may have these
names: labels [n], n_workers, rng (for all random draws), ids (dict from column name to the owners [n]), and by_class
(one array of ascending sample indices per class). Its keyword-only parameters are its configuration. Each index in
range(n) must occur in exactly one shard, and no shard may be empty. A strategy registered with `covers=False` may leave
samples out. A strategy registered with `whole=True` returns indices of samples in the whole data set. Those that are
held out for validation are then dropped from its shards.

A strategy with a parameter `worker` is VIRTUAL: it returns the index array of one worker, and receives a separate `rng`
for each worker. The function is called only when a shard is needed, so the number of workers is not limited. Shards may
overlap and need not cover the data. A virtual strategy that is a dataclass may have a method `size(worker)`, which
returns the shard's length without drawing the shard, and an attribute `equal_sizes = True` if all shards have the same
length.

A strategy that also changes samples is a frozen dataclass: its fields are the parameters, `__call__` is the function
described above, and `transforms(n_workers)` returns a sequence of one Transform (or None) per worker.

A strategy that determines the number of workers, if the experiment does not set it, is a frozen dataclass with a method
`count_workers(ids)`, where `ids()` returns the columns of owners of the training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.core.learning_task import described
from fedsim.core.randomness import numpy_generator
from fedsim.core.registry import Registry
from fedsim.data.partitions.allocation import has_classes, label_array, samples_by_class
from fedsim.data.partitions.ids import Ids, id_columns
from fedsim.data.partitions.population import DrawnShards, ListedShards, Shards, as_indices
from fedsim.errors import ExperimentError, show
from fedsim.hints.attributes import takes_component

partition_strategy = Registry(
    "partition strategy", inputs=("labels", "n_workers", "rng", "ids", "worker", "by_class"), traits=("covers", "whole")
)

Transform = Callable[..., Tensor]  # maps `images` [batch, ...] to the same shape; may accept `draws` or `generator`


@takes_component("partition", n_workers="workers", ids="data.ids")
def partition(
    labels: Sequence[int] | np.ndarray | Tensor,
    name: str,
    n_workers: int,
    *,
    seed: int = 0,
    ids: Ids = None,
    **params: Any,
) -> list[np.ndarray]:
    """Split a data set's samples into one shard per worker.

    Args:
        labels: class label of every sample, [n], on any device. Strategies that do not need classes accept any targets
            [n, ...].
        name: the strategy: a registered name (see `fedsim.components("partitions")`), "package.module:function", or
            a function.
        n_workers: number of shards, 1 <= n_workers <= n (no upper limit for a virtual strategy).
        seed: seed for all random draws.
        ids: the owner (writer or user) of each sample, [n], numbers or strings, for strategies that need owners.
            Several columns of owners are passed as a dict by name.
        params: parameters of the strategy.

    Returns one int64 index array per worker. Every sample is in exactly one shard, and no shard is empty. There is one
    exception: a virtual strategy draws each shard independently, so that shards may overlap or leave samples out.
    `partition_shards` draws such shards on demand.

    Raises ExperimentError (a ValueError) for an unknown strategy, an invalid parameter, more workers than samples, or
    if no partition satisfies the parameters.

    In a run: `fedsim.rounds.participants.shards_of` calls `partition_shards`.

    >>> labels = np.arange(8) % 4
    >>> fedsim.partition(labels, "contiguous", 2)
    [array([0, 1, 2, 3]), array([4, 5, 6, 7])]
    >>> [len(shard) for shard in fedsim.partition(labels, "dirichlet", 2, seed=1, alpha=1.0)]
    [2, 6]
    """
    shards = partition_shards(labels, name, n_workers, seed=seed, ids=ids, **params)
    return [shards.of(worker).numpy() for worker in range(len(shards))]


def partition_shards(
    labels: Sequence[int] | np.ndarray | Tensor,
    name: str,
    n_workers: int,
    *,
    seed: int = 0,
    ids: Ids = None,
    index_of: np.ndarray | None = None,
    **params: Any,
) -> Shards:
    """Split a data set's samples like `partition`, but return a `Shards` object, from which shards are read one by one.

    Shards of a virtual strategy are drawn on demand, so errors in such a shard are raised only then.

    If samples of the data set are held out, `labels` contains only the labels of the other samples. `index_of` [N] then
    maps each index in the whole data set, as a strategy such as `given` uses, to an index in `labels`, or to -1.

    >>> shards = fedsim.data.partition_shards(np.arange(100) % 10, "virtual", 10**6, samples=5)
    >>> len(shards), shards.size(999_999)
    (1000000, 5)
    """
    registration = partition_strategy.get(name, "partition.name")
    params = registration.check(params, "partition", beside=["name"])
    virtual = "worker" in registration.takes
    labels = labels.cpu() if isinstance(labels, Tensor) else label_array(labels)
    targets, ids = np.asarray(labels), id_columns(ids)
    _check_input(targets, n_workers, virtual)
    _check_needs(name, registration.takes, targets, ids)
    if virtual:
        return DrawnShards(name, registration.bind(params), registration.takes, n_workers, labels, ids, seed=seed)
    values = {"labels": targets, "n_workers": n_workers, "rng": numpy_generator(seed, "partition"), "ids": ids}
    if "by_class" in registration.takes:
        values["by_class"] = samples_by_class(targets) if has_classes(targets) else None
    shards = registration.bind(params)(**registration.select_inputs(**values))
    shards = [as_indices(shard, worker, name) for worker, shard in enumerate(shards)]
    if not getattr(registration.target, "whole", False):
        index_of = None
    n = len(targets) if index_of is None else len(index_of)
    _check_shards(shards, n, n_workers, name, covers=getattr(registration.target, "covers", True))
    return ListedShards.of_arrays(shards if index_of is None else _without_held_out(shards, index_of, name))


def _without_held_out(shards: list[np.ndarray], index_of: np.ndarray, strategy: str) -> list[np.ndarray]:
    """Drop the held-out samples from shards of the whole data set, and return indices among the remaining samples.

    `index_of` [N] maps each index in the whole data set to an index among the remaining samples, or to -1.

    Raises ExperimentError if all samples of a worker are held out.
    """
    kept = [index_of[shard][index_of[shard] >= 0] for shard in shards]
    if empty := [worker for worker, shard in enumerate(kept) if not len(shard)]:
        raise ExperimentError(
            f'partition.name = "{strategy}": all samples of worker {empty[0]} are held out for validation; use a '
            "smaller data.validation_fraction, or give this worker more samples"
        )
    return kept


@takes_component("partition", n_workers="workers")
def partition_transforms(name: str, n_workers: int, **params: Any) -> list[Transform | None]:
    """Return the input transform that a partition strategy defines for each worker (None: inputs are unchanged).

    A transform maps `images` [batch, ...] to images of the same shape, like an augmentation. A random transform has a
    parameter `draws` or `generator`. Transforms can be pickled and work on any device.

    Raises ExperimentError for an unknown strategy or an invalid parameter.

    >>> fedsim.partition_transforms("feature_rotation", 2, groups=2)
    [None, Rotation(degrees=180.0)]
    """
    transforms = transforms_of_workers(name, n_workers, **params)
    return [None] * n_workers if transforms is None else list(transforms)


def transforms_of_workers(name: str, n_workers: int, **params: Any) -> Sequence[Transform | None] | None:
    """Return a partition strategy's input transforms, one per worker, or None if the strategy defines no transforms."""
    registration = partition_strategy.get(name, "partition.name")
    bound = registration.bind(registration.check(params, "partition", beside=["name"]))
    transforms = getattr(bound, "transforms", None)
    return None if transforms is None else transforms(n_workers)


def _check_input(labels: np.ndarray, n_workers: int, virtual: bool) -> None:
    if not labels.ndim:
        raise ExperimentError("labels: must be an array with one label per sample, [n]; got a single number")
    if not isinstance(n_workers, Integral) or isinstance(n_workers, bool):
        raise ExperimentError(f"workers = {show(n_workers)}: must be a whole number")
    if virtual and n_workers < 1:
        raise ExperimentError(f"workers = {n_workers}: must be at least 1")
    if not virtual and not 1 <= n_workers <= len(labels):
        raise ExperimentError(f"workers = {n_workers}: must be between 1 and the number of samples, {len(labels)}")


def _check_needs(strategy: str, takes: Mapping[str, bool], targets: np.ndarray, ids: Mapping[str, np.ndarray]) -> None:
    """Raise ExperimentError if the strategy needs owners or class labels that the data set does not have.

    `takes` maps the strategy's inputs, such as "ids", to whether they are required.
    """
    for column in ids.values():
        if column.shape != (len(targets),):
            raise ExperimentError(
                f"ids: must be one-dimensional with one id per sample, [{len(targets)}]; got shape {column.shape}"
            )
    if not ids and takes.get("ids"):
        raise ExperimentError(
            f'partition.name = "{strategy}": needs the writer or user of each sample, which this data set does not '
            "contain; use another partition, or pass `ids`"
        )
    if takes.get("by_class") and not has_classes(targets):
        raise ExperimentError(
            f'partition.name = "{strategy}": needs one class label per sample, but the targets are '
            f"{described(targets)}; convert class labels to integers, or "
            "use a strategy that ignores the targets, such as iid"
        )


def _check_shards(shards: list[np.ndarray], n_samples: int, n_workers: int, strategy: str, *, covers: bool) -> None:
    """Raise ExperimentError unless the shards are disjoint and not empty, and cover all samples if `covers` is true."""
    where = f'partition.name = "{strategy}"'
    if len(shards) != n_workers:
        raise ExperimentError(
            f"{where}: the strategy returned {len(shards)} shards for {n_workers} workers; it must return one shard "
            "per worker"
        )
    if empty := [worker for worker, shard in enumerate(shards) if not len(shard)]:
        raise ExperimentError(
            f"{where}: worker {empty[0]} got no samples (number of workers without samples: {len(empty)}); "
            "every worker needs at least one"
        )
    assigned = np.concatenate(shards)
    if len(wrong := assigned[(assigned < 0) | (assigned >= n_samples)]):
        raise ExperimentError(
            f"{where}: the strategy returned index {wrong[0]}; valid indices are 0 to {n_samples - 1}"
        )
    distinct = len(np.unique(assigned))
    if distinct < len(assigned) or (covers and distinct < n_samples):
        raise ExperimentError(
            f"{where}: must assign each of the {n_samples} samples to {'exactly' if covers else 'at most'} one worker; "
            f"the strategy returned {len(assigned)} indices, {distinct} of them distinct"
        )
