"""Common functions of partition strategies: sizes, and the assignment of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from fedsim.errors import ExperimentError

TRIES = 1000  # draws of a partition, after which a `min_size` counts as out of reach

Concentration = Annotated[float, Field(gt=0, le=1e12)]  # of Dir: beyond, all shares are equal, and sums overflow


def even_sizes(n_samples: int, parts: int) -> np.ndarray:
    """Sizes that differ by at most one, the larger first, int64 [parts]: those of `np.array_split`."""
    base, larger = divmod(n_samples, parts)
    return base + (np.arange(parts) < larger)


def cut_by_shares(n_samples: int, shares: np.ndarray) -> np.ndarray:
    """Whole counts [parts] with sum n_samples, by cuts at floor(cumsum(shares) * n_samples).

    Shares sum to one; the last share above zero gets the rest.
    """
    ends = np.floor(np.cumsum(shares) * n_samples).astype(np.int64)
    ends[np.flatnonzero(shares)[-1] :] = n_samples  # else rounding gives a sample to a last share of zero
    return np.diff(ends, prepend=0)


def group(members: np.ndarray, owners: np.ndarray, n_owners: int) -> list[np.ndarray]:
    """Return the indices that belong to each owner in range(n_owners), in ascending order.

    `owners` [n] is the owner of each member.
    """
    sizes = np.bincount(owners, minlength=n_owners)
    return np.split(members[np.argsort(owners, kind="stable")], np.cumsum(sizes)[:-1])


def has_classes(labels: np.ndarray) -> bool:
    """Whether targets are class labels, one per sample, as opposed to measured values or tokens."""
    return labels.ndim == 1 and labels.dtype.kind != "f"


def by_label(labels: np.ndarray) -> np.ndarray:
    """Return the positions of samples in the ascending order of their labels, or of other targets [n]."""
    if labels.ndim != 1:
        raise ExperimentError(
            f"partition.name: sorts samples by their target, and each target has {labels[0].size} numbers; use a "
            "strategy that does not, such as iid or contiguous"
        )
    return np.argsort(labels, kind="stable")


def samples_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return the ascending indices of the samples of each class that occurs, classes ascending."""
    classes, class_of = np.unique(labels, return_inverse=True)
    return group(np.arange(len(labels)), class_of, len(classes))


def assign_samples(by_class: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shards with counts[worker, class] samples, [n_workers, classes]; the counts sum to the number of samples.

    Draws: for each class in turn one `rng.permutation` of its samples; worker 0 gets the first of them, and so on.
    """
    workers = np.arange(len(counts))
    owners = np.concatenate([np.repeat(workers, of_class) for of_class in counts.T])
    return group(np.concatenate([rng.permutation(samples) for samples in by_class]), owners, len(counts))


def draw_until_large_enough(
    draw: Callable[[], np.ndarray], min_size: int, n_samples: int, n_workers: int, parameters: str, less_skew: str
) -> np.ndarray:
    """The first counts [n_workers, ...] that `draw` returns with at least min_size samples for every worker.

    Raises ExperimentError if there are too few samples, and after TRIES draws. Its message contains `given`, the
    parameters of the draws, and `less_skew`, the parameter change that makes such counts more likely.
    """
    if min_size * n_workers > n_samples:
        raise ExperimentError(
            f"partition.min_size = {min_size}: {n_workers} workers with that many samples each need "
            f"{min_size * n_workers}, and there are {n_samples}"
        )
    best = 0
    for _ in range(TRIES):
        counts = draw()
        smallest = int(counts.reshape(n_workers, -1).sum(1).min())
        if smallest >= min_size:
            return counts
        best = max(best, smallest)
    raise ExperimentError(
        f"partition.min_size = {min_size}: not reached in {TRIES} draws with {parameters} for {n_workers} workers and "
        f"{n_samples} samples: the smallest shard had {best} at best; take a smaller min_size, {less_skew} or fewer "
        "workers"
    )
