"""Groups of workers, each with a server of its own, between the workers and the top level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.import_policy import import_object
from fedsim.errors import ExperimentError, one_line, show


@dataclass(frozen=True)
class Groups:
    """Division of all workers into groups.

    Attributes:
        count: number of groups.
        workers: number of workers.
        listed: group of each worker, int64 [workers]; None for groups of consecutive workers of (nearly) equal sizes.

    >>> groups = Groups.of(2, workers=5)
    >>> groups.of_workers([0, 1, 2, 3, 4]).tolist(), groups.sizes.tolist()
    ([0, 0, 0, 1, 1], [3, 2])
    """

    count: int
    workers: int
    listed: np.ndarray | None = None

    @classmethod
    def of(cls, setting: int | list[int] | str, workers: int) -> Groups:
        """Return the groups for the setting `groups`. Raises ExperimentError if it does not fit the `workers`.

        Args:
            setting: number of groups, list with the group of each worker, or import path of a function that returns
                such a list for a number of workers.
            workers: number of workers.
        """
        place = f"groups = {show(setting)}"
        if isinstance(setting, int):
            if setting > workers:
                raise ExperimentError(f"{place}: must be at most {workers}, the number of workers; use more workers")
            return cls(setting, workers)
        try:
            listed = np.asarray(import_object(setting)(workers) if isinstance(setting, str) else setting)
        except Exception as error:
            need = "must be a number, a list or a function of the number of workers, package.module:name"
            raise ExperimentError(f"{place}: {need}; it cannot be called: {one_line(error)}") from error
        if listed.shape != (workers,) or listed.dtype.kind not in "iu" or listed.min() < 0 or listed.max() >= workers:
            need = f"must be one number for each of {workers} workers: its group, from 0 to {workers - 1}"
            raise ExperimentError(f"{place}: {need}; change groups or workers")
        if (empty := np.flatnonzero(np.bincount(listed) == 0)).size:
            raise ExperimentError(f"{place}: group {empty[0]} has no workers; number the groups 0, 1, ... without gaps")
        return cls(int(listed.max()) + 1, workers, listed.astype(np.int64))

    def of_workers(self, workers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the group of each of n `workers`, int64 [n]."""
        workers = np.asarray(workers, dtype=np.int64)
        return workers * self.count // self.workers if self.listed is None else self.listed[workers]

    @property
    def sizes(self) -> np.ndarray:
        """Number of workers in each group, int64 [count]."""
        if self.listed is not None:
            return np.bincount(self.listed)
        return np.diff(-(-np.arange(self.count + 1) * self.workers // self.count))
