"""Rules for graphs without a server, where each worker aggregates its neighbours' models and its own model.

`own` is the position of the worker's own row. A vector that is added to all rows is also added to the result. So the
rows may be models x_j, or differences x_j - x_i to the own model x_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_on_device, on_host
from fedsim.aggregation.numerics.gram import Gram, stable_order
from fedsim.aggregation.rule import ByzantineCount, LinearCombination, require, rule
from fedsim.aggregation.rules.clipping import clip_factors
from fedsim.aggregation.rules.order_statistics import trimmed_mean
from fedsim.core.numbers import PositiveFloat


@rule("clipped_gossip")
def clipped_gossip(
    updates: Tensor, weights: Tensor, own: int, *, f: ByzantineCount, tau: PositiveFloat | None = None
) -> LinearCombination:
    """Average the neighbours' rows after clipping their distances from the own row (ClippedGossip, He et al. 2022).

    The paper is "Byzantine-Robust Decentralized Learning via ClippedGossip", in an earlier version "via Self-Centered
    Clipping". The result is x_i + sum_j W_ij (x_j - x_i) min(1, tau / |x_j - x_i|) for the own row x_i. Without `tau`,
    tau^2 is the sum of W_ij |x_j - x_i|^2 over all except the f farthest rows, divided by the sum of the weights of the
    f farthest rows. (The authors' code uses the second largest distance instead.)

    Args:
        updates: rows x_j of the n workers, [n, d].
        weights: weights W_ij, [n]. They are divided by their sum.
        own: position of the own row x_i.
        f: number of Byzantine neighbours, f < n. 0: nothing is clipped. Only used without `tau`.
        tau: maximum distance from x_i that is not clipped, > 0. None: see above.

    Returns the average [d]. Cost: two passes over the rows.

    >>> models = torch.tensor([[0.0], [1.0], [2.0], [99.0]])
    >>> fedsim.aggregate(models, "clipped_gossip", own=0, f=1, tau=2.0)
    tensor([1.2500])
    """
    n = len(updates)
    require(f < n, "clipped_gossip", "f < n", f=f, n=n)
    distances, weights = on_host(distances_on_device(updates, updates[own]), weights)
    shares = weights / weights.sum()
    if tau is None:
        farthest = stable_order(-distances)[:f]  # of equally far rows, those of the first workers
        near, far = shares.clone(), float(shares[farthest].sum())
        near[farthest] = 0
        tau = math.sqrt(float((near * distances.square()).sum()) / far) if far > 0 else math.inf
    coefficients = shares * clip_factors(distances, tau)
    coefficients[own] = 0
    coefficients[own] = 1 - coefficients.sum()
    return LinearCombination(coefficients)


@rule("ios")
def ios(gram: Gram, weights: Tensor, own: int, *, f: ByzantineCount) -> LinearCombination:
    """Remove the row farthest from the weighted mean f times, then average (iterative outlier scissor, Wu et al. 2023).

    The paper is "Byzantine-Resilient Decentralized Stochastic Optimization With Robust Aggregation Rules". Each step
    computes the mean of the remaining rows, and removes the row farthest from this mean, except the own row. Of equally
    far rows, the first worker's row is removed.

    Args:
        gram: distances and inner products of the rows of the n workers, [n, d].
        weights: weights W_ij of the rows in the mean, [n]. In each step, they are divided by their sum.
        own: position of the own row, which is never removed.
        f: number of Byzantine neighbours, f < n.

    Returns the weighted mean [d] of the remaining rows. Cost: one n x n x d matrix product.

    >>> models = torch.tensor([[0.0], [1.0], [2.0], [99.0]])
    >>> fedsim.aggregate(models, "ios", own=0, f=1)
    tensor([1.])
    """
    n = len(gram)
    require(f < n, "ios", "f < n", f=f, n=n)
    shares = (weights / weights.sum()).numpy()
    neighbours = [position for position in range(n) if position != own]
    for _ in range(f):
        distances = gram.distances_to(shares)[neighbours]
        shares[neighbours.pop(int(stable_order(torch.from_numpy(-distances))[0]))] = 0
        require(bool(shares.any()), "ios", "a row with a weight > 0 after the removal of f rows", f=f, n=n)
        shares /= shares.sum()
    return LinearCombination(torch.from_numpy(shares))


@rule("bridge", columnwise=True)
def bridge(updates: Tensor, own: int, *, f: ByzantineCount) -> Tensor:
    """Average the own row and the f-trimmed neighbours' rows, for each coordinate (BRIDGE-T, Fang et al. 2022).

    In each coordinate, the f largest and the f smallest values of the neighbours are dropped. The result is the mean of
    the remaining values and the own value, which is never dropped. (In the authors' code, it may be dropped.) ByRDiE
    (Yang and Bajwa 2019) uses the same average, but updates one coordinate at a time.

    Args:
        updates: rows of the n workers, [n, d].
        own: position of the own row.
        f: number of Byzantine neighbours, n >= 2f + 2. For n = 1 and f = 0, the result is the own row.

    Returns the mean [d]. Cost: n log n comparisons per coordinate.

    >>> models = torch.tensor([[0.0], [1.0], [2.0], [99.0]])
    >>> fedsim.aggregate(models, "bridge", own=0, f=1)
    tensor([1.])
    """
    n = len(updates)
    if n == 1 and f == 0:
        return updates[own].clone()
    require(n >= 2 * f + 2, "bridge", "n >= 2f + 2", f=f, n=n)
    share = 1 / (n - 2 * f)
    neighbours = torch.cat([updates[:own], updates[own + 1 :]])
    return trimmed_mean(neighbours, f=f).mul_(1 - share).add_(updates[own], alpha=share)
