"""Mean-shift clustering of a few points (Comaniciu and Meer 2002). The number of clusters need not be known."""

from __future__ import annotations

import numpy as np

MAX_STEPS = 300
CONVERGED = 1e-3  # a centre has converged when it moves by less than this fraction of the bandwidth
ROUNDING = 1e-9  # relative tolerance when a distance is compared with the bandwidth


def bandwidth_of(points: np.ndarray) -> float:
    """Return a bandwidth for `mean_shift`: the mean distance of a point [features] to its n/2-th nearest point.

    Each of the n points counts as its own nearest point.

    >>> bandwidth_of(np.array([[0.0], [1.0], [3.0], [6.0]]))
    1.75
    """
    nearest = np.sort(_distances(points, points), axis=1)
    return float(nearest[:, max(len(points) // 2, 1) - 1].mean())


def mean_shift(points: np.ndarray, bandwidth: float) -> np.ndarray:
    """Return the cluster label [n] of each point [n, features]: 0, 1, ..., or -1 for a point that is near no centre.

    The points are divided into grid cells. In each cell that contains points, a candidate centre starts. It moves
    repeatedly to the mean of the points within `bandwidth`, until it converges. If several centres are within
    `bandwidth` of each other, only the one with the most points is kept. A point belongs to the nearest centre within
    `bandwidth`. Cost: n distances for each cell and step.

    >>> mean_shift(np.array([[0.0], [0.1], [5.0], [0.2]]), 1.0)
    array([0, 0, 1, 0])
    """
    bandwidth *= 1 + ROUNDING
    cells = np.unique(np.round(points / bandwidth), axis=0)
    seeds = points if len(cells) == len(points) else cells * bandwidth
    modes = [mode for seed in seeds if (mode := _climb(points, seed, bandwidth)) is not None]
    modes.sort(key=lambda mode: (mode[0], tuple(mode[1])), reverse=True)
    centres: list[np.ndarray] = []
    for _, centre in modes:
        if not centres or _distances(centre[None], np.array(centres)).min() > bandwidth:
            centres.append(centre)
    if not centres:
        return np.full(len(points), -1)
    distances = _distances(points, np.array(centres))
    return np.where(distances.min(axis=1) <= bandwidth, distances.argmin(axis=1), -1)


def _climb(points: np.ndarray, centre: np.ndarray, bandwidth: float) -> tuple[int, np.ndarray] | None:
    """Move a cluster centre [features] until it converges.

    Returns the number of points within `bandwidth` and the centre, or None if there are no such points.
    """
    for _ in range(MAX_STEPS + 1):
        near = points[_distances(centre[None], points)[0] <= bandwidth]
        if not len(near):
            return None
        before, centre = centre, np.asarray(near.mean(axis=0))
        if np.linalg.norm(centre - before) <= CONVERGED * bandwidth:
            break
    return len(near), centre


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.linalg.norm(left[:, None] - right[None], axis=2)
