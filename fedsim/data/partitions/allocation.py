"""Functions shared by the partition strategies: compute shard sizes and assign samples to workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from fedsim.core.numbers import Limits
from fedsim.errors import ExperimentError

TRIES = 1000  # maximum number of draws to reach `min_size`

# Concentration parameter of a Dirichlet distribution. Above 1e12 all shares would be equal, and sums would overflow.
Concentration = Annotated[float, Limits(gt=0, le=1e12)]


def label_array(labels: Any) -> np.ndarray:
    """Return labels as an array. Raises ExperimentError for a data set, a list of samples or a string."""
    samples = isinstance(labels, (list, tuple)) and labels and isinstance(labels[0], (list, tuple))
    if samples or isinstance(labels, (str, Dataset)):
        raise ExperimentError(
            f"labels: must be one label per sample, [n], not {type(labels).__name__}; for a data set, use "
            "fedsim.dataset_split(dataset, name, n_workers), or pass [label for _, label in dataset]"
        )
    return np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)


def even_sizes(n_samples: int, parts: int) -> np.ndarray:
    """Divide n_samples into `parts` sizes that differ by at most one, larger ones first, int64 [parts]."""
    base, larger = divmod(n_samples, parts)
    return base + (np.arange(parts) < larger)


def cut_by_shares(n_samples: int, shares: np.ndarray) -> np.ndarray:
    """Divide n_samples in proportion to `shares`, and return the integer counts [parts], which sum to n_samples.

    The `shares` [parts] sum to one. Part i ends at floor(cumsum(shares)[i] * n_samples). The last part with a share
    above zero gets the samples that remain after rounding.
    """
    ends = np.floor(np.cumsum(shares) * n_samples).astype(np.int64)
    ends[np.flatnonzero(shares)[-1] :] = n_samples  # otherwise rounding could give a sample to a share of zero
    return np.diff(ends, prepend=0)


def group(samples: np.ndarray, owners: np.ndarray, n_owners: int) -> list[np.ndarray]:
    """Return the sample indices of each owner: one array for each of the owners 0, ..., n_owners - 1.

    Args:
        samples: sample indices, [n]. Their order is kept for each owner.
        owners: the owner of each sample, [n].
        n_owners: number of owners.
    """
    sizes = np.bincount(owners, minlength=n_owners)
    return np.split(samples[np.argsort(owners, kind="stable")], np.cumsum(sizes)[:-1])


class Strata(NamedTuple):
    """Constraints that a random draw of samples respects.

    Attributes:
        stratum: stratum of each sample, such as its class, [n]. The draw takes the same fraction of each stratum. None:
            the draw is not stratified.
        owner: owner of each sample, [n]. Samples of one owner stay together. None: they may be separated.
    """

    stratum: np.ndarray | None = None
    owner: np.ndarray | None = None

    def take(self, positions: np.ndarray) -> Strata:
        """Return the strata and owners of the samples at `positions`, indices or a mask."""
        return Strata(*(values if values is None else values[positions] for values in self))


NO_STRATA = Strata()


def draw_part(order: np.ndarray, fraction: float, total: int, strata: Strata = NO_STRATA) -> np.ndarray:
    """Return the ascending indices of the samples that a random part of n samples contains.

    Without strata, the part contains the first `total` samples in `order`. With strata, it contains floor(fraction n_s)
    of the n_s samples of each stratum, in that order. The other samples come from the strata with the largest
    remainders of fraction n_s, and from the first of these strata if remainders are equal. At least one sample of each
    stratum is not in the part, which may then have fewer than `total` samples.

    Args:
        order: random permutation of the samples, [n].
        fraction: fraction of the samples in the part, rounded to `total` samples.
        total: number of samples in the part.
        strata: strata, and owners if all samples of an owner belong to the part or none (see `_draw_owners`).

    >>> draw_part(np.arange(6), 0.5, 3, Strata(np.array([0, 1, 1, 2, 2, 2])))
    array([1, 3, 4])
    """
    if strata.owner is not None:
        stratum = np.zeros(len(order), int) if strata.stratum is None else strata.stratum
        return _draw_owners(order, fraction, stratum, strata.owner)
    if strata.stratum is None:
        return np.sort(order[:total])
    _, stratum_of, sizes = np.unique(strata.stratum, return_inverse=True, return_counts=True)
    quotas = [Fraction(str(fraction)) * size for size in sizes.tolist()]
    counts = np.array([int(quota) for quota in quotas])
    by_remainder = np.array(sorted(range(len(sizes)), key=lambda stratum: int(quotas[stratum]) - quotas[stratum]))
    while (left := total - counts.sum()) > 0 and (counts < sizes - 1).any():
        counts[by_remainder[(counts < sizes - 1)[by_remainder]][:left]] += 1
    of_strata = group(order, stratum_of[order], len(sizes))  # each stratum in the drawn order
    return np.sort(np.concatenate([samples[:count] for samples, count in zip(of_strata, counts, strict=True)]))


def _draw_owners(order: np.ndarray, fraction: float, strata: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the ascending indices of all samples of owners that are drawn at random.

    The owners are considered in the order in which their samples first occur in the random permutation `order` [n]. An
    owner is drawn if this brings the number of drawn samples of the strata nearer to `fraction` of each stratum. The
    distance is the sum over the strata of the squared differences, divided by the stratum's size. If no owner decreases
    the distance, the owner that increases it least is drawn. An owner is never drawn if no sample of one of its strata
    would remain. `strata` and `owners` are those of each sample, [n].
    """
    _, owner_of = np.unique(owners, return_inverse=True)
    _, stratum_of, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    _, first = np.unique(owner_of[order], return_index=True)
    of_owners = group(np.arange(len(order)), owner_of, len(first))
    drawn, left, remain, farther = list[int](), sizes.copy(), (1 - fraction) * sizes, dict[int, float]()
    for owner in np.argsort(first).tolist():
        own, counts = np.unique(stratum_of[of_owners[owner]], return_counts=True)
        if (left[own] == counts).any():
            continue
        change = ((left[own] - counts - remain[own]) ** 2 - (left[own] - remain[own]) ** 2) / sizes[own]
        if change.sum() < 0:
            left[own] -= counts
            drawn.append(owner)
        elif not drawn:
            farther[owner] = float(change.sum())
    drawn = drawn or sorted(farther, key=lambda owner: farther[owner])[:1]
    return np.sort(np.concatenate([np.zeros(0, int), *(of_owners[owner] for owner in drawn)]))


def has_classes(labels: np.ndarray) -> bool:
    """Whether the targets are class labels (one integer per sample), as opposed to measured values or tokens."""
    return labels.ndim == 1 and labels.dtype.kind != "f"


def by_label(labels: np.ndarray) -> np.ndarray:
    """Return the sample indices [n] sorted by label or scalar target. Samples with equal targets keep their order.

    Raises ExperimentError if a sample's target is not a single number.
    """
    if labels.ndim != 1:
        raise ExperimentError(
            f"partition.name: this strategy sorts samples by target, but each target has {math.prod(labels.shape[1:])} "
            "numbers instead of one; use a strategy that ignores the targets, such as iid or contiguous"
        )
    return np.argsort(labels, kind="stable")


def samples_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return one array of ascending sample indices for each class in `labels`, in ascending class order."""
    classes, class_of = np.unique(labels, return_inverse=True)
    return group(np.arange(len(labels)), class_of, len(classes))


def assign_samples(by_class: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Assign random samples to workers such that each worker gets the requested number of samples per class.

    Args:
        by_class: one index array per class.
        counts: number of samples for each worker and class, [n_workers, classes]. Their sum is the number of samples.
        rng: for all draws.

    Returns one index array per worker. Draws: the samples of each class, in turn, are shuffled by one `rng.permutation`
    and handed out in the order of the workers.
    """
    workers = np.arange(len(counts))
    owners = np.concatenate([np.repeat(workers, class_counts) for class_counts in counts.T])
    return group(np.concatenate([rng.permutation(samples) for samples in by_class]), owners, len(counts))


def draw_until_large_enough(
    draw: Callable[[], np.ndarray], min_size: int, n_samples: int, n_workers: int, parameters: str, less_skew: str
) -> np.ndarray:
    """Call `draw` until every worker has at least min_size samples, and return these counts.

    Args:
        draw: function that returns random sample counts, [n_workers, ...].
        min_size: minimum number of samples per worker.
        n_samples: total number of samples.
        n_workers: number of workers.
        parameters: text for the error message that states the strategy's parameters, such as "alpha = 0.5".
        less_skew: change that the error message recommends, such as "a larger alpha".

    Raises ExperimentError if n_samples < min_size * n_workers, or after TRIES draws without success.
    """
    if min_size * n_workers > n_samples:
        raise ExperimentError(
            f"partition.min_size = {min_size}: {n_workers} workers with at least {min_size} samples each need "
            f"{min_size * n_workers} samples, but there are only {n_samples}; lower min_size or use fewer workers"
        )
    best = 0
    for _ in range(TRIES):
        counts = draw()
        smallest = int(counts.reshape(n_workers, -1).sum(1).min())
        if smallest >= min_size:
            return counts
        best = max(best, smallest)
    raise ExperimentError(
        f"partition.min_size = {min_size}: could not be reached in {TRIES} draws with {parameters}, {n_workers} "
        f"workers and {n_samples} samples (the smallest shard had at most {best} samples); use a smaller min_size, "
        f"{less_skew} or fewer workers"
    )
