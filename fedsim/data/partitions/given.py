"""Partitions that the data or the user defines: by owner of the samples, or by lists of samples."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedsim.data.partitions.allocation import group
from fedsim.data.partitions.base import partition_strategy
from fedsim.data.partitions.ids import owners_of
from fedsim.errors import ExperimentError, one_line, show
from fedsim.system.devices import free_memory
from fedsim.system.files import decoded, read_bounded, user_path


@partition_strategy("natural", covers=False)
@dataclass(frozen=True)
class Natural:
    """Each worker holds the samples of one owner, such as a writer, a user or a role.

    The owners come from the data set. If `workers` is unset, each owner is a worker, in sorted order. If `workers`
    is smaller, that many owners are drawn at random, and the samples of the other owners are not used. Samples keep
    the order of the data set. Caldas et al. 2018 (LEAF).

    Draws: with fewer workers than owners, one `rng.choice(n_owners, n_workers, replace=False)`, which is then sorted.

    Args:
        by: column that contains the owner of each sample, for data sets with several such columns. Unset: the first.

    Returns one index array [size] per worker. Raises ExperimentError if there are more workers than owners.

    Cost: O(n log n).

    >>> fedsim.partition(np.zeros(4), "natural", 3, ids=["ann", "bob", "ann", "cy"])
    [array([0, 2]), array([1]), array([3])]
    """

    by: str | None = None

    def column(self, ids: Mapping[str, np.ndarray]) -> str:
        """Return the name of the column of owners, `by` or the first."""
        return next(iter(ids), "") if self.by is None else self.by

    def __call__(self, n_workers: int, rng: np.random.Generator, ids: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        owners, owner_of = owners_of(ids, self.by)
        if n_workers > len(owners):
            raise ExperimentError(
                f"workers = {n_workers}: must be at most {len(owners)}, the number of owners of samples; omit it to "
                "use all owners"
            )
        shards = group(np.arange(len(owner_of)), owner_of, len(owners))
        if n_workers == len(owners):
            return shards
        return [shards[owner] for owner in np.sort(rng.choice(len(owners), n_workers, replace=False))]

    def count_workers(self, ids: Callable[[], Mapping[str, np.ndarray]]) -> int:
        """Return the number of owners, which is the number of workers if `workers` is unset."""
        columns = ids()
        if not columns:
            raise ExperimentError(
                'partition.name = "natural": this data set does not say who owns each sample; set data.ids to a '
                "column of owners, if the data set is a table, or use another partition"
            )
        return len(owners_of(columns, self.by)[0])


@partition_strategy("given", covers=False, whole=True)
@dataclass(frozen=True)
class Given:
    """Each worker holds a given list of samples, for partitions that were made elsewhere.

    In Python, `fedsim.run(partition=[array, array, ...])` is the short form. If `workers` is unset, there is one
    worker for each list. Samples in no list are not used. The lists become part of the experiment and of its file, so
    use `path` for more than 500,000 samples.

    Indices are those of the training samples that `load_dataset` returns. Samples that `data.validation_fraction` holds
    out are dropped from the lists.

    Args:
        shards: indices of the training samples of each worker.
        path: file with these lists instead of `shards`. JSON: `[[0, 2], [1]]` or `{"ann": [0, 2], "bob": [1]}`. CSV:
            the columns `sample` and `worker`. Workers are sorted by their numbers, or otherwise in order of appearance.

    Returns one index array [size] per worker. Raises ExperimentError if the file cannot be read, or if a sample has two
    workers, or if all samples of a worker are held out. Cost: O(n).

    >>> fedsim.partition(np.zeros(4), "given", 2, shards=[[3, 0], [1]])
    [array([3, 0]), array([1])]
    """

    shards: list[list[int]] | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.shards is None) == (self.path is None):
            raise ExperimentError('partition.name = "given": needs either partition.shards or partition.path')

    def __call__(self, n_workers: int) -> list[np.ndarray]:
        if n_workers != len(self._lists):
            raise ExperimentError(
                f"workers = {n_workers}: the partition has {len(self._lists)} lists, one per worker; omit `workers`"
            )
        return self._lists

    def count_workers(self, ids: Callable[[], Mapping[str, np.ndarray]]) -> int:
        """Return the number of workers if `workers` is unset: one for each given list of samples. `ids` is not used."""
        return len(self._lists)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Name of each worker in the file, or its number if the file has no names."""
        return () if self.path is None else tuple(self._by_name)

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        return _read(user_path(self.path or ""))

    @cached_property
    def _lists(self) -> list[np.ndarray]:
        place = "partition.shards" if self.path is None else f"partition.path = {show(self.path)}"
        try:
            lists = self.shards if self.path is None else self._by_name.values()
            arrays = [np.array(shard, dtype=np.int64) for shard in lists or ()]
        except OSError as error:
            raise ExperimentError(f"{place}: cannot be read: {error.strerror}") from None
        except (ValueError, OverflowError, RecursionError, csv.Error) as error:
            raise ExperimentError(f"{place}: {one_line(error)}") from None
        if not arrays:
            raise ExperimentError(f"{place}: contains no list; there must be one list of samples per worker")
        return arrays


def _read(path: Path) -> dict[str, list[int]]:
    text = decoded(read_bounded(path, free_memory() / 20))
    return _lists_of_csv(text) if path.suffix == ".csv" else _lists_of_json(text)


def _lists_of_json(text: str) -> dict[str, list[int]]:
    content = json.loads(text)
    lists = {str(worker): shard for worker, shard in enumerate(content)} if isinstance(content, list) else content
    if not isinstance(lists, dict) or not all(
        isinstance(shard, list) and all(type(index) is int for index in shard) for shard in lists.values()
    ):
        raise ValueError("the file must contain a list (or an object) of lists of integers, one list per worker")
    return lists


def _lists_of_csv(text: str) -> dict[str, list[int]]:
    reader = csv.DictReader(text.splitlines())
    if not {"sample", "worker"} <= set(reader.fieldnames or ()):
        raise ValueError(
            f"the file must have the columns sample and worker, not {', '.join(reader.fieldnames or ['none'])}"
        )
    lists: dict[str, list[int]] = {}
    for row in reader:
        if not row["worker"]:
            raise ValueError(f"line {reader.line_num}: has no worker")
        try:
            lists.setdefault(row["worker"], []).append(int(row["sample"]))
        except (TypeError, ValueError):
            raise ValueError(f"line {reader.line_num}: {show(row['sample'])} is not the index of a sample") from None
    numbered = all(name.isdecimal() for name in lists)
    return {name: lists[name] for name in (sorted(lists, key=int) if numbered else lists)}
