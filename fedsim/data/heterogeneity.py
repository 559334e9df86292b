"""How different the workers' shards are: label counts, and statistics of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.errors import ExperimentError


@dataclass(frozen=True)
class Heterogeneity:
    """Statistics of a partition; `dataclasses.asdict` returns them as plain numbers.

    Attributes:
        sizes: samples of each worker.
        entropies: of each worker's label histogram, in nats: 0 for a single class, at most ln C.
        mean_hellinger: mean Hellinger distance of label histograms over all pairs of workers: 0 for equal histograms, 1
            if no two workers share a class; 0 for a single worker.

    >>> fedsim.heterogeneity(np.array([[5, 0], [0, 3]]))
    Heterogeneity(sizes=(5, 3), entropies=(0.0, 0.0), mean_hellinger=1.0)
    """

    sizes: tuple[int, ...]
    entropies: tuple[float, ...]
    mean_hellinger: float

    @property
    def smallest(self) -> int:
        return min(self.sizes)

    @property
    def median(self) -> float:
        return float(np.median(self.sizes))

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def mean_entropy(self) -> float:
        """The plain mean of the workers' entropies, in nats."""
        return float(np.mean(self.entropies))


def label_counts(
    labels: Sequence[int] | np.ndarray, shards: Sequence[Sequence[int] | np.ndarray], classes: int | None = None
) -> np.ndarray:
    """The number of samples of each label that every worker holds, int64 [n_workers, classes].

    Args:
        labels: class label of every sample, [n], whole numbers >= 0.
        shards: one index array per worker, as from `partition`.
        classes: the number of classes C, for labels 0, ..., C - 1; None: one more than the highest label.

    Raises ExperimentError for labels that are no whole numbers >= 0, or not below `classes`.

    >>> fedsim.label_counts([0, 1, 1, 0], [[0, 1], [2, 3]])
    array([[1, 1],
           [1, 1]])
    """
    labels = np.asarray(labels)
    numbers = labels.astype(np.int64)
    if not np.array_equal(numbers, labels) or (numbers < 0).any():
        raise ExperimentError("labels: must be whole numbers >= 0")
    highest = int(numbers.max(initial=-1))
    classes = highest + 1 if classes is None else classes
    if highest >= classes:
        raise ExperimentError(f"classes = {classes}: must be more than the highest label, {highest}")
    return np.array([np.bincount(numbers[np.asarray(shard)], minlength=classes) for shard in shards], dtype=np.int64)


def heterogeneity(counts: np.ndarray) -> Heterogeneity:
    """Statistics of a partition from its label counts [n_workers, C] (see `label_counts`).

    With worker i's label histogram p_i = counts_i / sum counts_i: entropy H_i = -sum_c p_ic ln p_ic, and Hellinger
    distance h_ij = sqrt(sum_c (sqrt p_ic - sqrt p_jc)^2 / 2), averaged over the pairs i < j. Cost: O(n_workers^2 C)
    time, O(n_workers C) memory.

    Raises ExperimentError for a worker without samples.

    >>> fedsim.heterogeneity(np.array([[2, 2], [4, 0]])).mean_entropy
    0.34657359027997264
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size or (counts < 0).any():
        raise ExperimentError(f"counts: must be [n_workers, classes], none negative, not of shape {counts.shape}")
    sizes = counts.sum(1)
    if not sizes.all():
        raise ExperimentError(f"counts: worker {int(np.argmin(sizes))} holds no sample")
    histograms = counts / sizes[:, None]
    logs = np.log(histograms, out=np.zeros_like(histograms), where=histograms > 0)
    return Heterogeneity(
        sizes=tuple(sizes.tolist()),
        entropies=tuple((-(histograms * logs).sum(1) + 0.0).tolist()),  # + 0.0: no worker has an entropy of -0
        mean_hellinger=_mean_hellinger(np.sqrt(histograms)),
    )


def _mean_hellinger(roots: np.ndarray) -> float:
    """From square roots of histograms, by differences: 1 - roots @ roots.T would lose half of the digits."""
    n = len(roots)
    total = sum(np.sqrt(((roots[i + 1 :] - roots[i]) ** 2).sum(1) / 2).sum() for i in range(n - 1))
    return float(total / (n * (n - 1) / 2)) if n > 1 else 0.0
