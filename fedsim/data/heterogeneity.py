"""How different workers' shards are: label counts, and figures that sum them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.errors import ExperimentError


@dataclass(frozen=True)
class Heterogeneity:
    """Figures of a partition; `dataclasses.asdict` gives them as plain numbers.

    Attributes:
        sizes: samples that each worker holds.
        entropies: of each worker's label histogram, in nats: 0 for one class only, at most ln C.
        mean_hellinger: the mean over all pairs of workers of the Hellinger distance of their label histograms: 0 where
            all are equal, 1 where no two workers share a class; 0 for a single worker.
    """

    sizes: tuple[int, ...]
    entropies: tuple[float, ...]
    mean_hellinger: float

    @property
    def smallest(self) -> int:
        return min(self.sizes)

    @property
    def median(self) -> float:
        """The median of the sizes."""
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
    """How many samples of each label every worker holds, int64 [n_workers, classes].

    Args:
        labels: class label of every sample, [n], whole numbers >= 0.
        shards: one index array per worker, as `partition` gives them.
        classes: the number of classes C, for labels 0, ..., C - 1; one more than the highest label where left out.

    Raises ExperimentError for labels that are no class numbers, or not below `classes`.
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
    """Figures of a partition from its label counts [n_workers, C] (see `label_counts`).

    With worker i's label histogram p_i = counts_i / sum counts_i: entropy H_i = -sum_c p_ic ln p_ic, and Hellinger
    distance h_ij = sqrt(sum_c (sqrt p_ic - sqrt p_jc)^2 / 2), averaged over the pairs i < j.
    Cost: O(n_workers^2 C) time, O(n_workers C) memory.

    Raises ExperimentError for a worker without samples, which has no histogram.
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
    """From square roots of histograms. By differences: 1 - roots @ roots.T is good to 1e-8 only where it is near 0."""
    n = len(roots)
    total = sum(np.sqrt(((roots[i + 1 :] - roots[i]) ** 2).sum(1) / 2).sum() for i in range(n - 1))
    return float(total / (n * (n - 1) / 2)) if n > 1 else 0.0
