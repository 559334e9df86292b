"""Subsets of a data set, one per worker, that share the data set's samples without copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from fedsim.core.model_inputs import Inputs, leaves, split_inputs
from fedsim.core.randomness import Draws, numpy_generator, torch_generator
from fedsim.data.augmentation import ImageTransform
from fedsim.data.partitions import Transform, partition_shards, transforms_of_workers
from fedsim.data.partitions.allocation import NO_STRATA, Strata, draw_part
from fedsim.data.partitions.ids import Ids
from fedsim.data.tensors import TensorData, as_pair, as_targets
from fedsim.errors import DataError, ExperimentError
from fedsim.hints.attributes import takes_component

# Size of a chunk: consecutive batches that are gathered and normalised in one call. On a CPU a chunk should fit in the
# cache. On a GPU each chunk waits for a copy of its positions, so chunks are large: 64 MiB hold 20,000 28 x 28 images.
CHUNK_BYTES_ON_CPU = 2**20
CHUNK_BYTES_ELSEWHERE = 2**26


class CustomSubset(Subset):
    """A `torch.utils.data.Subset` with an input transform that applies only to this subset.

    A DataLoader fetches whole batches through `__getitems__`. For TensorData and TensorDataset, the method `gather`
    indexes the underlying tensors directly.

    Args:
        dataset: any map-style data set of (input, target) samples.
        indices: positions of the subset's samples in `dataset`, in the subset's order.
        subset_transform: function applied to each input, or to a batch of inputs if its attribute `batched` is true.

    In a run: `fedsim.training.batches.BatchSource.batches` calls `CustomSubset`.

    >>> data = torch.utils.data.TensorDataset(torch.arange(4.0), torch.tensor([0, 1, 0, 1]))
    >>> fedsim.CustomSubset(data, [3, 0], lambda x: -x).gather(torch.tensor([0, 1]))
    (tensor([-3., -0.]), tensor([1, 0]))
    """

    indices: Any  # int64 tensor [len]; in torch's Subset a sequence

    def __init__(
        self,
        dataset: Dataset,
        indices: Sequence[int] | np.ndarray | Tensor,
        subset_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        positions = torch.as_tensor(indices, dtype=torch.long)
        super().__init__(dataset, positions)  # type: ignore[arg-type]  # indexing by a tensor is faster than by a list
        self.subset_transform = subset_transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return a list of (input, target) samples at `indices` in the subset. A DataLoader calls this per batch."""
        positions = self.indices[torch.as_tensor(indices)]
        fetch = getattr(self.dataset, "__getitems__", None)
        numbers = positions.tolist()
        samples = fetch(numbers) if fetch else [self.dataset[number] for number in numbers]
        if self.subset_transform is None:
            return list(samples)
        inputs, targets = zip(*map(as_pair, samples, numbers), strict=True)
        return list(zip(self._transform(list(inputs)), targets, strict=True))

    def gather(self, positions: Tensor) -> tuple[Any, Tensor]:
        """Return the inputs [batch, ...] and targets [batch, ...] of the samples at `positions` in the subset."""
        if isinstance(self.dataset, TensorData):
            inputs, targets = self.dataset.gather(self.indices[positions])
        elif isinstance(self.dataset, TensorDataset):
            chosen = self.indices[positions]
            inputs, targets = (t.index_select(0, chosen.to(t.device)) for t in self.dataset.tensors)
        else:
            samples = self.__getitems__(positions.tolist())
            return tuple(default_collate(list(map(as_pair, samples, positions.tolist()))))
        if self.subset_transform is None:
            return inputs, targets
        transformed = self._transform(inputs)
        return transformed if isinstance(transformed, Tensor) else torch.stack(list(transformed)), targets

    def batches(self, batch_size: int, order: np.ndarray | Tensor | None = None) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield all samples once, in (inputs, targets) batches of `batch_size` samples. The last batch may be smaller.

        Args:
            batch_size: number of samples per batch.
            order: order of the samples, a permutation of range(len(self)). None: the order of `indices`.
        """
        order = torch.arange(len(self), device=self.indices.device) if order is None else torch.as_tensor(order)
        chunk = batch_size * self._batches_at_once(batch_size)
        for start in range(0, len(order), chunk):
            inputs, targets = self.gather(order[start : start + chunk])
            yield from zip(split_inputs(inputs, batch_size), targets.split(batch_size), strict=True)

    def _transform(self, inputs: Any) -> Any:
        transform = self.subset_transform
        assert transform is not None
        if getattr(transform, "batched", False):
            return transform(inputs if isinstance(inputs, Tensor) else torch.stack(inputs))
        return [transform(x) for x in inputs]

    def _batches_at_once(self, batch_size: int) -> int:
        """Return how many batches of `batch_size` samples to read at once: several only from a TensorData."""
        if not isinstance(self.dataset, TensorData):
            return 1
        data = self.dataset
        most = CHUNK_BYTES_ON_CPU if data.targets.device.type == "cpu" else CHUNK_BYTES_ELSEWHERE
        numbers = sum(tensor[0].numel() for tensor in leaves(data.inputs))
        return max(1, most // (batch_size * numbers * data.dtype.itemsize))


class WorkerTransform:
    """Input transform that a partition defines for one worker, to pass as the `subset_transform` of a CustomSubset.

    Random numbers depend on (seed, worker, batch number). Batches are numbered per WorkerTransform object, so each
    process of a DataLoader counts its own batches from 0.
    """

    batched = True

    def __init__(self, transform: Transform, seed: int, worker: int) -> None:
        self._transform = ImageTransform.of(transform)
        self._seed, self._worker = seed, worker
        self._batches = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        moment, self._batches = ("features", self._worker, self._batches), self._batches + 1
        draws = Draws.of(*moment, seed=self._seed, device=inputs.device)
        return self._transform(inputs, {"draws": draws, "generator": torch_generator(self._seed, *moment)})


@takes_component("partition", n_workers="workers", ids="data.ids")
def dataset_split(
    dataset: Dataset,
    name: str,
    n_workers: int,
    *,
    seed: int = 0,
    subset_transform: Callable[[Any], Any] | None = None,
    ids: Ids = None,
    **params: Any,
) -> list[CustomSubset]:
    """Split a map-style data set into one CustomSubset per worker, with a partition strategy (see `partition`).

    Args:
        dataset: map-style data set of (input, target) samples.
        name: partition strategy, as in `partition`: a registered name, "package.module:function", or a function.
        n_workers: number of workers.
        seed: seed for all random draws.
        ids: the owner of each sample, [n], for strategies that need owners (see `partition`).
        params: parameters of the strategy.
        subset_transform: input transform for all workers (see `CustomSubset`). None: the transforms that the strategy
            defines, if any (as `feature_noise` does).

    Returns one CustomSubset per worker. Raises ExperimentError like `partition`, and DataError if a target is not
    numeric, or if `dataset` is a pair of arrays.

    >>> data = torch.utils.data.TensorDataset(torch.arange(4.0), torch.tensor([0, 1, 0, 1]))
    >>> [len(subset) for subset in fedsim.dataset_split(data, "iid", 2)]
    [2, 2]
    """
    if isinstance(dataset, tuple) and len(dataset) == 2 and hasattr(dataset[1], "shape"):
        raise DataError("dataset: is a pair of inputs and targets; pass fedsim.TensorData(inputs, targets)")
    drawn = partition_shards(targets_of(dataset), name, n_workers, seed=seed, ids=ids, **params)
    shards = [drawn.of(worker).numpy() for worker in range(len(drawn))]
    if subset_transform is not None:
        return [CustomSubset(dataset, shard, subset_transform) for shard in shards]
    transforms = [
        None if transform is None else WorkerTransform(transform, seed, worker)
        for worker, transform in enumerate(transforms_of_workers(name, n_workers, **params) or [None] * n_workers)
    ]
    return [CustomSubset(dataset, shard, transform) for shard, transform in zip(shards, transforms, strict=True)]


def targets_of(dataset: Any) -> np.ndarray:
    """Return the targets of all samples, [n, ...].

    They are taken from the data set's attribute `targets` or `labels`, or otherwise read sample by sample. Raises
    DataError if a target is not numeric, or if targets have different shapes.
    """
    if isinstance(dataset, Subset):
        return targets_of(dataset.dataset)[np.asarray(dataset.indices)]
    if isinstance(dataset, TensorDataset):
        return _as_array(dataset.tensors[1])
    for name in ("sample_targets", "targets", "labels"):
        targets = getattr(dataset, name, None)
        if targets is not None:
            return _as_array(targets)
    return as_targets([as_pair(dataset[index], index)[1] for index in range(len(dataset))])


def _as_array(targets: Any) -> np.ndarray:
    array = targets.cpu().numpy() if isinstance(targets, Tensor) else np.asarray(targets)
    return array if array.dtype.kind in "iubf" else as_targets(targets)


def split_validation(
    train: TensorData, share: float, seed: int, fewest: int = 1, strata: Strata = NO_STRATA
) -> tuple[TensorData, TensorData, np.ndarray | None]:
    """Split the training samples at random into remaining training samples and held-out validation samples.

    Args:
        train: all training samples.
        share: fraction of the samples to hold out, 0 <= share < 1, rounded to a whole number of samples.
        seed: seed for the random split.
        fewest: minimum number of samples that must remain for training, such as the number of workers.
        strata: classes and owners that the draw respects (see `draw_part`).

    Returns (remaining, held out, index_of): the samples of both parts in the data set's order, and the index of each
    sample among the remaining samples, int64 [n], or -1 for held-out samples. If `share` is 0, samples are not copied,
    and index_of is None.

    Raises ExperimentError if a positive share rounds to zero samples, or if fewer than `fewest` samples remain.

    >>> data = fedsim.TensorData(torch.arange(10.0), torch.arange(10))
    >>> remaining, held_out, _ = fedsim.data.subsets.split_validation(data, 0.2, seed=0)
    >>> len(remaining), len(held_out), sorted([*remaining.targets.tolist(), *held_out.targets.tolist()]) == [*range(10)]
    (8, 2, True)
    """
    if not share:
        return train, train.take(np.zeros(0, dtype=np.int64)), None
    remaining, held_out = validation_positions(len(train), share, seed, fewest, strata)
    index_of = np.full(len(train), -1)
    index_of[remaining] = np.arange(len(remaining))
    return train.take(remaining), train.take(held_out), index_of


def validation_positions(
    n: int, share: float, seed: int, fewest: int = 1, strata: Strata = NO_STRATA
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ascending indices of the samples that `split_validation` keeps and holds out, out of n samples.

    See `split_validation` for the arguments.
    """
    where, held_out = f"data.validation_fraction = {share}", round(share * n)
    if n - held_out < fewest:
        raise ExperimentError(
            f"{where}: leaves only {n - held_out:,} training samples for {fewest:,} workers, fewer than one each; use "
            "a smaller fraction or fewer workers"
        )
    positions = draw_part(numpy_generator(seed, "validation_split").permutation(n), share, held_out, strata)
    if not len(positions):
        raise ExperimentError(
            f"{where}: holds out no sample, because {n:,} times this fraction rounds to 0"
            f"{', or each class has one sample' * (strata.stratum is not None)}"
            f"{', or each owner has all samples of a class' * (strata.owner is not None)}; must be larger, or 0"
        )
    return np.setdiff1d(np.arange(n), positions), positions
