"""Partitions of populations that are sampled from the data: shards are drawn one by one, as they are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, PositiveInt

from fedsim.data.partitions.dealing import Concentration
from fedsim.data.partitions.dirichlet import draw_counts
from fedsim.data.partitions.strategy import partition_strategy
from fedsim.errors import ExperimentError

Skew = Annotated[Concentration | None, BeforeValidator(lambda alpha: None if alpha == math.inf else alpha)]


@partition_strategy("virtual")
@dataclass(frozen=True)
class Virtual:
    """Each worker's shard is drawn from all the data when it is asked for: populations of millions of workers.

    NOT a disjoint cover: within a worker samples are drawn without replacement, but between workers with it, so shards
    overlap and may leave samples out. It is a population of workers that is sampled from the data. A shard is a pure
    function of (seed, worker), whatever the number of workers.

    With label skew, worker k draws its class mixture q ~ Dir(alpha C p_1, ..., alpha C p_C), where p_c = n_c / n is the
    share of class c among the n samples and C the number of classes that occur: Dir(alpha, ..., alpha) where classes
    are of equal size, and on average the mixture of the data. As often as `samples` says a class is drawn from q, and a
    sample of that class; a class that has run out is struck from q, which is scaled up to sum to one (Hsu et al. 2019,
    as in `dirichlet_workers`, where workers take from what others leave).

    Args:
        samples: of each worker, at most n.
        alpha: the smaller, the more skew; inf, or left out: none, a simple random sample of the data. (In a grid say
            1e12: its folder has no word for inf, and could not be gone on with.)

    Draws, from the worker's own generator: one `rng.choice(n, samples, replace=False, shuffle=False)`; with skew, the
    counts as in `dirichlet_workers`, then for each class that is wanted, ascending, one `rng.choice` of that kind.
    Cost: O(samples + C) time and memory for a shard, whatever n (in sets above 10,000 samples, or classes, of which
    more than a twentieth is drawn: O(n)).

    Raises ExperimentError where samples > n.

    Labels [n], result [samples].
    """

    samples: PositiveInt = 60
    alpha: Skew = None

    def __call__(
        self, labels: np.ndarray, worker: int, rng: np.random.Generator, by_class: Sequence[np.ndarray]
    ) -> np.ndarray:
        n = len(labels)
        if self.samples > n:
            raise ExperimentError(f"partition.samples = {self.samples}: more than the {n} samples there are")
        if self.alpha is None:
            return rng.choice(n, self.samples, replace=False, shuffle=False)
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
        """As `samples` says."""
        return self.samples
