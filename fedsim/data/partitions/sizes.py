"""Partitions that do not depend on labels."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from fedsim.core.numbers import Limits, PositiveInt
from fedsim.data.partitions.allocation import Concentration, cut_by_shares, draw_until_large_enough
from fedsim.data.partitions.base import partition_strategy


@partition_strategy("contiguous")
def contiguous(labels: np.ndarray, n_workers: int) -> list[np.ndarray]:
    """Cut the samples, in the data set's order, into equal contiguous pieces. The last worker also gets the remainder.

    Args:
        labels: target of every sample, [n] or [n, ...]. Only the number of samples is used.
        n_workers: number of shards.

    Returns one index array per worker. Cost: O(n).

    >>> fedsim.partition(np.zeros(5), "contiguous", 2)
    [array([0, 1]), array([2, 3, 4])]
    """
    size = len(labels) // n_workers
    return np.split(np.arange(len(labels)), [size * worker for worker in range(1, n_workers)])


@partition_strategy("iid")
def iid(labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle the samples and cut them into shards whose sizes differ by at most one, larger ones first.

    Draws: one `rng.permutation(n)`.

    Args:
        labels: target of every sample, [n] or [n, ...]. Only the number of samples is used.
        n_workers: number of shards.
        rng: for all draws.

    Returns one index array per worker. Cost: O(n).

    >>> fedsim.partition(np.zeros(5), "iid", 2)
    [array([0, 4, 2]), array([3, 1])]
    """
    return np.array_split(rng.permutation(len(labels)), n_workers)


@partition_strategy("quantity")
def quantity(
    labels: np.ndarray,
    n_workers: int,
    rng: np.random.Generator,
    *,
    distribution: Literal["dirichlet", "lognormal"] = "dirichlet",
    beta: Concentration = 0.5,
    sigma: Annotated[float, Limits(ge=0, le=1e12)] = 1.0,
    min_size: PositiveInt = 1,
) -> list[np.ndarray]:
    """Shuffle the samples and cut them into shards of unequal sizes, by Dirichlet or lognormal shares.

    With shares q, the shuffled samples are cut at floor(cumsum(q) n). The last worker with a share above zero gets the
    rest. Li et al. 2022, "Federated Learning on Non-IID Data Silos".

    Draws: for each try one `rng.dirichlet` or `rng.normal(0, sigma, n_workers)`, then one `rng.permutation(n)`.

    Args:
        labels: target of every sample, [n] or [n, ...]. Only the number of samples is used.
        n_workers: number of shards.
        rng: for all draws.
        distribution: "dirichlet": q ~ Dir(beta, ..., beta). "lognormal": q_i is proportional to e^(sigma z_i) with
            standard normal z_i.
        beta: concentration of the Dirichlet shares, > 0. A smaller beta gives more unequal sizes.
        sigma: standard deviation of the lognormal shares' logarithms, >= 0. 0 gives equal sizes.
        min_size: minimum number of samples per worker. Shares are redrawn until it is reached, at most 1000 times.

    Returns one index array per worker. Raises ExperimentError if min_size is not reached. Cost: O(n), plus O(n_workers)
    for each try.

    >>> [len(shard) for shard in fedsim.partition(np.zeros(100), "quantity", 3, beta=1.0)]
    [86, 8, 6]
    """
    n = len(labels)

    def draw() -> np.ndarray:
        if distribution == "dirichlet":
            return cut_by_shares(n, rng.dirichlet(np.full(n_workers, beta)))
        logs = rng.normal(0, sigma, n_workers)
        shares = np.exp(logs - logs.max())  # the largest is 1, so nothing overflows
        return cut_by_shares(n, shares / shares.sum())

    if distribution == "dirichlet":
        parameters, less_skew = f"beta = {beta}", "a larger beta"
    else:
        parameters, less_skew = f"sigma = {sigma}", "a smaller sigma"
    sizes = draw_until_large_enough(draw, min_size, n, n_workers, parameters, less_skew)
    return np.split(rng.permutation(n), np.cumsum(sizes)[:-1])
