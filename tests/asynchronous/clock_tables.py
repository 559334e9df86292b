"""Speeds, noise and delays of an experiment's tables."""

from __future__ import annotations

import numpy as np

from fedsim.asynchronous.clock.delays import Delays
from fedsim.asynchronous.clock.noises import bind_noise
from fedsim.asynchronous.clock.speeds import draw_speeds
from fedsim.config.schema import Noise, Speed


def speeds_of(n_workers, name, seed=0, **params):
    table = Speed(name=name, **params)
    return draw_speeds(table.plug, table.params, n_workers, seed)


def noise_of(name, **params):
    table = Noise(name=name, **params)
    return bind_noise(table.plug, table.params)


def delays_of(n_workers, name, seed=0, *, base=1.0, latency=0.0, bandwidth=None, **params):
    return Delays(np.ones(n_workers), noise_of(name, **params), seed, base, latency, bandwidth)


def factors_of(name, seed=0, *, workers=200, units=1000, **params):
    """The factors of many units of many workers, in one array."""
    unit = delays_of(workers, name, seed, **params)
    return np.array([unit.seconds(worker, k, 1) for worker in range(workers) for k in range(units)])
