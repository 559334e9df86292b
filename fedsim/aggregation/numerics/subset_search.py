"""The n - f points of least diameter, and those of least variance in any direction, by a bounded search."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fedsim.aggregation.numerics.gram import TIED
from fedsim.errors import ExperimentError

MOST_BRANCHES = 2**20  # branches; some seconds
MOST_SUBSETS = 2**17  # subsets; some seconds
AT_ONCE = 2**19  # numbers in the matrices of some subsets


def least_diameter(distances: Tensor, f: int) -> list[int]:
    """Return the n - f points with the least greatest pairwise distance.

    Of several such sets the lexicographically first.

    A diameter D is possible if f points cover the graph whose edges are the pairs farther apart than D. To remove one
    end of every edge is a search tree of depth f. The least D is found by bisection.

    Args:
        distances: [n, n], symmetric; any increasing function of the distance.

    Raises ExperimentError if the search could take more than 2^20 branches.
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


def least_covariance(squared_distances: Tensor, f: int) -> list[int]:
    """Return the n - f points of least maximal eigenvalue; of several such sets the lexicographically first.

    The covariance of m points has the same maximal eigenvalue as their centred Gram matrix [m, m], divided by m.

    Args:
        squared_distances: [n, n], float64. Subsets with a distance that is not finite come last.

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
    """The maximal eigenvalue of the centred Gram matrix of each of the `subsets` [count, m]; infinite if not finite."""
    squares = squared_distances[subsets.unsqueeze(2), subsets.unsqueeze(1)]
    to_all = squares.mean(2)
    grams = (to_all.unsqueeze(2) + to_all.unsqueeze(1) - squares - to_all.mean(1).view(-1, 1, 1)) / 2
    finite = grams.isfinite().all(2).all(1)
    return torch.full((len(subsets),), math.inf, dtype=torch.double).masked_scatter(
        finite, torch.linalg.eigvalsh(grams[finite])[:, -1]
    )


def _too_many(rule: str, n: int, f: int, instead: str) -> ExperimentError:
    return ExperimentError(
        f"{rule}: {math.comb(n, f):.3g} subsets of {n - f} of {n} rows are too many to search; use a smaller f, or "
        f"{instead}"
    )
