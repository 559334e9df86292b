"""Partitions that do not look at labels."""

from __future__ import annotations

import heapq
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from fedsim.data.partitions.dealing import Concentration, cut_by_shares, draw_until_large_enough, group
from fedsim.data.partitions.strategy import partition_strategy
from fedsim.errors import ExperimentError


@partition_strategy("contiguous")
def contiguous(labels: np.ndarray, n_workers: int) -> list[np.ndarray]:
    """Equal runs in the data set's order; the remainder of the division goes to the last worker.

    Labels [n], result one index array per worker. Cost: O(n).
    """
    size = len(labels) // n_workers
    return np.split(np.arange(len(labels)), [size * worker for worker in range(1, n_workers)])


@partition_strategy("iid")
def iid(labels: np.ndarray, n_workers: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffled, then cut into runs whose sizes differ by at most one.

    Draws: one `rng.permutation(n)`. The first workers have the larger runs.

    Labels [n], result one index array per worker. Cost: O(n).
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
    sigma: Annotated[float, Field(ge=0, le=1e12)] = 1.0,
    min_size: PositiveInt = 1,
) -> list[np.ndarray]:
    """Shuffled, then cut into runs of unequal size, in shares ~ Dir(beta) or lognormal ones.

    Workers' shares q are cut at floor(cumsum(q) n), the last worker with a share taking the rest, so that no sample is
    lost.

    Args:
        distribution: "dirichlet": q ~ Dir(beta, ..., beta), the smaller beta the more unequal (Li et al. 2022,
            "Federated Learning on Non-IID Data Silos"). "lognormal": q_i = e^(sigma z_i) / sum, z_i standard normal;
            sigma = 0 gives equal shares. Each looks at its own parameter only.
        min_size: samples that every worker must get. Shares are drawn anew until they do, at most 1000 times; then,
            or where min_size * n_workers > n, an ExperimentError names the numbers.

    Draws: for each try one `rng.dirichlet` or `rng.normal(0, sigma, n_workers)`; then one `rng.permutation(n)`.

    Labels [n], result one index array per worker. Cost: O(n), and O(n_workers) for each try.
    """
    n = len(labels)

    def draw() -> np.ndarray:
        if distribution == "dirichlet":
            return cut_by_shares(n, rng.dirichlet(np.full(n_workers, beta)))
        logs = rng.normal(0, sigma, n_workers)
        shares = np.exp(logs - logs.max())  # the greatest is 1: nothing overflows
        return cut_by_shares(n, shares / shares.sum())

    if distribution == "dirichlet":
        given, less_skew = f"beta = {beta}", "a larger beta"
    else:
        given, less_skew = f"sigma = {sigma}", "a smaller sigma"
    sizes = draw_until_large_enough(draw, min_size, n, n_workers, given, less_skew)
    return np.split(rng.permutation(n), np.cumsum(sizes)[:-1])


@partition_strategy("natural")
def natural(n_workers: int, ids: np.ndarray) -> list[np.ndarray]:
    """By whose each sample is (writer, user): all samples of one id stay together.

    With as many workers as ids, worker i holds the samples of the i-th id in sorted order. With fewer, whole ids are
    dealt: the one with most samples first (ties: in sorted order) to the worker that holds the fewest samples by then
    (ties: the lowest number). Samples keep the data set's order. Nothing is drawn. Caldas et al. 2018 (LEAF).

    Raises ExperimentError where there are more workers than ids.

    Ids [n], result one index array per worker. Cost: O(n log n).
    """
    names, id_of = np.unique(ids, return_inverse=True)
    if n_workers > len(names):
        raise ExperimentError(
            f'partition.strategy = "natural": {n_workers} workers are more than the {len(names)} different ids'
        )
    if n_workers == len(names):
        return group(np.arange(len(ids)), id_of, n_workers)
    sizes = np.bincount(id_of)
    owner = np.empty(len(names), dtype=np.int64)
    loads = [(0, worker) for worker in range(n_workers)]  # a heap: the least loaded worker first
    for name in np.argsort(-sizes, kind="stable"):
        load, owner[name] = loads[0]
        heapq.heapreplace(loads, (load + int(sizes[name]), int(owner[name])))
    return group(np.arange(len(ids)), owner[id_of], n_workers)
