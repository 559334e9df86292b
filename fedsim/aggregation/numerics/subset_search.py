"""Search for the n - f of n points with the smallest diameter or the smallest maximal variance in any direction.

Searches that would take too long raise an error.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fedsim.aggregation.numerics.gram import TIED
from fedsim.errors import ExperimentError

MOST_BRANCHES = 2**20  # maximum number of branches, which take some seconds
MOST_SUBSETS = 2**17  # maximum number of subsets, which take some seconds
AT_ONCE = 2**19  # maximum numbers in the Gram matrices that are in memory at once


def least_diameter(distances: Tensor, f: int) -> list[int]:
    """Return the positions of the n - f points whose largest pairwise distance (the diameter) is smallest.

    If several sets have the same diameter, the lexicographically first one is returned.

    Args:
        distances: distances (or squared distances) of all pairs of points, symmetric [n, n].
        f: number of points to exclude.

    Raises ExperimentError if the search could need more than 2^20 branches.
    """
    n, size = len(distances), len(distances) - f
    if min(2**f, math.comb(n, f)) > MOST_BRANCHES:
        raise _too_many("mda", n, f, "multi_krum")
    everything = (1 << n) - 1
    candidates = sorted({0.0, *distances.flatten().tolist()})
    low, high = 0, len(candidates) - 1  # the largest diameter is always possible
    while low < high:
        middle = (low + high) // 2
        if _coverable(_too_far(distances, candidates[middle]), f, everything):
            high = middle
        else:
            low = middle + 1
    edges, alive, chosen = _too_far(distances, candidates[low]), everything, []
    for point in range(n):
        if not alive >> point & 1:
            continue
        dropped = edges[point] & alive  # points to exclude if `point` is chosen
        if _coverable(edges, f - dropped.bit_count(), alive & ~dropped):
            chosen.append(point)
        else:
            dropped = 1 << point
        alive &= ~dropped
        f -= dropped.bit_count()
    return chosen[:size]


def _too_far(distances: Tensor, diameter: float) -> list[int]:
    """Return one integer per point i, in which bit j is set if point j is farther than `diameter` from point i."""
    far = distances > diameter * (1 + TIED)
    return [sum(1 << j for j in row.nonzero().flatten().tolist()) for row in far]


def _coverable(edges: list[int], budget: int, alive: int) -> bool:
    """Whether at most `budget` points cover all edges between the points `alive` of a graph (vertex cover).

    Sets of points are integers: bit i of `alive` is set if it contains point i. edges[i] is the set of neighbours of
    point i.
    """
    if budget < 0:
        return False
    degrees = [((edges[i] & alive).bit_count(), i) for i in range(len(edges)) if alive >> i & 1]
    degree, point = max(degrees, default=(0, 0))
    if degree == 0:
        return True
    if sum(d for d, _ in degrees) > 2 * budget * degree:  # each point covers at most `degree` edges
        return False
    without = alive & ~(1 << point)
    return _coverable(edges, budget - 1, without) or _coverable(edges, budget - degree, without & ~edges[point])


def least_covariance(squared_distances: Tensor, f: int) -> list[int]:
    """Return the positions of the n - f points whose covariance has the smallest maximal eigenvalue.

    If several sets have the same eigenvalue, the lexicographically first one is returned.

    Args:
        squared_distances: squared distances of all pairs of points, float64 [n, n].
        f: number of points to exclude.

    Raises ExperimentError for more than 2^17 subsets.
    """
    n, size = len(squared_distances), len(squared_distances) - f
    count = math.comb(n, f)
    if count > MOST_SUBSETS:
        raise _too_many("smea", n, f, "caf")
    subsets = torch.tensor(list(itertools.combinations(range(n), size)))  # in lexicographic order
    values = torch.cat([_top_eigenvalues(squared_distances, part) for part in subsets.split(-(-AT_ONCE // size**2))])
    return subsets[int((values <= values.min() * (1 + TIED)).nonzero()[0])].tolist()


def _top_eigenvalues(squared_distances: Tensor, subsets: Tensor) -> Tensor:
    """Return the largest eigenvalue of the centred Gram matrix for each subset of points, [count].

    Each line of `subsets` [count, m] contains the positions of the m points in a subset.
    """
    squares = squared_distances[subsets.unsqueeze(2), subsets.unsqueeze(1)]
    to_all = squares.mean(2)
    grams = (to_all.unsqueeze(2) + to_all.unsqueeze(1) - squares - to_all.mean(1).view(-1, 1, 1)) / 2
    finite = grams.isfinite().all(2).all(1)
    return torch.full((len(subsets),), math.inf, dtype=torch.double).masked_scatter(
        finite, torch.linalg.eigvalsh(grams[finite])[:, -1]
    )


def _too_many(rule: str, n: int, f: int, instead: str) -> ExperimentError:
    return ExperimentError(
        f"{rule}: {math.comb(n, f):.3g} subsets of {n - f} of {n} updates are too many to search; use a smaller f, or "
        f"the rule {instead}"
    )
