"""The n - f points of least diameter, by a bounded search."""

from __future__ import annotations

import math

from torch import Tensor

from fedsim.aggregation.numerics.gram import TIED
from fedsim.errors import ExperimentError

LARGEST_SEARCH = 2**20  # branches; some seconds


def least_diameter(distances: Tensor, f: int) -> list[int]:
    """The n - f points with the least greatest pairwise distance; of several such sets the lexicographically first.

    A diameter D is possible if f points cover the graph whose edges are the pairs farther apart than D. To remove one
    end of every edge is a search tree of depth f. The least D is found by bisection.

    Args:
        distances: [n, n], symmetric; any increasing function of the distance.

    Raises ExperimentError if the search could take more than 2^20 branches.
    """
    n, size = len(distances), len(distances) - f
    subsets = math.comb(n, f)
    if min(2**f, subsets) > LARGEST_SEARCH:
        raise ExperimentError(
            f"mda: {subsets:.3g} subsets of {size} of {n} rows are too many to search; use a smaller f, or multi_krum"
        )
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
        dropped = edges[point] & alive  # if the point is chosen
        if _coverable(edges, f - dropped.bit_count(), alive & ~dropped):
            chosen.append(point)
        else:
            dropped = 1 << point
        alive &= ~dropped
        f -= dropped.bit_count()
    return chosen[:size]


def _too_far(distances: Tensor, diameter: float) -> list[int]:
    """For each point, the points farther away than `diameter`, as bits."""
    far = distances > diameter * (1 + TIED)
    return [sum(1 << j for j in row.nonzero().flatten().tolist()) for row in far]


def _coverable(edges: list[int], budget: int, alive: int) -> bool:
    """Whether `budget` points touch every edge among the points `alive`."""
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
