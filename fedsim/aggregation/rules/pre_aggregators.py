"""Pre-aggregators that average groups of updates: nearest-neighbour mixing and bucketing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.gram import Gram, stable_order
from fedsim.aggregation.rule import ByzantineCount, LinearCombination, pre_aggregator, require
from fedsim.core.numbers import PositiveInt


@pre_aggregator("nnm")
def nnm(gram: Gram, *, f: ByzantineCount) -> LinearCombination:
    """Replace each update by the mean of its n - f nearest updates (nearest-neighbour mixing, Allouah et al. 2023).

    The nearest updates include the update itself. Of equally near updates, those of the first workers are chosen.

    Args:
        gram: distances and inner products of the updates [n, d].
        f: number of Byzantine workers, f < n.

    Returns the mixed updates [n, d]. Cost: one n x n x d matrix product.

    >>> fedsim.pre_aggregate(torch.tensor([[0.0], [1.0], [9.0]]), "nnm", f=1)
    tensor([[0.5000],
            [0.5000],
            [5.0000]])
    """
    n = len(gram)
    require(f < n, "nnm", "f < n", f=f, n=n)

    def away_of(squares: Tensor) -> Tensor:
        return squares.clone().fill_diagonal_(-1)  # a row comes before rows that are equal to it

    away, mixing = away_of(gram.squares_deciding(away_of, n - f)), torch.zeros(n, n, dtype=torch.double)
    return LinearCombination(mixing.scatter_(1, stable_order(away)[:, : n - f], 1 / (n - f)))


@pre_aggregator("bucketing")
def bucketing(workers: list[int], rng: np.random.Generator, *, s: PositiveInt = 2) -> LinearCombination:
    """Divide the updates at random into buckets of s updates, and average each bucket (Karimireddy et al. 2022).

    The random order is rng.permutation(n). The last bucket may be smaller than the others.

    Args:
        workers: IDs of the n workers.
        rng: draws the order.
        s: number of updates in a bucket, >= 1.

    Returns the bucket means [ceil(n / s), d] of updates [n, d]. Cost: n draws, and one pass over the updates.

    >>> fedsim.pre_aggregate(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), "bucketing", s=2, seed=1)
    tensor([[1.],
            [2.]])
    """
    order = torch.from_numpy(rng.permutation(len(workers)))
    runs = order.split(s)
    mixing = torch.zeros(len(runs), len(workers), dtype=torch.double)
    for row, run in zip(mixing, runs, strict=True):
        row[run] = 1 / len(run)
    return LinearCombination(mixing)
