"""Virtual partitions, whose shards are drawn one by one, for any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from fedsim.core.numbers import Mark, PositiveInt
from fedsim.data.partitions.allocation import Concentration
from fedsim.data.partitions.base import partition_strategy
from fedsim.data.partitions.dirichlet import draw_counts
from fedsim.errors import ExperimentError


class InfinityIsNone(Mark):
    """Replaces infinity by None before pydantic checks a value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(lambda alpha: None if alpha == math.inf else alpha, handler(source))


Skew = Annotated[Concentration | None, InfinityIsNone()]


@partition_strategy("virtual")
@dataclass(frozen=True)
class Virtual:
    """Draw each worker's shard from the whole data set on demand, so that there can be millions of workers.

    Shards are NOT disjoint: one worker's samples are distinct, but different workers may share samples, and some
    samples may be in no shard. A shard depends only on (seed, worker), not on the number of workers.

    With label skew, worker k draws a class mixture q ~ Dir(alpha C p_1, ..., alpha C p_C), where p_c = n_c / n is the
    share of class c and C the number of classes. The mean of q is the mixture p of the whole data set, and for classes
    of equal size q ~ Dir(alpha, ..., alpha). Each sample is a random sample from a class drawn from q. A class that has
    run out of samples is removed from q, and q is rescaled to sum to one. Unlike in `dirichlet_workers` (Hsu et al.
    2019), a worker does not use up samples for the workers after it.

    Draws, from a separate generator per worker: one `rng.choice(n, samples, replace=False, shuffle=False)`. With skew
    instead: the counts as in `dirichlet_workers`, then for each class with a positive count, in ascending order, one
    such `rng.choice` among the samples of the class.

    Args:
        samples: number of samples of each worker, at most n.
        alpha: concentration of the class mixture. A smaller alpha gives more label skew. None or inf: no skew. A
            comparison with inf cannot be resumed. Use 1e12 there instead.

    Returns an index array [samples] for labels [n]. Raises ExperimentError if samples > n. Cost: O(samples + C) time
    and memory for a shard, independent of n. Exception: O(n) if more than 5 percent of the samples of a data set or
    class with over 10,000 samples are drawn.

    >>> fedsim.partition(np.arange(100) % 10, "virtual", 2, samples=3)
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
            raise ExperimentError(f"partition.samples = {self.samples}: must be at most the data set's size, {n}")
        if self.alpha is None:
            return rng.choice(n, self.samples, replace=False, shuffle=False)
        if by_class is None:
            raise ExperimentError(
                f"partition.alpha = {self.alpha}: needs one class label per sample, which this data set does not have; "
                "omit partition.alpha"
            )
        sizes = np.array([len(samples) for samples in by_class])
        alphas = np.maximum(self.alpha * len(sizes) * sizes / n, np.finfo(float).tiny)
        counts = draw_counts(self.samples, alphas, sizes, rng)
        chosen = [
            samples[rng.choice(len(samples), count, replace=False, shuffle=False)]
            for samples, count in zip(by_class, counts, strict=True)
            if count
        ]
        return np.concatenate(chosen)

    def size(self, worker: int) -> int:
        """Return the number of samples of a worker, which is `samples` for every worker."""
        return self.samples
