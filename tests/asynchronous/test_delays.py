from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.asynchronous.clock import noises
from fedsim.asynchronous.clock.delays import BLOCK, Delays
from fedsim.asynchronous.clock.event_queue import EventQueue
from fedsim.asynchronous.clock.noises import noise
from fedsim.core.randomness import numpy_generator
from tests.asynchronous.clock_tables import delays_of, noise_of

RANDOM = ["shifted_exponential", "lognormal", "pareto"]


def test_seconds_are_the_formula():
    """Twice as slow, 10 steps of 0.25 s, latency 0.5 s, 3,000 bytes at 1,000 a second."""
    delays = Delays(np.array([1.0, 2.0]), noise_of("constant"), base=0.25, latency=0.5, bandwidth=1000.0)
    assert delays.seconds(0, 0, 10) == 2.5  # nothing is sent
    assert delays.seconds(1, 0, 10, 0) == 5.0
    assert delays.seconds(1, 7, 10, 3000) == 8.5
    assert isinstance(delays.seconds(1, 0, 10), float)
    assert Delays(np.array([1.0, 2.0]), noise_of("constant")).seconds(1, 0, 3, 10**15) == 6.0


@pytest.mark.parametrize("name", RANDOM)
def test_noise_is_drawn_as_documented(name):
    params = noise.get(name).check({})
    delays = Delays(np.array([3.0, 0.5]), noise_of(name), seed=4, base=0.1, latency=0.2, bandwidth=50.0)
    for worker, unit in ((0, 0), (1, 0), (1, BLOCK - 1), (1, BLOCK), (0, 10 * BLOCK + 3)):
        rng, place = numpy_generator(4, "delay", worker, unit // BLOCK), unit % BLOCK
        if name == "shifted_exponential":
            factor = rng.standard_exponential(BLOCK)[place]
        elif name == "lognormal":
            sigma = params["sigma"]
            factor = math.exp(sigma * rng.standard_normal(BLOCK)[place] - sigma * sigma / 2)
        else:
            alpha = params["alpha"]
            factor = (rng.pareto(alpha, BLOCK)[place] + 1) * (alpha - 1) / alpha
        expected = 7 * 0.1 * [3.0, 0.5][worker] * factor + 0.2 + 20 / 50.0
        assert delays.seconds(worker, unit, 7, 20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["constant", *RANDOM])
def test_seconds_do_not_depend_on_the_order_of_calls_or_the_number_of_workers(name):
    asked = [(worker, unit) for worker in range(4) for unit in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)]
    fresh = {each: delays_of(4, name, 1).seconds(*each, 1) for each in asked}
    delays = delays_of(1000, name, 1)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(asked).tolist()
        assert all(delays.seconds(worker, unit, 1) == fresh[worker, unit] for worker, unit in order)
    if name != "constant":
        assert len(set(fresh.values())) == len(asked)
        assert delays_of(4, name, 2).seconds(0, 0, 1) != fresh[0, 0]


def test_noise_is_drawn_once_for_a_block_of_units(monkeypatch):
    drawn = []
    monkeypatch.setattr(noises, "numpy_generator", lambda *key: drawn.append(key) or numpy_generator(*key))
    delays = delays_of(10**6, "lognormal")
    drawn.clear()
    for unit in range(3 * BLOCK):
        for worker in range(10, 20):
            delays.seconds(worker, unit, 10, 1000)
    assert len(drawn) == len(set(drawn)) == 3 * 10


@pytest.mark.parametrize(("n", "k", "rate"), [(10, 1, 2.0), (10, 6, 0.5), (10, 10, 1.0)])
def test_the_kth_of_n_exponential_arrivals_has_the_mean_of_order_statistics(n, k, rate):
    """E[T] = (H_n - H_(n-k)) / rate, and the variance is the sum of 1 / (j rate)^2 over j = n-k+1, ..., n."""
    delays, rounds, times = delays_of(n, "shifted_exponential", base=1 / rate), 3000, []
    for round in range(rounds):
        events = EventQueue(pending=[(delays.seconds(worker, round, 1), worker) for worker in range(n)])
        arrived = []
        while len(arrived) < k:
            arrived += events.pop()
        times.append(events.now)
    expected = sum(1 / j for j in range(n - k + 1, n + 1)) / rate
    variance = sum(1 / j**2 for j in range(n - k + 1, n + 1)) / rate**2
    assert np.mean(times) == pytest.approx(expected, abs=4 * math.sqrt(variance / rounds))
