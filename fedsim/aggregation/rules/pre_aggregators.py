"""Pre-aggregators that average several rows: nearest neighbours, and buckets."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import PositiveInt

from fedsim.aggregation.numerics.gram import Gram, stable_order
from fedsim.aggregation.rule import Count, LinearCombination, pre_aggregator, require


@pre_aggregator("nnm")
def nnm(gram: Gram, *, f: Count) -> LinearCombination:
    """Nearest-neighbour mixing: each row becomes the mean of its n - f nearest rows (Allouah et al. 2023).

    A row is its own nearest row. Ties go to the lowest index.

    Args:
        gram: of the updates [n, d].
        f: number of Byzantine rows, f < n.

    Returns rows [n, d]. Cost: one n x n x d matrix product.

    >>> fedsim.pre_aggregate(torch.tensor([[0.0], [1.0], [9.0]]), "nnm", f=1)
    tensor([[0.5000],
            [0.5000],
            [5.0000]])
    """
    n = len(gram)
    require(f < n, "nnm", "f < n", f=f, n=n)
    away = gram.squared_distances.clone().fill_diagonal_(-1)  # itself before any row that equals it
    mixing = torch.zeros(n, n, dtype=torch.double)
    return LinearCombination(mixing.scatter_(1, stable_order(away)[:, : n - f], 1 / (n - f)))


@pre_aggregator("bucketing")
def bucketing(workers: list[int], rng: np.random.Generator, *, s: PositiveInt = 2) -> LinearCombination:
    """The rows in random order are cut into buckets of s rows; each bucket becomes its mean (Karimireddy et al. 2022).

    The order is rng.permutation(n). The last bucket may be smaller.

    Args:
        workers: the n workers' numbers.
        rng: draws the order.
        s: rows of a bucket, >= 1.

    Returns rows [ceil(n / s), d] of updates [n, d]. Cost: n draws, and one pass over the updates.

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
