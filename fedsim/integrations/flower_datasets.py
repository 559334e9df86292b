"""Partitioners of Flower Datasets as partitions of fedsim, and the reverse."""

# ruff: noqa: E402  (the package is checked before it is imported)

from __future__ import annotations

import inspect
import warnings
from functools import cached_property
from typing import Any

import numpy as np

from fedsim.core.suggestions import nearest
from fedsim.data.partitions import Shards, Transform, partition_shards, partition_strategy, transforms_of_workers
from fedsim.errors import ExperimentError, SettingWarning, one_line, show
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
    """Return a partition by a partitioner of Flower Datasets.

        fedsim.partition(labels, 10, flower_partition, partitioner="DirichletPartitioner", alpha=0.5)
        fedsim run partition=fedsim.integrations.flower_datasets:flower_partition \\
            partition.partitioner=DirichletPartitioner partition.alpha=0.5

    The partitioner gets a data set with the columns "label" and, if the data set has ids, "id".

    Args:
        labels: [n].
        partitioner: the name of a class of `flwr_datasets.partitioner`.
        arguments: of that class. By default `num_partitions` is the number of workers, `seed` is drawn from the seed of
            the partition, and `partition_by` is "label".

    Returns index arrays. Raises ExperimentError for an unknown class, wrong arguments, or a partitioner that cuts
    columns or makes another number of partitions.
    """
    names = [name for name in flwr_datasets.partitioner.__all__ if name != "Partitioner"]
    where = f"partition.partitioner = {show(partitioner)}"
    if partitioner not in names:
        raise ExperimentError(f"{where}: no such partitioner of flwr_datasets; {nearest(partitioner, names)}")
    kind = getattr(flwr_datasets.partitioner, partitioner)
    defaults = {"num_partitions": n_workers, "seed": int(rng.integers(2**31)), "partition_by": "label"}
    known = inspect.signature(kind).parameters
    columns = {"label": labels, "index": np.arange(len(labels))} | ({} if ids is None else {"id": ids})
    try:
        made = kind(**{name: value for name, value in defaults.items() if name in known} | arguments)
        made.dataset = Dataset.from_dict(columns)
        count = made.num_partitions
        parts = [made.load_partition(worker) for worker in range(count)]
    except Exception as error:  # assertions, and errors of several types
        raise ExperimentError(f"{where}: {one_line(error)}") from error
    if count != n_workers:
        raise ExperimentError(f"{where}: makes {count} partitions for {n_workers} workers")
    if any("index" not in part.column_names for part in parts):
        raise ExperimentError(f"{where}: cuts columns, not samples")
    return [np.asarray(part["index"][:]) for part in parts]


class FedsimPartitioner(Partitioner):
    """A partitioner of Flower Datasets by a partition of fedsim.

        partitioner = FedsimPartitioner(10, "dirichlet", alpha=0.3)
        FederatedDataset(dataset="mnist", partitioners={"train": partitioner}).load_partition(0)

    The partitions have the samples of `fedsim.partition(labels, num_partitions, strategy, seed, **params)`.

    Args:
        num_partitions: the number of workers.
        strategy, seed, params: as of `fedsim.partition`.
        partition_by: the column of the labels; None for strategies that need none.
        ids_by: the column of the writer or user of each sample, for `natural`.

    Raises ExperimentError (a ValueError) for an unknown strategy or a wrong parameter; as partitions are loaded, if
    there is no such partition. Warns (SettingWarning) if the strategy also changes samples; see `transform`.
    """

    def __init__(
        self,
        num_partitions: int,
        strategy: str = "iid",
        *,
        partition_by: str | None = "label",
        ids_by: str | None = None,
        seed: int = 0,
        **params: Any,
    ) -> None:
        super().__init__()
        partition_strategy.get(strategy, "strategy").check(params)
        self._num_partitions, self._strategy, self._seed, self._params = num_partitions, strategy, seed, params
        self._partition_by, self._ids_by = partition_by, ids_by
        self._transforms = transforms_of_workers(num_partitions, strategy, **params)
        if self._transforms is not None:
            line = f"{strategy} also changes samples: apply transform(partition_id) to the images of a partition"
            warnings.warn(line, SettingWarning, stacklevel=2)

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""
        return self._num_partitions

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the samples of a partition, 0 <= partition_id < num_partitions."""
        if not 0 <= partition_id < self._num_partitions:
            raise ExperimentError(f"partition_id = {show(partition_id)}: must be from 0 to {self._num_partitions - 1}")
        return self.dataset.select(self._shards.of(partition_id).numpy())

    def transform(self, partition_id: int) -> Transform | None:
        """How this partition changes images [batch, ...], for feature_noise and feature_rotation; None: not at all."""
        return None if self._transforms is None else self._transforms[partition_id]

    @cached_property
    def _shards(self) -> Shards:
        ids = None if self._ids_by is None else self._column(self._ids_by)
        labels = np.zeros(self.dataset.num_rows) if self._partition_by is None else self._column(self._partition_by)
        if labels.dtype.kind in "OU":  # names of classes
            labels = np.unique(labels, return_inverse=True)[1]
        return partition_shards(labels, self._num_partitions, self._strategy, self._seed, ids=ids, **self._params)

    def _column(self, name: str) -> np.ndarray:
        if name not in self.dataset.column_names:
            raise ExperimentError(
                f"column {show(name)}: not in the data set; {nearest(name, self.dataset.column_names)}"
            )
        return np.asarray(self.dataset[name][:])
