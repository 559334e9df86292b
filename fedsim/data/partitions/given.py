"""Partitions that the data or the user defines: by owner of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedsim.data.partitions.allocation import group
from fedsim.data.partitions.base import partition_strategy
from fedsim.data.partitions.ids import column_of
from fedsim.errors import ExperimentError


@partition_strategy("natural", covers=False)
@dataclass(frozen=True)
class Natural:
    """Each worker holds the samples of one owner, such as a writer, a user or a role.

    The owners come from the data set. If `workers` is left out, each owner is a worker, in sorted order. If `workers`
    is smaller, that many owners are drawn at random, and the samples of the other owners are not used. Samples keep
    the order of the data set. Caldas et al. 2018 (LEAF).

    Draws: with fewer workers than owners, one `rng.choice(n_owners, n_workers, replace=False)`, which is then sorted.

    Args:
        by: name of the column of owners, for data sets with several columns; unset: the first column.

    Returns one index array per worker. Raises ExperimentError if there are more workers than owners. Cost: O(n log n).

    >>> fedsim.partition(np.zeros(4), 3, "natural", ids=["ann", "bob", "ann", "cy"])
    [array([0, 2]), array([1]), array([3])]
    """

    by: str | None = None

    def __call__(self, n_workers: int, rng: np.random.Generator, ids: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        owners, owner_of = np.unique(column_of(ids, self.by), return_inverse=True)
        if n_workers > len(owners):
            raise ExperimentError(
                f"workers = {n_workers}: must be at most {len(owners)}, the number of owners of samples; leave it out "
                "to use all of them"
            )
        shards = group(np.arange(len(owner_of)), owner_of, len(owners))
        if n_workers == len(owners):
            return shards
        return [shards[owner] for owner in np.sort(rng.choice(len(owners), n_workers, replace=False))]

    def count_workers(self, ids: Callable[[], Mapping[str, np.ndarray]]) -> int:
        """Return the number of owners."""
        columns = ids()
        if not columns:
            raise ExperimentError('partition.name = "natural": this data set does not say who owns each sample')
        return len(np.unique(column_of(columns, self.by)))
