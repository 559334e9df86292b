"""Pre-aggregators that make new rows of several: nearest neighbours, and buckets."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import PositiveInt

from fedsim.aggregation.gram import Gram, stable_order
from fedsim.aggregation.rule import Count, Mix, pre_aggregator, require


@pre_aggregator("nnm")
def nnm(gram: Gram, *, f: Count) -> Mix:
    """Nearest-neighbour mixing: each row becomes the mean of its n - f nearest, itself included (Allouah et al. 2023).

    Needs f < n. Ties: the lowest index. Updates [n, d], result [n, d]. Cost: one n x n x d matrix product.
    """
    n = len(gram)
    require(f < n, "nnm", "f < n", f=f, n=n)
    away = gram.squared_distances.clone().fill_diagonal_(-1)  # itself before any row that equals it
    mixing = torch.zeros(n, n, dtype=torch.double)
    for row, distances in zip(mixing, away, strict=True):
        row[stable_order(distances)[: n - f]] = 1 / (n - f)
    return Mix(mixing)


@pre_aggregator("bucketing")
def bucketing(workers: list[int], rng: np.random.Generator, *, s: PositiveInt = 2) -> Mix:
    """Rows in random order, in runs of s, each of which becomes its mean (Karimireddy et al. 2022).

    Gives ceil(n / s) rows; the last run may be shorter. The order is rng.permutation(n). Updates [n, d],
    result [ceil(n / s), d]. Cost: n draws, and one pass over the updates.
    """
    order = torch.from_numpy(rng.permutation(len(workers)))
    runs = order.split(s)
    mixing = torch.zeros(len(runs), len(workers), dtype=torch.double)
    for row, run in zip(mixing, runs, strict=True):
        row[run] = 1 / len(run)
    return Mix(mixing)
