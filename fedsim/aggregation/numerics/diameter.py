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
    n = len(distances)
    subsets = math.comb(n, f)
    if min(2**f, subsets) > LARGEST_SEARCH:
        raise ExperimentError(
            f"mda: {subsets:.3g} subsets of {n - f} of {n} rows are too many to search; use a smaller f, or multi_krum"
        )
    candidates = sorted({0.0, *distances.flatten().tolist()})
    low, high = 0, len(candidates) - 1  # the largest diameter is always possible
    while low < high:
        middle = (low + high) // 2
        if _coverable(_too_far(distances, candidates[middle]), f):
            high = middle
        else:
            low = middle + 1
    return _first_set(_too_far(distances, candidates[low]), n - f)


def _too_far(distances: Tensor, diameter: float) -> list[int]:
    """For each point, the points farther away than `diameter`, as bits."""
    far = distances > diameter * (1 + TIED)
    return [sum(1 << j for j in row.nonzero().flatten().tolist()) for row in far]


def _coverable(edges: list[int], budget: int, alive: int | None = None) -> bool:
    """Whether `budget` points touch every edge among the points `alive`."""
    alive = (1 << len(edges)) - 1 if alive is None else alive
    degrees = [((edges[i] & alive).bit_count(), i) for i in range(len(edges)) if alive >> i & 1]
    degree, point = max(degrees, default=(0, 0))
    if degree == 0:
        return True
    if budget <= 0 or sum(d for d, _ in degrees) > 2 * budget * degree:  # each point covers at most `degree` edges
        return False
    without = alive & ~(1 << point)
    if _coverable(edges, budget - 1, without):
        return True
    others = edges[point] & without  # if the point stays, all points too far from it go
    return degree <= budget and _coverable(edges, budget - degree, without & ~others)


def _first_set(edges: list[int], size: int) -> list[int]:
    """The lexicographically first `size` points without an edge among them, which must exist."""
    chosen: list[int] = []
    alive, budget = (1 << len(edges)) - 1, len(edges) - size
    for point in range(len(edges)):
        if len(chosen) == size:
            break
        if not alive >> point & 1:
            continue
        goes = edges[point] & alive
        rest = alive & ~goes & ~(1 << point)
        if goes.bit_count() <= budget and _coverable(edges, budget - goes.bit_count(), rest):
            chosen.append(point)
            budget -= goes.bit_count()
            alive &= ~goes
        else:
            alive &= ~(1 << point)
            budget -= 1
    return chosen
