"""Use partitioners of Flower Datasets as fedsim partitions, and fedsim's partition strategies in Flower Datasets."""

# ruff: noqa: E402  (the package is checked before it is imported)

from __future__ import annotations

import inspect
import warnings
from functools import cached_property
from typing import Any

import numpy as np

from fedsim.data.partitions import Shards, Transform, partition_shards, partition_strategy, transforms_of_workers
from fedsim.errors import ExperimentError, SettingWarning, one_line, show
from fedsim.hints.meanings import nearest
from fedsim.system.packages import import_extra

import_extra("flwr_datasets", extra="flower", purpose="fedsim.integrations.flower_datasets")

import flwr_datasets.partitioner
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner


def flower_partition(
    labels: np.ndarray,
    n_workers: int,
    rng: np.random.Generator,
    ids: np.ndarray | None = None,
    *,
    partitioner: str,
    **arguments: Any,
) -> list[np.ndarray]:
    """Partition samples with a partitioner of Flower Datasets.

        fedsim.partition(labels, flower_partition, 10, partitioner="DirichletPartitioner", alpha=0.5)
        fedsim run partition=fedsim.integrations.flower_datasets:flower_partition \\
            partition.partitioner=DirichletPartitioner partition.alpha=0.5

    The partitioner receives a data set with the columns "label", "index" and, if `ids` are known, "id".

    Args:
        labels: class label of every sample, [n].
        n_workers: number of shards.
        rng: random generator that draws the partitioner's seed, unless `seed` is given.
        ids: the writer or user of each sample, [n], if known.
        partitioner: name of a class in `flwr_datasets.partitioner`.
        arguments: arguments of this class. The defaults are: `num_partitions` is the number of workers, `seed` is drawn
            from the seed of the partition, and `partition_by` is "label".

    Returns one index array per worker. Raises ExperimentError if the class is unknown, if its arguments are invalid, or
    if the partitioner splits columns or does not return one partition per worker.
    """
    names = [name for name in flwr_datasets.partitioner.__all__ if name != "Partitioner"]
    where = f"partition.partitioner = {show(partitioner)}"
    if partitioner not in names:
        raise ExperimentError(f"{where}: no such class in flwr_datasets.partitioner; {nearest(partitioner, names)}")
    kind = getattr(flwr_datasets.partitioner, partitioner)
    defaults = {"num_partitions": n_workers, "seed": int(rng.integers(2**31)), "partition_by": "label"}
    known = inspect.signature(kind).parameters
    columns = {"label": labels, "index": np.arange(len(labels))} | ({} if ids is None else {"id": ids})
    try:
        instance = kind(**{name: value for name, value in defaults.items() if name in known} | arguments)
        instance.dataset = Dataset.from_dict(columns)
        count = instance.num_partitions
        parts = [instance.load_partition(worker) for worker in range(count)]
    except Exception as error:  # the partitioners raise many types, including AssertionError
        raise ExperimentError(f"{where}: the partitioner failed: {one_line(error)}") from error
    if count != n_workers:
        raise ExperimentError(
            f"{where}: returned {count} partitions for {n_workers} workers; it must return one partition per worker"
        )
    if any("index" not in part.column_names for part in parts):
        raise ExperimentError(f"{where}: splits columns instead of samples; use another partitioner")
    return [np.asarray(part["index"][:]) for part in parts]


class FedsimPartitioner(Partitioner):
    """A Flower Datasets partitioner that uses one of fedsim's partition strategies.

        partitioner = FedsimPartitioner(10, "dirichlet", alpha=0.3)
        FederatedDataset(dataset="mnist", partitioners={"train": partitioner}).load_partition(0)

    The partitions are those of `fedsim.partition(labels, name, num_partitions, seed=seed, **params)`.

    Args:
        num_partitions: number of partitions (workers).
        name: partition strategy, as in `fedsim.partition`.
        seed: seed for the strategy's random draws.
        params: parameters of the strategy.
        partition_by: name of the label column; None for strategies that need no labels.
        ids_by: name of the column with the writer or user of each sample, for `natural`.

    Raises ExperimentError (a ValueError) for an unknown strategy or an invalid parameter. `load_partition` raises
    the same error if no partition satisfies the parameters. Warns (SettingWarning) if the strategy also changes
    samples; see `transform`.
    """

    def __init__(
        self,
        num_partitions: int,
        name: str = "iid",
        *,
        partition_by: str | None = "label",
        ids_by: str | None = None,
        seed: int = 0,
        **params: Any,
    ) -> None:
        super().__init__()
        partition_strategy.get(name, "name").check(params)
        self._num_partitions, self._name, self._seed, self._params = num_partitions, name, seed, params
        self._partition_by, self._ids_by = partition_by, ids_by
        self._transforms = transforms_of_workers(name, num_partitions, **params)
        if self._transforms is not None:
            line = f"{name} also changes samples; apply transform(partition_id) to the images of each partition"
            warnings.warn(line, SettingWarning, stacklevel=2)

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the samples of partition number `partition_id`, from 0 to num_partitions - 1, as a Dataset."""
        if not 0 <= partition_id < self._num_partitions:
            raise ExperimentError(
                f"partition_id = {show(partition_id)}: must be between 0 and {self._num_partitions - 1}"
            )
        return self.dataset.select(self._shards.of(partition_id).numpy())

    def transform(self, partition_id: int) -> Transform | None:
        """Return the function that changes a partition's images [batch, ...], or None if they are not changed.

        Only strategies such as feature_noise and feature_rotation change images.
        """
        return None if self._transforms is None else self._transforms[partition_id]

    @cached_property
    def _shards(self) -> Shards:
        ids = None if self._ids_by is None else self._column(self._ids_by)
        labels = np.zeros(self.dataset.num_rows) if self._partition_by is None else self._column(self._partition_by)
        if labels.dtype.kind in "OU":  # class names, as Python objects or strings
            labels = np.unique(labels, return_inverse=True)[1]
        return partition_shards(labels, self._name, self._num_partitions, seed=self._seed, ids=ids, **self._params)

    def _column(self, name: str) -> np.ndarray:
        if name not in self.dataset.column_names:
            raise ExperimentError(
                f"column {show(name)}: the data set has no such column; {nearest(name, self.dataset.column_names)}"
            )
        return np.asarray(self.dataset[name][:])
