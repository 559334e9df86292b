"""The time that a work item takes on the virtual clock.

    seconds = gradients * base * speed[worker] * noise(worker, unit) + latency + bytes / bandwidth

`gradients` counts the gradients of a batch that the client algorithm computes: with `sgd` one for each local step, see
`ClientAlgorithm.gradients`. Work items that send nothing have no latency and no bytes. `unit` counts the work items of
a worker from 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from fedsim.asynchronous.clock.noises import BoundNoise

BLOCK = 256  # units of a worker whose noise is drawn together; another number gives other draws
CACHED_BLOCKS = 2**15  # less than 100 MB


class Delays:
    """How many virtual seconds each work item takes.

    The noise is a pure function of (seed, worker, unit), so all policies see the same delays.

    Args:
        speeds: each worker's factor of time, [n_workers], positive.
        noise: the factor of each unit's time.
        base: seconds of one gradient of a batch with both factors 1.
        latency: seconds of communication for each work item that sends anything.
        bandwidth: bytes per second between worker and server; None: infinite.

    Raises ExperimentError if the noise cannot be drawn (for example, its trace file does not exist).
    """

    def __init__(
        self,
        speeds: np.ndarray,
        noise: BoundNoise,
        seed: int = 0,
        base: float = 1.0,
        latency: float = 0.0,
        bandwidth: float | None = None,
    ) -> None:
        self.speeds, self.noise, self.seed = speeds, noise, seed
        self.base, self.latency = base, latency
        self._bandwidth = math.inf if bandwidth is None else bandwidth
        # As a memoryview, whose items are Python floats, which are fast.
        self._seconds_per_gradient = (base * np.asarray(speeds, dtype=np.float64)).data
        self._block = lru_cache(CACHED_BLOCKS)(self._draw_block)
        self._block(0, 0)  # so that a wrong noise raises its error before the run

    def seconds(self, worker: int, unit: int, gradients: float, bytes: float = 0) -> float:
        """Seconds of a work item of so many gradients that sends and receives `bytes` together."""
        block, place = divmod(unit, BLOCK)
        computing = gradients * self._seconds_per_gradient[worker] * self._block(worker, block)[place]
        return computing + self.latency + bytes / self._bandwidth if bytes else computing

    def _draw_block(self, worker: int, block: int) -> memoryview:
        return np.ascontiguousarray(self.noise(self.seed, worker, block * BLOCK, BLOCK, len(self.speeds))).data
