"""Partitions with shards that are drawn one by one, for populations of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BeforeValidator, PositiveInt

from fedsim.data.partitions.allocation import Concentration
from fedsim.data.partitions.base import partition_strategy
from fedsim.data.partitions.dirichlet import draw_counts
from fedsim.errors import ExperimentError

Skew = Annotated[Concentration | None, BeforeValidator(lambda alpha: None if alpha == math.inf else alpha)]


@partition_strategy("virtual")
@dataclass(frozen=True)
class Virtual:
    """Each worker's shard is drawn from all the data when it is needed: populations of millions of workers.

    NOT a disjoint cover: samples are drawn without replacement within a worker and with replacement between workers, so
    shards overlap and may leave samples out. A shard is a pure function of (seed, worker), whatever the number of
    workers.

    With label skew, worker k draws its class mixture q ~ Dir(alpha C p_1, ..., alpha C p_C), where p_c = n_c / n is the
    share of class c and C the number of classes: Dir(alpha, ..., alpha) for classes of equal size, and on average the
    mixture of the data. For each sample a class is drawn from q, and a sample of that class; a class without samples
    left is removed from q, which is scaled to sum to one (Hsu et al. 2019, as in `dirichlet_workers`, where workers
    take from the samples that others leave).

    Draws, from the worker's own generator: one `rng.choice(n, samples, replace=False, shuffle=False)`; with skew, the
    counts as in `dirichlet_workers`, then for each class with a count, ascending, one `rng.choice` of that kind.

    Args:
        samples: of each worker, at most n.
        alpha: smaller is more skew; None or inf: no skew. (In a comparison use 1e12 instead of inf, so that it can be
            resumed.)

    Returns [samples] for labels [n]. Raises ExperimentError if samples > n. Cost: O(samples + C) time and memory for a
    shard, whatever n (O(n) for sets above 10,000 samples, or classes, of which more than a twentieth is drawn).

    >>> fedsim.partition(np.arange(100) % 10, 2, "virtual", samples=3)
    [array([85,  5, 48]), array([82, 66,  3])]
    """

    equal_sizes: ClassVar[bool] = True

    samples: PositiveInt = 60
    alpha: Skew = None

    def __call__(
        self, labels: np.ndarray, worker: int, rng: np.random.Generator, by_class: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        n = len(labels)
        if self.samples > n:
            raise ExperimentError(f"partition.samples = {self.samples}: more than the {n} samples there are")
        if self.alpha is None:
            return rng.choice(n, self.samples, replace=False, shuffle=False)
        if by_class is None:
            raise ExperimentError(f"partition.alpha = {self.alpha}: needs class labels, one for each sample; omit it")
        sizes = np.array([len(members) for members in by_class])
        alphas = np.maximum(self.alpha * len(sizes) * sizes / n, np.finfo(float).tiny)
        counts = draw_counts(self.samples, alphas, sizes, rng)
        chosen = [
            members[rng.choice(len(members), count, replace=False, shuffle=False)]
            for members, count in zip(by_class, counts, strict=True)
            if count
        ]
        return np.concatenate(chosen)

    def size(self, worker: int) -> int:
        """`samples`."""
        return self.samples
