"""Mean shift (Comaniciu and Meer 2002): clusters of a few points, without their number."""

from __future__ import annotations

import numpy as np

MAX_STEPS = 300
CONVERGED = 1e-3  # a step that is shorter than this part of the bandwidth is the last
ROUNDING = 1e-9  # a distance that exceeds the bandwidth by this part of it is equal to it


def bandwidth_of(points: np.ndarray) -> float:
    """Return the mean distance of the points [n, features] to their n/2-th nearest point, themselves included.

    >>> bandwidth_of(np.array([[0.0], [1.0], [3.0], [6.0]]))
    1.75
    """
    nearest = np.sort(_distances(points, points), axis=1)
    return float(nearest[:, max(len(points) // 2, 1) - 1].mean())


def mean_shift(points: np.ndarray, bandwidth: float) -> np.ndarray:
    """Return the cluster of each point [n, features]: labels [n] from 0; -1 for a point that is near no centre.

    From the middle of each grid cell that holds points, a centre moves to the mean of the points within the bandwidth,
    until it stays. Of centres within the bandwidth of each other, the one with the most points remains. A point belongs
    to the nearest centre that is within the bandwidth. Cost: n distances for each cell and step.

    >>> mean_shift(np.array([[0.0], [0.1], [5.0], [0.2]]), 1.0)
    array([0, 0, 1, 0])
    """
    bandwidth *= 1 + ROUNDING
    cells = np.unique(np.round(points / bandwidth), axis=0)
    seeds = points if len(cells) == len(points) else cells * bandwidth
    modes = [ended for seed in seeds if (ended := _climb(points, seed, bandwidth)) is not None]
    modes.sort(key=lambda ended: (ended[0], tuple(ended[1])), reverse=True)
    centres: list[np.ndarray] = []
    for _, centre in modes:
        if not centres or _distances(centre[None], np.array(centres)).min() > bandwidth:
            centres.append(centre)
    if not centres:
        return np.full(len(points), -1)
    distances = _distances(points, np.array(centres))
    return np.where(distances.min(axis=1) <= bandwidth, distances.argmin(axis=1), -1)


def _climb(points: np.ndarray, centre: np.ndarray, bandwidth: float) -> tuple[int, np.ndarray] | None:
    """Return the number of points near the last centre, and that centre; None if no points are near."""
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
