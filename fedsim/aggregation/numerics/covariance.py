"""The n - f points whose covariance has the smallest maximal eigenvalue, by a search of all subsets."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from fedsim.aggregation.numerics.gram import TIED
from fedsim.errors import ExperimentError

LARGEST_SEARCH = 2**17  # subsets; some seconds
AT_ONCE = 2**19  # numbers in the matrices of some subsets


def least_covariance(squared_distances: Tensor, f: int) -> list[int]:
    """The n - f points of least maximal eigenvalue; of several such sets the lexicographically first.

    The covariance of m points has the same maximal eigenvalue as their centred Gram matrix [m, m], divided by m.

    Args:
        squared_distances: [n, n], float64. Subsets with a distance that is not finite come last.

    Raises ExperimentError for more than 2^17 subsets.
    """
    n, size = len(squared_distances), len(squared_distances) - f
    count = math.comb(n, f)
    if count > LARGEST_SEARCH:
        raise ExperimentError(
            f"smea: {count:.3g} subsets of {size} of {n} rows are too many to search; use a smaller f, or caf"
        )
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
